"""How the official model is run, to be compared with ours."""

from collections.abc import Callable
from dataclasses import dataclass

import transformers
from transformers import PretrainedConfig, PreTrainedModel


def _as_it_is(model: PreTrainedModel) -> PreTrainedModel:
    return model


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """What must be known of the official class to run it on the same input as ours.

    Attributes:
        counts_padding: whether it counts padding among the positions, and takes no position ids.
        position_shift: a Blockformer config -> what must be added to its position ids to get the official ones.
        prepared: an official model -> the same with what it can compute by itself as exact as its dtype allows, however
            it was stored.
        not_runnable: (family, config of ours) -> why transformers cannot run the official model any more, or None.
    """

    counts_padding: bool = False
    position_shift: Callable[[PretrainedConfig], int] = lambda config: 0
    prepared: Callable[[PreTrainedModel], PreTrainedModel] = _as_it_is
    not_runnable: Callable[[str, PretrainedConfig], str | None] = lambda family, config: None


def wrong_before(first: tuple[int, int], family: str) -> str | None:
    """Why an installed transformers from before this release cannot run a family's official model; or None."""
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= first:
        return None
    wanted = ".".join(map(str, first))
    return f"transformers {transformers.__version__} computes {family} wrongly; install {wanted} or later"
