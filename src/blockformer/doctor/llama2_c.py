"""llama2.c's `ckpt.pt`, and the `.bin` that its `run.c` reads: Llama with the rotated pairs of each head side by side.

The file of numbers has no names: seven integers, then every tensor in a fixed order, one kind of all layers
together. Its length must be exactly what the seven integers say.
"""

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from blockformer.files.regular import open_regular
from blockformer.files.safetensors_io import MAX_TENSORS, TensorInfo, torch_name

from .llama_names import EMBEDDINGS, LAYER, TITAN, rules_with
from .own_code import OwnCode, Settings, Tensors

HEADER = struct.Struct("<7i")
FIELDS = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "max_seq_len")


def read_numbers(path: Path) -> tuple[list[TensorInfo], dict[str, Any]] | None:
    """The tensors of a `.bin` for `run.c`, and its settings; None for any other file. No tensor is read."""
    with open_regular(path) as file:
        start = file.read(HEADER.size)
    if len(start) < HEADER.size:
        return None
    settings: dict[str, Any] = dict(zip(FIELDS, HEADER.unpack(start), strict=True))
    settings["shared"] = settings["vocab_size"] > 0  # the sign says whether the head is the embeddings
    settings["vocab_size"] = abs(settings["vocab_size"])
    is_plain = all(0 < settings[name] < 1 << 24 for name in FIELDS) and settings["n_layers"] < MAX_TENSORS // 16
    if not is_plain or settings["dim"] % settings["n_heads"] or settings["n_heads"] % settings["n_kv_heads"]:
        return None
    offset, infos = HEADER.size, []
    for name, shape in _order(settings):
        info = TensorInfo(name, torch.float32, shape, path, offset)
        infos += [info] if name else []
        offset += info.nbytes
    return (infos, settings) if offset == path.stat().st_size else None


def _order(settings: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor as they lie in the file; no name for tables that are computed today."""
    width, inner, heads = settings["dim"], settings["hidden_dim"], settings["n_heads"]
    narrow = width // heads * settings["n_kv_heads"]
    yield EMBEDDINGS, (settings["vocab_size"], width)
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm": (width,),
        "attention.wq": (width, width),
        "attention.wk": (narrow, width),
        "attention.wv": (narrow, width),
        "attention.wo": (width, width),
        "ffn_norm": (width,),
        "feed_forward.w1": (inner, width),
        "feed_forward.w2": (width, inner),
        "feed_forward.w3": (inner, width),
    }
    for name, shape in shapes.items():
        yield from ((f"layers.{layer}.{name}.weight", shape) for layer in range(settings["n_layers"]))
    yield "norm.weight", (width,)
    for _ in ("cos", "sin"):
        yield "", (settings["max_seq_len"], width // heads // 2)
    if not settings["shared"]:
        yield "output.weight", (settings["vocab_size"], width)


def _entries(settings: Settings, tensors: Tensors) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": settings["dim"],
        "intermediate_size": tensors["layers.0.feed_forward.w1.weight"].shape[0],
        "num_hidden_layers": settings["n_layers"],
        "num_attention_heads": settings["n_heads"],
        "num_key_value_heads": settings.get("n_kv_heads") or settings["n_heads"],
        "vocab_size": tensors[EMBEDDINGS].shape[0],
        "max_position_embeddings": settings["max_seq_len"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": settings.get("shared", True) is True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": torch_name(tensors[EMBEDDINGS].dtype),
    }


LLAMA2_C = OwnCode(
    name="llama2.c",
    shows=(EMBEDDINGS, "layers.0.attention.wq.weight", "layers.0.feed_forward.w1.weight", "layers.0.ffn_norm.weight"),
    key="model_args",
    needs=("dim", "n_layers", "n_heads", "max_seq_len"),
    entries=_entries,
    rules=rules_with(TITAN, "weight"),  # the names are Meta's, which torchtitan has too
    ignored=(f"{LAYER}attention.mask", "freqs_cos", "freqs_sin"),
)
