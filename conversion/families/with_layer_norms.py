"""Decoders after Llama whose norms are layer norms: Nemotron, StarCoder2, StableLM."""

from ..rules.operations import StackTensors
from ..rules.table import Rule
from ..values import Flag, Rope
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import rotary
from .shared import ALL_BIASES, ATTENTION, LLAMA, NORMS, ROTARY_GPT

# Nemotron (Parmar et al., 2024): layer norms with the factor 1 + weight, squared ReLU, a part of each head turns.
NEMOTRON = Family(
    "nemotron",
    "NemotronForCausalLM NemotronModel NemotronForSequenceClassification "
    "NemotronForTokenClassification NemotronForQuestionAnswering",
    structure={**ROTARY_GPT, "norm_weight": "zero_centered"},
    fresh={**rotary(10_000.0, 0.5), **dict.fromkeys(ALL_BIASES, False), "hidden_act": "relu2", "norm_eps": 1e-5},
    settings=DecoderSettings(reads_whole=False, rope=Rope(by_part=True)),
)


# StarCoder2 (Lozhkov et al., 2024): layer norms, a network without a gate, one window for every layer.
STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM Starcoder2Model Starcoder2ForSequenceClassification Starcoder2ForTokenClassification",
    structure=ROTARY_GPT,
    fresh={
        **rotary(100_000.0),
        "hidden_act": "gelu_pytorch_tanh",
        "norm_eps": 1e-5,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    names=DecoderNames(layer={**ATTENTION, **NORMS, "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}),
    settings=DecoderSettings(fields={"use_bias": ALL_BIASES}),
)


# StableLM (Bellagente et al., 2024): layer norms, rotation of a part of each head, perhaps parallel sub-layers.
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


STABLELM = Family(
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
