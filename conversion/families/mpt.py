"""MPT (MosaicML, 2023): ALiBi, no bias anywhere, and perhaps clipped queries, keys and values."""

from blockformer.files.errors import ConversionError, listed, shown

from ..values import Computed, InnerSize
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import four_widths
from .shared import ALL_BIASES, GPT, QKV, fields_without

ATTENTION = {"attn_pdrop": "attention_dropout", "softmax_scale": "attention_scale", "clip_qkv": "clip_qkv"}
"""Field of the official `attn_config` -> ours."""
USUAL = {
    "attn_type": "multihead_attention",
    "alibi": True,
    "alibi_bias_max": 8,
    "prefix_lm": False,
    "qk_ln": False,
    "attn_uses_sequence_id": False,
}
"""What the official class computes, whatever an `attn_config` says."""


def read_attention(official):
    """The settings of attention, which are a separate config."""
    config = official.config.attn_config
    said = {name: getattr(config, name) for name in USUAL}
    wrong = [
        f"{name} is {shown(value)}, not {shown(USUAL[name])}" for name, value in said.items() if value != USUAL[name]
    ]
    if wrong:
        raise ConversionError(
            "config.json: attn_config: settings that cannot be converted, because the official class does not follow "
            f"them; run this model with its own code:{listed(wrong)}"
        )
    read = {ours: getattr(config, theirs) for theirs, ours in ATTENTION.items()}
    # The official class drops as much after each sub-layer.
    return {**read, "clip_qkv": read["clip_qkv"] or None, "hidden_dropout": read["attention_dropout"]}


def write_attention(config, head):
    """The way back."""
    written = {theirs: getattr(config, ours) for theirs, ours in ATTENTION.items()}
    written["attn_pdrop"] = written["attn_pdrop"] or 0  # no float for nothing
    return {"attn_config": {**written, **USUAL}}


FAMILY = Family(
    "mpt",
    "MptForCausalLM MptModel MptForSequenceClassification MptForTokenClassification MptForQuestionAnswering",
    structure={
        **GPT,
        **dict.fromkeys(ALL_BIASES, False),
        "norm_bias": False,
        "position_type": "alibi",
        "hidden_act": "gelu",
    },
    fresh={"intermediate_size": four_widths, "norm_eps": 1e-5, "tie_word_embeddings": True},
    names=DecoderNames(
        root="transformer.",
        token_head="classifier",
        layer={
            "norm_1": "self_attn_pre_norm",
            "attn.Wqkv": QKV,
            "attn.out_proj": "self_attn.o_proj",
            "norm_2": "mlp_pre_norm",
            "ffn.up_proj": "mlp.up_proj",
            "ffn.down_proj": "mlp.down_proj",
        },
        outer={"wte": "embed_tokens", "norm_f": "norm"},
        layers="blocks.{layer}.",
        former_classes={"MPTForCausalLM": "MptForCausalLM", "MPTModel": "MptModel"},
    ),
    settings=DecoderSettings(
        reads_whole=False,
        usual=fields_without("resid_pdrop"),
        rope=None,
        computed=[InnerSize(), Computed(read_attention, write_attention)],
        unsupported={
            "no_bias": (True,),
            "logit_scale": (None,),
            "embedding_fraction": (1, 1.0),
            "expansion_ratio": (4,),
        },
    ),
    pad_token_learns=True,
)
