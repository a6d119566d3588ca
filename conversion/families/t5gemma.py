"""T5Gemma (Zhang et al., 2025): two stacks of Gemma 2, of one width here, the second with cross-attention."""

from dataclasses import replace

from blockformer.files.errors import ConversionError, listed

from ..rules.table import Rule
from ..values import Computed, NotExpressible
from .base import Family
from .encoder_decoder import BOTH, EncoderDecoderNames, EncoderDecoderSettings
from .fresh import every, rotary
from .gemma import FRESH, FRESH_CAPS, SCALE, STRUCTURE, read_scores, write_scores
from .head import Head
from .shared import ATTENTION, MLP
from .shared import LAYER as PREFIX

SAME = {
    **{name: name for name in "vocab_size hidden_size intermediate_size num_attention_heads".split()},
    **{name: name for name in "num_key_value_heads head_dim max_position_embeddings sliding_window".split()},
    **{name: name for name in "attn_logit_softcapping final_logit_softcapping rope_parameters".split()},
    "hidden_activation": "hidden_act",
    "rms_norm_eps": "norm_eps",
}
"""Field of both stacks -> ours."""
LAYER = {
    "pre_self_attn_layernorm": "self_attn_pre_norm",
    **ATTENTION,
    "post_self_attn_layernorm": "self_attn_output_norm",
    "pre_feedforward_layernorm": "mlp_pre_norm",
    **MLP,
    "post_feedforward_layernorm": "mlp_output_norm",
}
CROSS_ATTENTION = {
    "pre_cross_attn_layernorm": "cross_attn_pre_norm",
    "cross_attn.q_proj": "cross_attn.q_proj",
    "cross_attn.k_proj": "cross_attn.k_proj",
    "cross_attn.v_proj": "cross_attn.v_proj",
    "cross_attn.o_proj": "cross_attn.o_proj",
    "post_cross_attn_layernorm": "cross_attn_output_norm",
}
"""Official module of a layer -> ours."""
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def differences(encoder, decoder, alike):
    """Lines on settings in which the two stacks differ, and on a decoder that sees later tokens."""
    lines = [
        f"{name} is {getattr(encoder, name)} in the encoder and {getattr(decoder, name)} in the decoder"
        for name in alike
        if getattr(encoder, name) != getattr(decoder, name)
    ]
    if not getattr(decoder, "is_causal", True):  # which its masks follow
        lines.append("is_causal is false in the decoder; remove it if the model was not trained like that")
    return lines


def read_both(official, encoder, decoder, fields):
    """Our settings of two stacks whose `fields` are the same."""
    both = replace(official, config=encoder)
    return {
        **{ours: getattr(encoder, theirs) for theirs, ours in fields.items()},
        **read_scores(both),
        **SCALE.read(both),
        **{name: getattr(decoder, name) for name in TOKENS},
        "num_hidden_layers": encoder.num_hidden_layers,
        "layer_types": list(encoder.layer_types),
        "decoder_layers": decoder.num_hidden_layers,
        "decoder_layer_types": list(decoder.layer_types),
        "sliding_window": encoder.sliding_window if "sliding_attention" in encoder.layer_types else None,
        "decoder_start_token_id": decoder.bos_token_id,
        "use_cache": decoder.use_cache,
    }


def write_both(config, head, fields):
    """The official settings that both stacks have."""
    if config.decoder_start_token_id != config.bos_token_id:
        raise NotExpressible("decoder_start_token_id", "bos_token_id", config.decoder_start_token_id)
    return {
        **{theirs: getattr(config, ours) for theirs, ours in fields.items()},
        **{name: getattr(config, name) for name in TOKENS},
        **write_scores(config, head),
        **SCALE.write(config, head),
        "initializer_range": config.initializer_range,
        "attention_dropout": config.attention_dropout,
        "dropout_rate": config.hidden_dropout,
    }


def _read_stacks(official):
    encoder, decoder = official.config.encoder, official.config.decoder
    lines = differences(encoder, decoder, (*SAME, "query_pre_attn_scalar", "attention_bias", *TOKENS))
    if encoder.attention_bias:
        lines.append("attention_bias is true")
    if lines:
        raise ConversionError(f"config.json: settings that cannot be converted:{listed(lines)}")
    return read_both(official, encoder, decoder, SAME)


def _write_stacks(config, head):
    both = {"model_type": "t5_gemma_module", **write_both(config, head, SAME)}
    if config.sliding_window is None:  # the official class makes a mask of its width even where no layer has one
        del both["sliding_window"]
    encoder = {"num_hidden_layers": config.num_hidden_layers, "layer_types": config.layer_types, "is_decoder": False}
    decoder = {"num_hidden_layers": config.decoder_layers, "layer_types": config.decoder_layer_types}
    decoder |= {"is_decoder": True, "cross_attention_hidden_size": config.hidden_size}
    return {"encoder": both | encoder, "decoder": both | decoder}


def stack_rules(stack, config):
    """The rules of a stack, which has its own embeddings."""
    layer = LAYER | (CROSS_ATTENTION if stack == "decoder" else {})
    modules = {"embed_tokens": "embed_tokens", "norm": "norm"}
    modules |= {PREFIX + theirs: PREFIX + ours for theirs, ours in layer.items()}
    return [Rule(f"{theirs}.weight", f"{ours}.weight") for theirs, ours in modules.items()]


_OTHER_HEAD = "its head is one linear layer on the states, which no class of an encoder-decoder has here"

FAMILY = Family(
    "t5gemma",
    [
        Head(
            "T5GemmaForConditionalGeneration",
            f"{BOTH}ForConditionalGeneration",
            "model.",
            tensors={"lm_head.out_proj.weight": "lm_head.weight"},
        ),
        Head("T5GemmaModel", f"{BOTH}Model"),
    ],
    structure={**STRUCTURE, "norm_placement": "pre_output", "share_embeddings": False, "final_dropout": True},
    fresh={
        **rotary(10_000.0),
        **every(2, 4096),
        **FRESH,
        **FRESH_CAPS,
        "vocab_size": 256000,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "norm_eps": 1e-6,
        "classifier_dropout": 0.0,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "decoder_start_token_id": 2,
        "decoder_reads_source": False,
    },
    names=EncoderDecoderNames(
        rules=stack_rules,
        refused={
            "T5GemmaEncoderModel": "only an encoder, with the config of two stacks; take T5GemmaModel",
            **dict.fromkeys(("T5GemmaForSequenceClassification", "T5GemmaForTokenClassification"), _OTHER_HEAD),
        },
    ),
    settings=EncoderDecoderSettings(
        fields={
            "dropout_rate": ("hidden_dropout", "activation_dropout"),
            "classifier_dropout_rate": "classifier_dropout",
        },
        computed=[Computed(_read_stacks, _write_stacks)],
        extra_fields=("encoder", "decoder", "decoder_start_token_id", "use_cache"),
    ),
)
