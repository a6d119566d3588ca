"""Official settings that ours cannot express, and what to do about them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from blockformer.files.errors import shown
from blockformer.files.quantized import FIELDS, REMEDY

from .head import Head

# Official settings that change what a model computes and that no family here has: name -> values that mean "not used".
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None, {}),
    "compression_config": (None, {}),
    "is_encoder_decoder": (None, False),
    "cross_attention_hidden_size": (None,),
    "per_layer_config": (None, {}),
    "token_classification_bias": (None, True),
    "pruned_heads": (None, {}),
}
MASKS = ("is_causal", "sliding_window", "attention_chunk_size")
"""Official settings that the masks and caches of transformers follow in every class, also in one that lacks them."""
_NO_WINDOW = "this family has no windows, but the official cache would forget what lies before one; set it to null"
_NOT_FOLLOWED = "the official class ignores it, so run this model with its own code"
BOTH_WAYS = "use_bidirectional_attention"
"""An official setting that only some classes read."""
REMEDIES = {
    "is_encoder_decoder": "generate follows it; it must be true for an encoder-decoder and false for other models",
    "is_causal": "the official class then uses another mask; remove it if the model was not trained like that",
    "sliding_window": _NO_WINDOW,
    "attention_chunk_size": _NO_WINDOW,
    **dict.fromkeys(("no_bias", "logit_scale", "expansion_ratio"), _NOT_FOLLOWED),
    **dict.fromkeys(FIELDS, REMEDY),
    BOTH_WAYS: "here, tokens of this family only look back, so run this model with transformers or "
    "sentence-transformers; set it to false only for a model that was trained that way",
    "scale_attn_by_inverse_layer_idx": "here all layers scale scores alike; in layer i, counted from 0, divide the "
    "queries' third of c_attn.weight and c_attn.bias by i + 1, which computes the same, and set it to false",
    "reorder_and_upcast_attn": "it computes the same, in another order and in float32; set it to false",
    "n_langs": "with use_lang_emb the model adds a vector for each token's language; Blockformer's models do not",
    "slow_but_exact": "with pretraining_tp above 1 the official class leaves out two biases; set it to false",
}
"""Official setting -> why it cannot be converted and what to do, where its name does not say that."""
_BY_ITS_OWN_CODE = (
    "the official class ignores it, and only the source's own code uses it; for a model that was trained to look both "
    "ways, write is_causal: false instead"
)


def usual_masks(
    heads: Sequence[Head], directions: tuple[bool, ...], defaults: Collection[str], official: Mapping[str, Any]
) -> dict[str, tuple[Any, ...]]:
    """Which values of `MASKS` leave the masks and caches of an official class as they are: name -> values.

    In an encoder-decoder no value of `is_causal` does so, since it turns one of the two stacks round.

    Args:
        heads: of the family.
        directions: what a decoder's `is_causal` may be.
        defaults: the fields of the official class.
        official: the entries of a `config.json`.
    """
    stacks = {head.ours.partition("For")[0].removesuffix("Model") for head in heads}
    both = "BlockformerEncoderDecoder" in stacks
    is_encoder = not both and "BlockformerEncoder" in stacks and official.get("is_decoder") is not True
    usual = () if both else (None, False) if is_encoder else directions
    window = {} if is_encoder or "sliding_window" in defaults else {"sliding_window": (None,)}
    reads_it = is_encoder or both or BOTH_WAYS in defaults
    own_code = {} if reads_it else {BOTH_WAYS: (None, False)}
    return {"is_causal": usual, "attention_chunk_size": (None,), **window, **own_code}


def lines_on(names: Sequence[str], official: Mapping[str, Any], defaults: Collection[str]) -> list[str]:
    """A line on each of these entries: its value, and why it cannot be converted.

    Args:
        names: of the entries.
        official: all entries.
        defaults: the fields of the official class.
    """
    remedies = REMEDIES if BOTH_WAYS in defaults else {**REMEDIES, BOTH_WAYS: _BY_ITS_OWN_CODE}
    return [
        f"{name} is {shown(official[name])}" + (f": {remedies[name]}" if name in remedies else "") for name in names
    ]
