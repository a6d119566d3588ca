"""DeBERTa 2 and 3 (He et al., 2021 and 2023): BERT with disentangled attention.

It takes the third version's switches: both terms of distances, in buckets, with the layers' own
projections and a norm, and no positions in the embeddings. Checkpoints of the third version also hold the heads and
embeddings of their training, which no official class reads.
"""

from typing import Any

from blockformer.files.errors import ConversionError, listed, shown

from ..values import Computed, NotExpressible, Official
from .base import Family
from .bert import EMBEDDINGS, FRESH, LANGUAGE_MODEL, NAMES, STRUCTURE
from .bert_like import EncoderNames, EncoderSettings
from .encoder_heads import SCORE, encoder_heads
from .fresh import by_three_heads
from .rotary_bert import TOKEN_TYPES

SWITCHES: dict[str, Any] = {
    "relative_attention": True,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}
IDLE = {
    "conv_kernel_size": (None, 0),
    "attention_head_size": (None,),
    "embedding_size": (None,),
    "legacy": (None, True),
}
UNREAD = ("embeddings.position_embeddings.weight", "embeddings.word_embeddings._weight")
"""Tensors of the stack that the released checkpoints hold and that no official class reads."""
TRAINING_HEADS = (
    "lm_predictions.lm_head.bias",
    "lm_predictions.lm_head.dense.weight",
    "lm_predictions.lm_head.dense.bias",
    "lm_predictions.lm_head.LayerNorm.weight",
    "lm_predictions.lm_head.LayerNorm.bias",
    "mask_predictions.dense.weight",
    "mask_predictions.dense.bias",
    "mask_predictions.LayerNorm.weight",
    "mask_predictions.LayerNorm.bias",
    "mask_predictions.classifier.weight",
    "mask_predictions.classifier.bias",
)


def _scale(head_dim: int) -> float:
    return (3 * head_dim) ** -0.5


def _read(official: Official) -> dict[str, Any]:
    config, entries = official.config, official.entries
    wrong = [f"{name} is {shown(entries.get(name))}, not {value!r}" for name, value in SWITCHES.items()
             if entries.get(name) != value]  # fmt: skip
    wrong += [f"{name} is {shown(entries[name])}" for name, values in IDLE.items() if entries.get(name) not in values]
    if set(config.pos_att_type or ()) != {"c2p", "p2c"}:
        wrong.append(f"pos_att_type is {shown(entries.get('pos_att_type'))}, not 'p2c|c2p'")
    buckets = entries.get("position_buckets") or 0
    if buckets < 4:
        wrong.append(f"position_buckets is {buckets}, not 4 or more")
    if wrong:
        raise ConversionError(f"config.json: settings that cannot be converted:{listed(wrong)}")
    farthest = config.max_relative_positions
    return {
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": farthest if farthest > 0 else config.max_position_embeddings,
        "attention_scale": _scale(config.hidden_size // config.num_attention_heads),
    }


def _write(config, head) -> dict[str, Any]:
    scale, farthest = _scale(config.head_dim), config.relative_attention_max_distance
    if config.attention_scale != scale:
        raise NotExpressible(
            "attention_scale", f"{scale} (one over the root of three head sizes)", config.attention_scale
        )
    return {
        **SWITCHES,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": config.relative_attention_num_buckets,
        "max_relative_positions": -1 if farthest == config.max_position_embeddings else farthest,
    }


ROWS = {**SCORE, "own_pooler": "pooler.dense"}
FAMILY = Family(
    "deberta-v2",
    encoder_heads(
        "DebertaV2Model DebertaV2ForMaskedLM DebertaV2ForSequenceClassification DebertaV2ForMultipleChoice "
        "DebertaV2ForTokenClassification DebertaV2ForQuestionAnswering",
        ROWS,
        ForMultipleChoice=ROWS,
        Model={},
    ),
    structure={**STRUCTURE, "position_type": "disentangled"},
    fresh={
        **FRESH,
        "vocab_size": 128100,
        "norm_eps": 1e-7,
        "type_vocab_size": 0,
        "relative_attention_num_buckets": 256,
        "relative_attention_max_distance": 512,
        "attention_scale": by_three_heads,
        "pooler_act": "gelu",
    },
    names=EncoderNames(
        root="deberta.",
        ignored=UNREAD,
        ignored_heads=TRAINING_HEADS,
        embeddings={
            **{theirs: ours for theirs, ours in EMBEDDINGS.items() if ours != "embed_positions"},
            "encoder.rel_embeddings": "relative_bias.embedding",
        },
        layer=NAMES["layer"],
        modules={
            "attention.self.query_proj": "self_attn.q_proj",
            "attention.self.key_proj": "self_attn.k_proj",
            "attention.self.value_proj": "self_attn.v_proj",
            **{theirs: ours for theirs, ours in NAMES["modules"].items() if "attention.self" not in theirs},
        },
        stack={"embeddings.LayerNorm": "embedding_norm", "encoder.LayerNorm": "relative_bias.norm"},
        language_model=LANGUAGE_MODEL,
    ),
    settings=EncoderSettings(
        positions=Computed(_read, _write),
        computed=[TOKEN_TYPES],
        pooler_act="gelu",
        unsupported={"pooler_hidden_act": ("gelu",)},
        extra_fields=(*SWITCHES, *IDLE, "position_buckets", "pooler_hidden_size"),
    ),
)
