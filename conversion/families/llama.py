"""Llama (Touvron et al., 2023), and decoders that differ from it by no more than a few settings."""

from ..values import Computed, only_sliding_layers_rotate
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import every, rotary
from .shared import ALL_BIASES, LLAMA

# `attention_bias` also covers the output projection.
FAMILY = Family(
    "llama",
    "LlamaForCausalLM LlamaModel LlamaForSequenceClassification LlamaForTokenClassification LlamaForQuestionAnswering",
    structure=LLAMA,
    fresh=rotary(10_000.0),
    names=DecoderNames(former_classes={"LLaMAForCausalLM": "LlamaForCausalLM", "LLaMAModel": "LlamaModel"}),
)


# Qwen2 and Qwen2.5 (Yang et al., 2024): biases on queries, keys and values, none on the output projection.
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM Qwen2Model Qwen2ForSequenceClassification Qwen2ForTokenClassification Qwen2ForQuestionAnswering",
    structure={**LLAMA, "attention_bias": True},
    fresh=rotary(1_000_000.0),
)


# Qwen3 (Yang et al., 2025): a norm on queries and keys; `attention_bias` also covers the output projection.
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM Qwen3Model Qwen3ForSequenceClassification Qwen3ForTokenClassification Qwen3ForQuestionAnswering",
    structure={**LLAMA, "qk_norm": True},
    fresh=rotary(1_000_000.0),
)


# Mistral (Jiang et al., 2023): no biases, one sliding window for every layer.
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM MistralModel MistralForSequenceClassification "
    "MistralForTokenClassification MistralForQuestionAnswering",
    structure=LLAMA,
    fresh={**rotary(10_000.0), "sliding_window": 4096},
    names=DecoderNames(qa_root="model."),
)


# Ministral (2024) and CWM (Copet et al., 2025): Llama with windows in some of the layers.
MINISTRAL = Family(
    "ministral",
    "MinistralForCausalLM MinistralModel MinistralForSequenceClassification "
    "MinistralForTokenClassification MinistralForQuestionAnswering",
    structure=LLAMA,
    fresh={**rotary(10_000.0), **every(4, 4096)},
)
CWM = Family(
    "cwm",
    "CwmForCausalLM CwmModel",
    structure=LLAMA,
    fresh={**rotary(1_000_000.0), **every(4, 8192), "norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2},
    settings=DecoderSettings(unsupported={"mlp_bias": (None, False)}),
)


# AFM (Arcee, 2025): Llama with a network without a gate, and squared ReLU.
ARCEE = Family(
    "arcee",
    "ArceeForCausalLM ArceeModel ArceeForSequenceClassification ArceeForTokenClassification ArceeForQuestionAnswering",
    structure={**LLAMA, "gated_mlp": False},
    fresh={**rotary(10_000.0), "hidden_act": "relu2", "norm_eps": 1e-5},
)


# Helium (Kyutai, 2025): Llama whose heads turn neighbouring channels.
HELIUM = Family(
    "helium",
    "HeliumForCausalLM HeliumModel HeliumForSequenceClassification HeliumForTokenClassification",
    structure=LLAMA,
    fresh={**rotary(100_000.0), "norm_eps": 1e-8},
    names=DecoderNames(pairs=True),
    settings=DecoderSettings(fields={"attention_bias": "attention_bias"}),
)


# Seed-OSS (ByteDance, 2025): Llama with a switch for each bias.
SEED_OSS = Family(
    "seed_oss",
    "SeedOssForCausalLM SeedOssModel SeedOssForSequenceClassification "
    "SeedOssForTokenClassification SeedOssForQuestionAnswering",
    structure=LLAMA,
    fresh={**rotary(10_000_000.0), "attention_bias": True},
    settings=DecoderSettings(
        fields={"attention_bias": "attention_bias", "attention_out_bias": "attention_output_bias"}
    ),
)


# ERNIE 4.5 without experts (Baidu, 2025): Llama whose heads turn neighbouring channels, with one switch for biases.
ERNIE4_5 = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM Ernie4_5Model",
    structure=LLAMA,
    fresh={**rotary(500_000.0), "norm_eps": 1e-5, "tie_word_embeddings": True},
    names=DecoderNames(pairs=True),
    settings=DecoderSettings(fields={"use_bias": ALL_BIASES}),
)


# InternLM3 (Shanghai AI Laboratory, 2025) and IQuest-Coder (IQuest Lab, 2026): own configs, and Llama's classes.
INTERNLM3 = Family(
    "internlm3",
    "LlamaForCausalLM LlamaModel",
    config_class="InternLM3Config",
    structure=LLAMA,
    fresh={**rotary(50_000_000.0), "norm_eps": 1e-5},
    names=DecoderNames(former_classes={"InternLM3ForCausalLM": "LlamaForCausalLM", "InternLM3Model": "LlamaModel"}),
)
IQUESTCODER = Family(
    "iquestcoder",
    "LlamaForCausalLM LlamaModel",
    config_class="IQuestCoderConfig",
    structure=LLAMA,
    fresh={**rotary(500_000.0), "norm_eps": 1e-5},
    names=DecoderNames(former_classes={"IQuestCoderForCausalLM": "LlamaForCausalLM", "IQuestCoderModel": "LlamaModel"}),
    settings=DecoderSettings(unsupported={"clip_qkv": (None,), "use_sliding_window": (None, False)}),
)


# SmolLM3 (Hugging Face, 2025): Llama with some layers that have no positions.
def read_list(official):
    """The official list says 1 where a layer rotates, whatever its name."""
    rotates = [bool(one) for one in official.config.no_rope_layers]
    return {"rope_layers": None if all(rotates) else rotates}


def write_list(config, head):
    """The way back."""
    rotates = config.rope_layers or [True] * config.num_hidden_layers
    return {"no_rope_layers": [int(one) for one in rotates]}


SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM SmolLM3Model SmolLM3ForSequenceClassification "
    "SmolLM3ForTokenClassification SmolLM3ForQuestionAnswering",
    structure=LLAMA,
    fresh={**rotary(2_000_000.0), **every(4), "tie_word_embeddings": True},
    settings=DecoderSettings(
        computed=[Computed(read_list, write_list)],
    ),
)


# EXAONE 4.0 (LG AI Research, 2025): norms after the sub-layers; with windows, only layers that have one rotate.
def read_rotating(official):
    """Without a window, all layers rotate."""
    return {"rope_layers": None} if official.config.sliding_window is None else only_sliding_layers_rotate(official)


def write_rotating(config, head):
    """No window where all layers rotate: with one, only layers that have it do."""
    return {"sliding_window": None} if config.rope_layers is None and config.sliding_window is None else {}


EXAONE4 = Family(
    "exaone4",
    "Exaone4ForCausalLM Exaone4Model Exaone4ForSequenceClassification "
    "Exaone4ForTokenClassification Exaone4ForQuestionAnswering",
    structure={**LLAMA, "norm_placement": "output", "qk_norm": True},
    fresh={**rotary(1_000_000.0), **every(4, 4096), **every(4), "norm_eps": 1e-5},
    settings=DecoderSettings(computed=[Computed(read_rotating, write_rotating)]),
)
