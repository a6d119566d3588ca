"""The formats of weights in few bits that are read. A new one is an object more, and its line here."""

from collections.abc import Iterable, Mapping
from typing import Any

from .awq import AWQ
from .compressed import COMPRESSED
from .fp8 import FP8, MODELOPT
from .gptq import GPTQ
from .low_bits import LowBitFormat
from .mxfp4 import MXFP4

FORMATS: tuple[LowBitFormat, ...] = (AWQ, COMPRESSED, FP8, GPTQ, MODELOPT, MXFP4)


def format_of(official: Mapping[str, Any], names: Iterable[str] | None = None) -> LowBitFormat | None:
    """The format of a checkpoint's weights, whose `config.json` is checked; None where they are plain.

    Args:
        official: its `config.json`.
        names: its tensors; None asks only the config.

    Raises:
        ConversionError: the config tells of another kind of such weights.
    """
    known = None if names is None else list(names)
    for each in FORMATS:
        if each.is_told(official) if known is None else each.is_there(official, known):
            each.check(official)
            return each
    return None
