"""MPNet (Song et al., 2020): RoBERTa whose layers share a relative bias in addition to the learned positions.

The official class has the padding token 1, 32 buckets and `gelu` in its head, whatever the config says.
"""

from blockformer.files.errors import ConversionError

from ..values import Computed, NotExpressible
from .base import Family
from .bert import EMBEDDINGS, NAMES, STRUCTURE
from .bert_like import EncoderNames, EncoderSettings
from .encoder_heads import ROBERTA_ROWS, encoder_heads
from .roberta import FRESH, GELU_HEAD, LANGUAGE_MODEL

PADDING, BUCKETS = 1, 32


def _read_positions(official):
    config = official.config
    if config.pad_token_id != PADDING or config.relative_attention_num_buckets != BUCKETS:
        raise ConversionError(
            f"config.json: pad_token_id must be {PADDING} and relative_attention_num_buckets {BUCKETS}, "
            f"not {config.pad_token_id} and {config.relative_attention_num_buckets}: the official class has no others"
        )
    rows = config.max_position_embeddings - PADDING - 1
    return {"position_offset": PADDING + 1, "padding_position": "by_token", "max_position_embeddings": rows}


def _write_positions(config, head):
    if config.pad_token_id != PADDING or config.position_offset != PADDING + 1:
        raise NotExpressible("position_offset", f"{PADDING + 1}, with pad_token_id={PADDING}", config.position_offset)
    return {
        "max_position_embeddings": config.max_position_embeddings + config.position_offset,
        "relative_attention_num_buckets": config.relative_attention_num_buckets,
    }


FAMILY = Family(
    "mpnet",
    encoder_heads(
        "MPNetModel MPNetForMaskedLM MPNetForSequenceClassification MPNetForMultipleChoice "
        "MPNetForTokenClassification MPNetForQuestionAnswering",
        ROBERTA_ROWS,
    ),
    structure={**STRUCTURE, "position_type": "learned_relative_bias", "type_vocab_size": 0},
    fresh={**FRESH, "type_vocab_size": 0, "vocab_size": 30527},
    names=EncoderNames(
        root="mpnet.",
        embeddings={
            **{theirs: ours for theirs, ours in EMBEDDINGS.items() if ours != "embed_token_types"},
            "encoder.relative_attention_bias": "relative_bias.embedding",
        },
        layer=NAMES["layer"],
        modules={
            "attention.attn.q": "self_attn.q_proj",
            "attention.attn.k": "self_attn.k_proj",
            "attention.attn.v": "self_attn.v_proj",
            "attention.attn.o": "self_attn.o_proj",
            "attention.LayerNorm": "self_attn_post_norm",
            **{theirs: ours for theirs, ours in NAMES["modules"].items() if ours.startswith("mlp")},
        },
        language_model=LANGUAGE_MODEL,
    ),
    settings=EncoderSettings(
        positions=Computed(_read_positions, _write_positions),
        computed=[GELU_HEAD],
    ),
)
