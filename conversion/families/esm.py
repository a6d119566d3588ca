"""ESM-1b (Rives et al., 2021) and ESM-2 (Lin et al., 2023): encoders of proteins, with norms before the sub-layers.

ESM-2 rotates, ESM-1b has learned positions, and both drop the vectors of masked tokens. A file of ESM-2 holds the
frequencies of its rotation, which the official class takes from there: some were rounded to 16 bits in training.
"""

from dataclasses import dataclass
from typing import Any

import torch

from blockformer.files.errors import ConversionError, shown

from ..storage.variant import CheckpointVariant
from ..values import Computed, EncoderPositions, Flag, NotExpressible
from .base import Family
from .bert import EMBEDDINGS, FRESH, NAMES, STRUCTURE
from .bert_like import EncoderNames, EncoderSettings
from .encoder_heads import ROBERTA_ROWS, LanguageModelNames, encoder_heads
from .roberta import norms_before

SHARE = 0.15 * 0.8
"""Of the tokens, 15% were chosen in training, and 80% of those masked."""
ROUNDED = {"float16 frequencies": "float16", "bfloat16 frequencies": "bfloat16"}
"""Traits: the frequencies of the rotation are rounded to these dtypes."""
OF_LAYER = "attention.self.rotary_embeddings.inv_freq"
FREQUENCIES = ("rotary_embeddings.inv_freq", f"encoder.layer.{{layer}}.{OF_LAYER}", f"encoder.layer.*.{OF_LAYER}")
"""Where files have the frequencies: once, or for each layer, or under the name that transformers 5.23 writes."""


class Positions(EncoderPositions):
    """Learned positions, which begin after the padding token's id, or rotary ones, rounded or not."""

    def __init__(self):
        super().__init__(relative=False, shifted=True)

    def read(self, official):
        if official.config.position_embedding_type != "rotary":
            return super().read(official)
        rope = {"rope_type": "default", "rope_theta": float(official.config.rope_theta)}
        rounded = [dtype for trait, dtype in ROUNDED.items() if trait in official.variant.traits]
        read = {"rope_parameters": rope, "frequency_dtype": rounded[0] if rounded else None}
        return {"position_type": "rotary", "max_position_embeddings": official.config.max_position_embeddings, **read}

    def write(self, config, head):
        if config.position_type == "learned":
            return {"position_embedding_type": "absolute", **super().write(config, head)}
        if config.position_type != "rotary":
            raise NotExpressible("position_type", "learned or rotary", config.position_type)
        rope = {"position_embedding_type": "rotary", "rope_theta": config.rope_parameters["rope_theta"]}
        return {**rope, "max_position_embeddings": config.max_position_embeddings}


def read_dropout(official) -> dict[str, Any]:
    """Our `token_dropout`, of which the official flag says whether there is one, and the token that it reads."""
    if not official.config.token_dropout:
        return {"token_dropout": None}
    return {"token_dropout": SHARE, "mask_token_id": official.config.mask_token_id}


def write_dropout(config, head) -> dict[str, Any]:
    """The way back."""
    if config.token_dropout not in (None, SHARE):
        raise NotExpressible("token_dropout", f"{SHARE} or None", config.token_dropout)
    if config.token_dropout is None:
        return {"token_dropout": False}
    return {"token_dropout": True, "mask_token_id": config.mask_token_id}


@dataclass(kw_only=True, eq=False)
class EsmNames(EncoderNames):
    """The names of ESM, whose files say how exact the frequencies of the rotation are."""

    @property
    def own_traits(self):
        return super().own_traits | {*ROUNDED}

    def variant_of(self, official, names=None, read=None):
        """See `Names.variant_of`. Raises `ConversionError` if the frequencies do not follow from the config."""
        variant = super().variant_of(official, names, read)
        found = next((name for name in names or () if name.endswith(".inv_freq")), None)
        if found is None or read is None:
            return variant
        config = self.settings.official_config(official)
        stored, size = read(found).float(), config.hidden_size // config.num_attention_heads
        exact = 1.0 / (config.rope_theta ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size))
        for trait, dtype in ROUNDED.items():
            if torch.equal(stored, exact.to(getattr(torch, dtype)).float()):
                return CheckpointVariant(variant.head, variant.traits | {trait})
        if stored.shape != exact.shape or not torch.allclose(stored, exact, rtol=1e-6):
            raise ConversionError(
                f"{shown(found)} are not the frequencies of rope_theta {config.rope_theta} and heads of {size} "
                "channels, neither exact nor in 16 bits; run this model with transformers"
            )
        return variant

    def variant_for(self, config, earlier=None):
        variant = super().variant_for(config, earlier)
        traits = {trait for trait, dtype in ROUNDED.items() if dtype == config.frequency_dtype}
        return CheckpointVariant(variant.head, variant.traits - {*ROUNDED} | traits)

    def notes_on_writing(self, config):
        own = "contact_head" + " and the rounded frequencies of the rotation" * bool(config.frequency_dtype)
        return [f"not part of this model, and written only if its source had it: {own}"]


FAMILY = Family(
    "esm",
    encoder_heads("EsmModel EsmForMaskedLM EsmForSequenceClassification EsmForTokenClassification", ROBERTA_ROWS),
    structure={
        **{name: value for name, value in STRUCTURE.items() if name not in ("position_type", "embedding_norm")},
        "norm_placement": "pre",
        "hidden_act": "gelu",
    },
    fresh={
        **FRESH,
        "position_type": "rotary",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "vocab_size": 33,
        "norm_eps": 1e-5,
        "max_position_embeddings": 1026,
        "type_vocab_size": 0,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "token_dropout": SHARE,
        "mask_token_id": 32,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pooler_act": "tanh",
    },
    names=EsmNames(
        root="esm.",
        embeddings={name: ours for name, ours in EMBEDDINGS.items() if "token_type" not in name},
        layer=NAMES["layer"],
        modules=norms_before("attention.LayerNorm", "crossattention.LayerNorm", "LayerNorm"),
        stack={"embeddings.layer_norm": "embedding_norm", "encoder.emb_layer_norm_after": "norm"},
        language_model=LanguageModelNames(
            dense="lm_head.dense", norm="lm_head.layer_norm", weight="lm_head.decoder.weight", bias="lm_head.bias"
        ),
        ignored=[*FREQUENCIES, "contact_head.regression.weight", "contact_head.regression.bias"],
    ),
    settings=EncoderSettings(
        positions=Positions(),
        computed=[
            Flag("emb_layer_norm_before", "embedding_norm", (False, True)),
            Computed(read_dropout, write_dropout),
        ],
        unsupported={
            "is_folding_model": (None, False),
            "is_decoder": (None, False),
            "add_cross_attention": (None, False),
        },
    ),
)
