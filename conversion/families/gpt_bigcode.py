"""SantaCoder and StarCoder (BigCode, 2023): GPT-2 with one key/value head, and matrices the usual way round."""

from ..rules.operations import Split
from ..values import Computed, Flag, InnerSize
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .gpt2 import LINEAR, MASKS, NORMS, OUTER
from .gpt_neox import by_head
from .shared import GPT, QKV, fields_without


def split(config, rows):
    """One key/value head comes last; as many as query heads are side by side with theirs."""
    return Split(0, rows) if config.num_key_value_heads == 1 else by_head(config, rows)


KEYS = Computed(
    lambda official: {"num_key_value_heads": 1 if official.config.multi_query else official.config.n_head},
    lambda config, head: {"multi_query": config.num_key_value_heads == 1},
)
FAMILY = Family(
    "gpt_bigcode",
    "GPTBigCodeForCausalLM GPTBigCodeModel GPTBigCodeForSequenceClassification GPTBigCodeForTokenClassification",
    structure={**GPT, "position_type": "learned"},
    fresh={
        "hidden_act": "gelu_pytorch_tanh",
        "norm_eps": 1e-5,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    names=DecoderNames(
        root="transformer.",
        token_head="classifier",
        layer={"attn.c_attn": QKV, **LINEAR, **NORMS},
        outer=OUTER,
        layers="h.{layer}.",
        split=split,
        ignored=MASKS,
    ),
    settings=DecoderSettings(
        usual=fields_without("num_key_value_heads"),
        rope=None,
        computed=[InnerSize("n_inner"), KEYS, Flag("scale_attn_weights", "attention_scale", (1.0, None))],
    ),
    pad_token_learns=True,
)
