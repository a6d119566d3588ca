"""Files of another format under the name of weights, by their first bytes, and what to do about each."""

import re

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


ZEROS = (
    "it begins with zeros: a download or a copy has reserved its place, and not written it; download or copy it again"
)
OF_CTRANSLATE2 = re.compile(rb"[\x01-\x1e]\0\0\0[\x08-\x40]\0[A-Z][A-Za-z0-9]{8}")
"""How its files begin: a version, the length of a name, the name of a class."""


def _of_any(start: bytes) -> str | None:
    if len(start) >= FEWEST and not any(start):
        return ZEROS
    if start.startswith((b"lmgg", b"fmgg", b"tjgg", b"algg")):
        return "a file of llama.cpp from before GGUF; take the weights that it was made of"
    if OF_CTRANSLATE2.match(start):
        return "a model for CTranslate2; take the weights that it was converted from"
    if start.startswith(b"\x89HDF"):
        return "an HDF5 file of Keras or TensorFlow; take the weights for PyTorch, or save them with safetensors"
    if start.startswith(b"\x93NUMPY"):
        return "one array of NumPy; load it with numpy.load, and save all arrays with safetensors.numpy.save_file"
    if start.startswith(b"GGUF"):
        return "a GGUF file for llama.cpp; rename it to model.gguf, or take the weights that it was made of"
    packed = next((name for begin, name in PACKED.items() if start.startswith(begin)), None)
    return None if packed is None else f"compressed by {packed}; unpack it first"
