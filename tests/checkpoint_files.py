"""Helpers of the conversion tests: small checkpoints, whole and damaged, and folders compared byte by byte."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

BODY = bytes(range(16))


def raw_safetensors(path: Path, header: Any, body: bytes = BODY) -> Path:
    """A safetensors file with a header of any kind: an object, or the JSON's bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


def entry(begin: int = 0, end: int = 16, dtype: Any = "F32", shape: Any = None) -> dict[str, Any]:
    """A tensor's entry in a header; the shape follows from float32 and the range if it is not given."""
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def small_tensors() -> dict[str, Tensor]:
    return {
        "a.weight": torch.randn(3, 4),
        "b.weight": torch.randn(5, dtype=torch.float64),
        "c.weight": torch.randn(2, 2),
    }


def make_single(folder: Path, tensors: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """A checkpoint of one file."""
    tensors = small_tensors() if tensors is None else tensors
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    save_file(tensors, folder / "model.safetensors")
    return tensors


def make_sharded(folder: Path) -> dict[str, Tensor]:
    """A checkpoint of three shards, one tensor each."""
    tensors = small_tensors()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    files = {name: f"model-0000{i}-of-00003.safetensors" for i, name in enumerate(tensors, 1)}
    for name, file in files.items():
        save_file({name: tensors[name]}, folder / file)
    write_index(folder, files)
    return tensors


def write_index(folder: Path, weight_map: Any, **rest: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map, **rest}))


def read_index(folder: Path) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def bytes_like(tensor: Tensor) -> bytes:
    return tensor.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy().tobytes()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype, shape and every bit, NaN payloads too."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bytes_like(a) == bytes_like(b)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
