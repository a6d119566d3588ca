"""Pictures as SVG, from the model's own code: for the docs, and the figure of any model."""

from collections.abc import Callable

from .anatomy import anatomy as anatomy
from .figure import figure as figure
from .of_attention import cache, grouped_heads, masks
from .of_layers import add_and_norm, models, transformer
from .of_positions import relative_buckets, rotations, sinusoids

PICTURES: dict[str, Callable[[], str]] = {
    "transformer": transformer,
    "models": models,
    "add-and-norm": add_and_norm,
    "sinusoids": sinusoids,
    "rotations": rotations,
    "masks": masks,
    "grouped-heads": grouped_heads,
    "cache": cache,
    "relative-buckets": relative_buckets,
}
"""The pictures of the docs, by the name of the file in docs/pictures."""
