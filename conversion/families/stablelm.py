"""StableLM (Bellagente et al., 2024): layer norms, rotation of a part of each head, perhaps parallel sub-layers."""

from ..rules.operations import StackTensors
from ..rules.table import Rule
from ..values import Flag, Rope
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import rotary
from .shared import LLAMA


def norms_of_heads(config):
    """Heads have a norm each, in a tensor each."""
    norms = (
        ("self_attn.q_layernorm.norms", "self_attn.q_norm.weight", config.num_attention_heads),
        ("self_attn.k_layernorm.norms", "self_attn.k_norm.weight", config.num_key_value_heads),
    )
    return [
        Rule(tuple(f"{theirs}.{head}.weight" for head in range(count)), ours, StackTensors(count))
        for theirs, ours, count in norms
    ]


FAMILY = Family(
    "stablelm",
    "StableLmForCausalLM StableLmModel StableLmForSequenceClassification StableLmForTokenClassification",
    structure={**LLAMA, "norm_type": "layer_norm"},
    fresh={**rotary(10_000.0, 0.25), "norm_eps": 1e-5},
    names=DecoderNames(more_rules=norms_of_heads),
    settings=DecoderSettings(
        reads_whole=False,
        fields={"use_qkv_bias": "attention_bias"},
        rope=Rope(by_part=True),
        computed=[
            Flag("qk_layernorm", "qk_norm", (False, "per_head")),
            Flag("use_parallel_residual", "residual", ("sequential", "parallel_shared_norm")),
        ],
    ),
)
