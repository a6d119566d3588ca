"""Files of another format under the name of weights, by their first bytes, and what to do about each."""

PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
"""The first bytes of compressed files -> the program that unpacks them."""
FEWEST = 9
"""Bytes by which a safetensors file is known: the length of its header, and the bracket that it begins with."""


def in_place_of_safetensors(start: bytes) -> str | None:
    """What a file is that should be of safetensors, and the remedy; None if its first bytes do not show it."""
    if start.startswith((b"PK\x03\x04", b"\x80\x02")):
        return "a pickled file (torch.save) under the name of a safetensors one; rename it to pytorch_model.bin"
    return _of_any(start)


def in_place_of_pickle(start: bytes) -> str | None:
    """The same for a file that should be pickled."""
    length = int.from_bytes(start[:8], "little")
    if len(start) >= FEWEST and start[8:9] == b"{" and 0 < length < 1 << 40:
        return "a safetensors file under the name of a pickled one; rename it to model.safetensors"
    return _of_any(start)


def _of_any(start: bytes) -> str | None:
    if start.startswith(b"GGUF"):
        return "a GGUF file for llama.cpp; rename it to model.gguf, or take the weights that it was made of"
    packed = next((name for begin, name in PACKED.items() if start.startswith(begin)), None)
    return None if packed is None else f"compressed by {packed}; unpack it first"
