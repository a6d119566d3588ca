"""SqueezeBERT (Iandola et al., 2020): BERT whose matrices are convolutions of width 1 in groups.

A convolution in four groups is a matrix of four blocks, with zeros around them, and here it is one. So a converted
model computes more than the official one. Training fills the zeros, after which it can go out as BERT.
"""

from dataclasses import dataclass, replace

from ..rules.block_diagonal import BlockDiagonal
from ..rules.table import RuleTable
from ..values import TOKEN_TYPES, Computed
from .base import Family
from .bert import EMBEDDINGS, LANGUAGE_MODEL, STRUCTURE
from .bert_like import EncoderNames, EncoderSettings
from .encoder_heads import encoder_heads

GROUPS = {"query": 4, "key": 4, "value": 4, "post_attention": 1, "intermediate": 4, "output": 4}
"""Module of a layer -> the groups of every released model."""


@dataclass(kw_only=True, eq=False)
class GroupedNames(EncoderNames):
    """The names of an encoder whose matrices lie in blocks."""

    def layout(self, variant, config):
        """See `Names.layout`."""
        table = super().layout(variant, config)
        ops = {
            f".{name}{conv}.weight": BlockDiagonal(groups)
            for name, groups in GROUPS.items()
            for conv in ("", ".conv1d")
        }
        rules = [
            replace(rule, op=next((op for end, op in ops.items() if str(rule.source).endswith(end)), rule.op))
            if "{layer}" in str(rule.source)
            else rule
            for rule in table.rules
        ]
        return RuleTable(rules, table.ignored, table.layers)


FAMILY = Family(
    "squeezebert",
    encoder_heads(
        "SqueezeBertModel SqueezeBertForMaskedLM SqueezeBertForSequenceClassification SqueezeBertForMultipleChoice "
        "SqueezeBertForTokenClassification SqueezeBertForQuestionAnswering",
        Model={"pooler": "needed"},
    ),
    structure={**STRUCTURE, "norm_eps": 1e-12},
    names=GroupedNames(
        root="transformer.",
        embeddings=EMBEDDINGS,
        layer="encoder.layers.{layer}.",
        modules={
            "attention.query": "self_attn.q_proj",
            "attention.key": "self_attn.k_proj",
            "attention.value": "self_attn.v_proj",
            "post_attention.conv1d": "self_attn.o_proj",
            "post_attention.layernorm": "self_attn_post_norm",
            "intermediate.conv1d": "mlp.up_proj",
            "output.conv1d": "mlp.down_proj",
            "output.layernorm": "mlp_post_norm",
        },
        language_model=LANGUAGE_MODEL,
    ),
    settings=EncoderSettings(
        computed=[TOKEN_TYPES, Computed(writer=lambda config, head: {"embedding_size": config.hidden_size})],
        unsupported={
            "layer_norm_eps": (1e-12,),  # which only the norms outside of the layers follow
            **{f"{name[0]}_groups": (4,) for name in ("query", "key", "value")},
            "post_attention_groups": (1,),
            "intermediate_groups": (4,),
            "output_groups": (4,),
        },
    ),
)
