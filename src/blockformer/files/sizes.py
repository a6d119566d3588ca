"""Sizes as people write them."""

import re

from .errors import ConversionError, shown

UNITS = {
    "": 1,
    "B": 1,
    **{f"{u}B": 1000**i for i, u in enumerate("KMGT", 1)},
    **{f"{u}IB": 1024**i for i, u in enumerate("KMGT", 1)},
}


def parse_size(size: int | str) -> int:
    """Bytes of "5GB" (1000s), "1.5GiB" (1024s), "200 MB" or a plain number.

    The parser of `huggingface_hub` is private, knows no GiB and takes sizes below zero.

    Raises:
        ConversionError: anything else, or less than one byte.
    """
    found = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)\s*", str(size), re.ASCII)
    unit = UNITS.get(found[2].upper()) if found else None
    count = int(float(found[1]) * unit) if found and unit else 0
    if count < 1:
        raise ConversionError(f"max_shard_size {shown(size)}: needs a size such as 5GB, 200MB, 1.5GiB or 5000000000")
    return count


def format_size(nbytes: float) -> str:
    """Bytes for a person: in 1024s, with one digit after the point."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} TiB"
