"""ModernBERT (Warner et al., 2024), as an encoder and as a decoder (Weller et al., 2025).

Some layers see a window, to both sides in an encoder; each layer type has its own rotary positions. Embeddings are
normed, so the first attention has no norm before it. A classifier reads what a language model head reads. The dropout
of embeddings also applies to our sub-layers, if you train it further.
"""

from typing import Any

from blockformer.files.errors import ConversionError, shown

from ..values import Computed, RopeByLayerType
from .base import Family
from .bert_like import EncoderNames, EncoderSettings
from .decoder import DecoderNames, DecoderSettings
from .encoder_decoder import HeadDropout
from .encoder_heads import LanguageModelNames, encoder_heads
from .fresh import all_but, by_type
from .head import Head
from .shared import LLAMA, QKV

FIELDS: dict[str, Any] = {
    "norm_bias": "norm_bias",
    "decoder_bias": "lm_head_bias",
    "classifier_bias": "head_transform_bias",
    "mlp_dropout": "activation_dropout",
}
NORMS = {"attn_norm": "self_attn_pre_norm", "mlp_norm": "mlp_pre_norm"}
WI = {"mlp.Wi": ("mlp.gate_proj", "mlp.up_proj")}
OUTPUTS = {"attn.Wo": "self_attn.o_proj", "mlp.Wo": "mlp.down_proj"}
STACK = {"embeddings.norm": "embedding_norm", "final_norm": "norm"}

STRUCTURE = {
    **LLAMA,
    "norm_type": "layer_norm",
    "embedding_norm": True,
    "first_attention_norm": False,
    "lm_head_transform": True,
    "classifier_transform": True,
}
FRESH = {
    **all_but(3, 64),
    **by_type(160_000.0, 10_000.0),
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "norm_bias": False,
    "norm_eps": 1e-5,
    "hidden_act": "gelu",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "lm_head_bias": True,
    "head_transform_bias": False,
    "pad_token_id": 50283,
    "bos_token_id": 50281,
    "eos_token_id": 50282,
}


class Window:
    """The window of sliding layers: of an encoder half of the official number to each side, of a decoder half of it."""

    def read(self, official):
        types, width = list(official.config.layer_types), official.config.local_attention
        own = official.entries.get("sliding_window")  # goes before local_attention in both official classes
        width = 2 * own if isinstance(own, int) else width
        slides = "sliding_attention" in types
        if slides and (width is None or width < 4):
            raise ConversionError(f"config.json: local_attention must be 4 or more with sliding layers, not {width}")
        return {"sliding_window": width // 2 if slides else None, "layer_types": types}

    def write(self, config, head):
        window = {} if config.sliding_window is None else {"local_attention": 2 * config.sliding_window}
        return {**window, "layer_types": list(config.layer_types)}


def _check_activation(official):
    act, other = official.config.hidden_activation, official.config.classifier_activation
    if act != other:
        raise ConversionError(
            f"config.json: classifier_activation is {shown(other)} and hidden_activation is {shown(act)}: "
            "Blockformer has one for both; make them equal"
        )
    return {}


ACTIVATION = Computed(_check_activation, lambda config, head: {"classifier_activation": config.hidden_act})
POOLING = {"cls": "first", "mean": "mean"}


def _write_pooling(config, head):
    return {"classifier_pooling": next((theirs for theirs, ours in POOLING.items() if ours == config.pooling), "cls")}


TRANSFORM = {"head.dense": "classifier_transform.dense", "head.norm": "classifier_transform.norm"}
"""What a classifier reads: modules of the head, official and ours."""
SCORE = {**TRANSFORM, "classifier": "score"}
ROWS = {"modules": SCORE}


ENCODER = Family(
    "modernbert",
    encoder_heads(
        "ModernBertModel ModernBertForMaskedLM ModernBertForSequenceClassification ModernBertForTokenClassification "
        "ModernBertForMultipleChoice ModernBertForQuestionAnswering",
        ROWS,
        ForTokenClassification=ROWS,
        ForMultipleChoice=ROWS,
        ForQuestionAnswering={"modules": {**TRANSFORM, "classifier": "qa_outputs"}},
        Model={},
    ),
    structure=STRUCTURE,
    fresh={**FRESH, "pooling": "mean"},
    names=EncoderNames(
        root="model.",
        embeddings={"embeddings.tok_embeddings": "embed_tokens"},
        layer="layers.{layer}.",
        modules={**OUTPUTS, **NORMS},
        fused={"attn.Wqkv": QKV, **WI},
        stack=STACK,
        language_model=LanguageModelNames(
            dense="head.dense", norm="head.norm", weight="decoder.weight", bias="decoder.bias"
        ),
    ),
    settings=EncoderSettings(
        fields=FIELDS,
        positions=RopeByLayerType(),
        computed=[
            Window(),
            ACTIVATION,
            HeadDropout(),
            Computed(lambda official: {"pooling": POOLING[official.config.classifier_pooling]}, _write_pooling),
        ],
    ),
)


DECODER = Family(
    "modernbert-decoder",
    [
        Head(
            "ModernBertDecoderForCausalLM",
            "BlockformerDecoderForCausalLM",
            "model.",
            {
                "lm_head.dense": "lm_head_transform.dense",
                "lm_head.norm": "lm_head_transform.norm",
                "decoder": "lm_head",
            },
        ),
        Head("ModernBertDecoderModel", "BlockformerDecoderModel"),
        Head(
            "ModernBertDecoderForSequenceClassification", "BlockformerDecoderForSequenceClassification", "model.", SCORE
        ),
    ],
    structure=STRUCTURE,
    fresh=FRESH,
    names=DecoderNames(
        layer={
            "attn.q_proj": "self_attn.q_proj",
            "attn.k_proj": "self_attn.k_proj",
            "attn.v_proj": "self_attn.v_proj",
            **OUTPUTS,
            **NORMS,
            **WI,
        },
        outer={"embeddings.tok_embeddings": "embed_tokens", **STACK},
    ),
    settings=DecoderSettings(
        fields=FIELDS,
        rope=RopeByLayerType(),
        window=Window(),
        computed=[ACTIVATION, HeadDropout()],
        unsupported={"classifier_bias": (False,)},
    ),
)
