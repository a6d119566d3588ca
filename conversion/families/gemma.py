"""Gemma, Gemma 2 and the text model of Gemma 3 (Gemma team, 2024 and 2025), and VaultGemma (2025).

The factor of a norm is 1 + its weight, and embeddings are scaled by the root of the width. From Gemma 2 on there are
windows, soft caps and, except in VaultGemma, a norm before and after each sub-layer.
"""

from blockformer.files.errors import ConversionError

from ..values import Computed, RootOfWidth, RopeByLayerType, invert_power, positive
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import by_type, every, root_of_width, rotary
from .shared import ATTENTION, LLAMA, MLP

STRUCTURE = {**LLAMA, "norm_weight": "zero_centered"}
FRESH = {"hidden_act": "gelu_pytorch_tanh", "embedding_scale": root_of_width, "tie_word_embeddings": True}
FRESH_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


SCALE = RootOfWidth()
FORWARD = {"use_bidirectional_attention": (None, False)}
"""A decoder looks back."""
CAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}


def read_scores(official):
    """The factor of the scores is one over the root of a number, usually the size of a head."""
    number, size = positive(official, "query_pre_attn_scalar"), official.config.head_dim
    return {"attention_scale": None if number == size else number**-0.5}


def write_scores(config, head):
    """The way back."""
    scale = config.attention_scale
    return {"query_pre_attn_scalar": config.head_dim if scale is None else invert_power(scale, -0.5)}


SCORES = Computed(read_scores, write_scores)


def check_cap(official):
    """The official class has the field and does not look at it."""
    if official.config.attn_logit_softcapping is not None:
        raise ConversionError("config.json: attn_logit_softcapping is set, which Gemma 3 does not use; drop it")
    return {}


class BothWays:
    """A text model that looks both ways, as EmbeddingGemma does (Vera et al., 2025).

    Its window reaches half of `sliding_window` to each side, which the official config class computes on reading.
    """

    def read(self, official):
        if not official.config.use_bidirectional_attention:
            return {}
        if official.entries.get("is_causal", True) is False:
            raise ConversionError(
                "config.json: use_bidirectional_attention is true and is_causal false, which mean different windows; "
                "remove is_causal"
            )
        slides = "sliding_attention" in official.config.layer_types
        return {"bidirectional": True, "sliding_window": official.config.sliding_window - 1 if slides else None}

    def write(self, config, head):
        if not config.bidirectional:
            return {}
        window = {} if config.sliding_window is None else {"sliding_window": 2 * config.sliding_window}
        return {"use_bidirectional_attention": True, "is_causal": True, **window}


GEMMA = Family(
    "gemma",
    "GemmaForCausalLM GemmaModel GemmaForSequenceClassification GemmaForTokenClassification",
    structure=STRUCTURE,
    fresh={**rotary(10_000.0), **FRESH},
    settings=DecoderSettings(computed=[SCALE], unsupported=FORWARD),
    scales_in_embedding="rounded",
)
GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM Gemma2Model Gemma2ForSequenceClassification Gemma2ForTokenClassification",
    structure={**STRUCTURE, "norm_placement": "pre_output"},
    fresh={**rotary(10_000.0), **FRESH, **FRESH_CAPS, **every(2, 4096)},
    settings=DecoderSettings(
        fields=CAPS,
        computed=[SCALE, SCORES],
        unsupported=FORWARD,
    ),
    scales_in_embedding="rounded",
)
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM Gemma3TextModel Gemma3TextForSequenceClassification",
    config_class="Gemma3TextConfig",
    structure={**STRUCTURE, "norm_placement": "pre_output", "qk_norm": True},
    fresh={**FRESH, **every(6, 512), **by_type(1_000_000.0, 10_000.0)},
    settings=DecoderSettings(
        fields={"final_logit_softcapping": "final_logit_softcapping"},
        rope=RopeByLayerType(),
        computed=[SCALE, SCORES, Computed(check_cap), BothWays()],
    ),
    scales_in_embedding="rounded",
)
VAULT = Family(
    "vaultgemma",
    "VaultGemmaForCausalLM VaultGemmaModel",
    structure=STRUCTURE,
    fresh={**rotary(10_000.0), **FRESH, **FRESH_CAPS, **every(2, 512)},
    names=DecoderNames(
        layer={
            **ATTENTION,
            **MLP,
            "input_layernorm": "self_attn_pre_norm",
            "pre_feedforward_layernorm": "mlp_pre_norm",
        }
    ),
    settings=DecoderSettings(fields=CAPS, computed=[SCALE, SCORES]),
    scales_in_embedding="rounded",
)
