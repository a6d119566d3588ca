"""BERT with rotary positions: Nomic Embed (Nussbaum et al.), GTE (Zhang et al.), Jina v3 (Sturua et al.), all of 2024.

Checkpoints hold queries, keys and values in one matrix, and have other names than today's official classes.
The checkpoints of GTE's authors bring their own code, in which `model_type` is "new".
"""

from collections.abc import Mapping
from typing import Any

from blockformer.files.errors import ConversionError, shown
from blockformer.model.axes import is_number

from ..storage.modules import ModulesInFiles
from ..values import Computed, HeadDim, Rope
from .base import Family
from .bert import EMBEDDINGS, FRESH, LANGUAGE_MODEL
from .bert import STRUCTURE as BERT_STRUCTURE
from .bert_like import EncoderNames, EncoderSettings
from .encoder_heads import ROBERTA_ROWS, LanguageModelNames, encoder_heads
from .former import Former
from .fresh import rotary
from .roberta import FRESH as ROBERTA_FRESH
from .roberta import GELU_HEAD
from .roberta import LANGUAGE_MODEL as ROBERTA_LANGUAGE_MODEL
from .shared import ALL_BIASES, ATTENTION, MLP, QKV

STRUCTURE = {**BERT_STRUCTURE, "position_type": "rotary"}
LAYER = {
    **ATTENTION,
    "post_attention_layernorm": "self_attn_post_norm",
    "post_mlp_layernorm": "mlp_post_norm",
}
GATED = {**LAYER, **MLP}
PLAIN = {**LAYER, "mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"}
"""Module of a layer in the official classes -> ours."""
GATED_ACTS = {"swiglu": "silu", "geglu": "gelu"}
"""Nomic's own names of what a gate goes through -> today's."""
TOKEN_TYPES = Computed(
    lambda official: {"type_vocab_size": official.config.type_vocab_size},
    lambda config, head: {"type_vocab_size": config.type_vocab_size},
)
ROTARY: dict[str, Any] = {
    "embeddings": {theirs: ours for theirs, ours in EMBEDDINGS.items() if ours != "embed_positions"},
    "layer": "layers.{layer}.",
}
"""What the names of these families have in common."""
POSITIONS = Rope()


def without_fixed_ntk(entries: Mapping[str, Any]) -> dict[str, Any] | None:
    """GTE's own `rope_scaling` as `rope_parameters`: rotary scaling "ntk" as "linear".

    It raises the base by the factor, and slows every pair of the D channels of a head by its (2/D)th power
    (https://kexue.fm/archives/9706, equation 6). Where a config has both names, `rope_scaling` counts, as in the
    official class.
    """
    scaling, theta = entries.get("rope_scaling") or entries.get("rope_parameters"), entries.get("rope_theta")
    base = {} if theta is None else {"rope_theta": theta}
    if not isinstance(scaling, dict):
        return base or None
    if scaling.get("type", scaling.get("rope_type")) != "ntk":
        return {**base, **scaling}
    width, heads, factor = entries.get("hidden_size"), entries.get("num_attention_heads"), scaling.get("factor")
    numbers = {"factor": factor, "rope_theta": theta, "hidden_size": width, "num_attention_heads": heads}
    for name, value in numbers.items():
        if not is_number(value) or value <= 0:
            raise ConversionError(
                f"config.json: with rope_scaling of type 'ntk', {name} must be a positive number, not {shown(value)}"
            )
    if scaling.get("mixed_b") is not None:
        raise ConversionError(
            f"config.json: rope_scaling has mixed_b {shown(scaling['mixed_b'])}, which Blockformer does not "
            "have: only 'ntk' without it can be converted"
        )
    return {"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 * heads / width)}


GTE = Family(
    "gte",
    "GteModel GteForMaskedLM GteForSequenceClassification GteForTokenClassification",
    structure={**STRUCTURE, "gated_mlp": True, "mlp_bias": "down"},
    fresh={
        **FRESH,
        **rotary(160_000.0),
        "vocab_size": 250048,
        "hidden_act": "gelu",
        "max_position_embeddings": 8192,
        "type_vocab_size": 1,
        "pad_token_id": 1,
    },
    names=EncoderNames(
        root="gte.",
        **ROTARY,
        former_root="new.",
        former_classes={
            "NewModel": "GteModel",
            "NewForMaskedLM": "GteForMaskedLM",
            "NewForSequenceClassification": "GteForSequenceClassification",
            "NewForTokenClassification": "GteForTokenClassification",
        },
        ignored_heads=("classifier.weight", "classifier.bias"),
        modules=GATED,
        in_files=ModulesInFiles(
            "encoder.layer.{layer}.",
            {
                "attention.qkv_proj": QKV,
                "attention.o_proj": "self_attn.o_proj",
                "attn_ln": "post_attention_layernorm",
                "mlp.up_gate_proj": ("mlp.up_proj", "mlp.gate_proj"),
                "mlp.down_proj": "mlp.down_proj",
                "mlp_ln": "post_mlp_layernorm",
            },
            head={"lm_head.norm": "lm_head.layer_norm"},
        ),
        language_model=LanguageModelNames(
            dense="lm_head.dense",
            norm="lm_head.layer_norm",
            weight="lm_head.decoder.weight",
            bias="lm_head.decoder.bias",
        ),
    ),
    settings=EncoderSettings(
        unsupported={
            "position_embedding_type": ("rope",),
            "layer_norm_type": ("layer_norm",),
            "logn_attention_scale": (False,),
            "pack_qkv": (True,),
        },
        positions=POSITIONS,
        computed=(TOKEN_TYPES, GELU_HEAD),
        former=Former(
            fields=dict.fromkeys(("rope_scaling", "rope_parameters"), ("rope_parameters", without_fixed_ntk)),
            types={"new": {"rope_theta": 10_000.0}},
        ),
    ),
)
NOMIC = Family(
    "nomic_bert",
    "NomicBertModel NomicBertForMaskedLM NomicBertForSequenceClassification NomicBertForTokenClassification",
    structure={**STRUCTURE, **dict.fromkeys(ALL_BIASES, False), "gated_mlp": True},
    fresh={
        **FRESH,
        **rotary(1_000.0),
        "vocab_size": 30528,
        "max_position_embeddings": 2048,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    names=EncoderNames(
        root="nomic_bert.",
        **ROTARY,
        modules=GATED,
        in_files=ModulesInFiles(
            "encoder.layers.{layer}.",
            {
                "attn.Wqkv": QKV,
                "attn.out_proj": "self_attn.o_proj",
                "norm1": "post_attention_layernorm",
                "mlp.fc11": "mlp.up_proj",
                "mlp.fc12": "mlp.gate_proj",
                "mlp.fc2": "mlp.down_proj",
                "norm2": "post_mlp_layernorm",
            },
            stack={"emb_ln": "embeddings.LayerNorm"},
        ),
        language_model=LanguageModelNames(
            dense="cls.predictions.transform.dense",
            norm="cls.predictions.transform.layer_norm",
            weight=LANGUAGE_MODEL.weight,
            bias=LANGUAGE_MODEL.bias,
            copy=LANGUAGE_MODEL.copy,
        ),
    ),
    settings=EncoderSettings(
        positions=POSITIONS,
        computed=(TOKEN_TYPES, HeadDim()),
        unsupported={
            **dict.fromkeys(
                "qkv_proj_bias mlp_fc1_bias mlp_fc2_bias prenorm parallel_block rotary_emb_interleaved use_rms_norm "
                "causal".split(),
                (False,),
            ),
            "rotary_emb_fraction": (1.0,),
            **dict.fromkeys(("rotary_emb_scale_base", "rotary_scaling_factor"), (None,)),
        },
        former=Former(
            fields={
                "n_embd": "hidden_size",
                "n_layer": "num_hidden_layers",
                "n_head": "num_attention_heads",
                "n_inner": "intermediate_size",
                "n_positions": "max_position_embeddings",
                "layer_norm_epsilon": "layer_norm_eps",
                "activation_function": ("hidden_act", GATED_ACTS),
                "rotary_emb_base": "rope_theta",
                "resid_pdrop": "hidden_dropout_prob",
                "attn_pdrop": "attention_probs_dropout_prob",
            }
        ),
    ),
)
JINA = Family(
    "jina_embeddings_v3",
    encoder_heads(
        "JinaEmbeddingsV3Model JinaEmbeddingsV3ForMaskedLM "
        "JinaEmbeddingsV3ForSequenceClassification JinaEmbeddingsV3ForTokenClassification "
        "JinaEmbeddingsV3ForQuestionAnswering",
        ROBERTA_ROWS,
    ),
    structure=STRUCTURE,
    fresh={
        **ROBERTA_FRESH,
        **rotary(20_000.0),
        "vocab_size": 250002,
        "hidden_act": "gelu",
        "max_position_embeddings": 8194,
        "position_offset": 0,
        "padding_position": "index",
    },
    names=EncoderNames(
        root="roberta.",
        **ROTARY,
        modules=PLAIN,
        in_files=ModulesInFiles(
            "encoder.layers.{layer}.",
            {
                "mixer.Wqkv": QKV,
                "mixer.out_proj": "self_attn.o_proj",
                "norm1": "post_attention_layernorm",
                "mlp.fc1": "mlp.fc1",
                "mlp.fc2": "mlp.fc2",
                "norm2": "post_mlp_layernorm",
            },
            stack={"emb_ln": "embeddings.LayerNorm"},
        ),
        language_model=ROBERTA_LANGUAGE_MODEL,
    ),
    settings=EncoderSettings(positions=POSITIONS, computed=(TOKEN_TYPES, GELU_HEAD)),
)
