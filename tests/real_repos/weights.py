"""Random weights of today's official classes, under the names that real files have.

A spelling is a function from tensors by name to tensors by name.
"""

import json
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING

Tensors = Mapping[str, Tensor]
Spelling = Callable[[Tensors], Tensors]


def config_class_of(kind: Any, entries: Mapping[str, Any]) -> Any:
    """The configuration class of a model type, some of which have the model class of another."""
    return CONFIG_MAPPING[known] if (known := entries.get("model_type")) in CONFIG_MAPPING else kind.config_class


def random_weights(model_class: str, entries: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that `save_pretrained` writes, drawn so widely that the outputs are peaky."""
    kind = getattr(transformers, model_class)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(entries))
        config = config_class_of(kind, entries).from_pretrained(folder)
        config.dtype = torch.float32
        torch.manual_seed(0)
        model = kind(config).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn_like(parameter)
                if not parameter.requires_grad:
                    continue
                if parameter.dim() < 2:
                    parameter.add_(noise * 0.1)
                elif "embed" in name or "wte" in name or "shared" in name:
                    parameter.copy_(noise * 0.3)
                else:
                    parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            for name, buffer in model.named_buffers():
                if name.endswith(("e_score_correction_bias", "final_logits_bias")):
                    buffer.copy_(torch.randn_like(buffer) * 0.1)
        model.save_pretrained(folder)
        return {name: tensor.clone() for name, tensor in load_file(Path(folder) / "model.safetensors").items()}


def gamma_beta(tensors: Tensors) -> Tensors:
    """BERT's first names of a norm's weight and bias."""
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    return {re.sub("|".join(names), lambda found: names[found[0]], name): each for name, each in tensors.items()}


def plain_norms(tensors: Tensors) -> Tensors:
    """The names of a norm's weight and bias that transformers 5.23 does not write of ESM."""
    names = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
    return {re.sub("|".join(names), lambda found: names[found[0]], name): each for name, each in tensors.items()}


def without(*endings: str) -> Spelling:
    """Leave out the tensors whose names end so."""
    return lambda tensors: {name: each for name, each in tensors.items() if not name.endswith(endings)}


def prefixed(prefix: str) -> Spelling:
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def unprefixed(prefix: str) -> Spelling:
    return lambda tensors: {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def doubled(source: str, *copies: str) -> Spelling:
    """A tied weight that is stored under several names."""
    return lambda tensors: {**tensors, **{name: tensors[source].clone() for name in copies}}


def added(shapes: Mapping[str, tuple[int, ...]]) -> Spelling:
    """Tensors that the official class does not write, such as those of another head."""

    def change(tensors: Tensors) -> Tensors:
        generator = torch.Generator().manual_seed(7)
        return {**tensors, **{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}}

    return change


def rows_of(name: str, source: str, width: int | None = None) -> Spelling:
    """A random tensor with as many rows as another: a vocabulary's bias, or with a width a second embedding."""

    def change(tensors: Tensors) -> Tensors:
        rows = tensors[source].shape[0]
        shape = (rows,) if width is None else (rows, width)
        return added({name: shape})(tensors)

    return change


def positions(name: str, count: int = 64) -> Spelling:
    """The buffer of position ids."""
    return lambda tensors: {**tensors, name: torch.arange(count)[None]}


def causal_masks(
    pattern: str, *, dtype: torch.dtype = torch.float32, size: int = 64, flat: bool = False, masked: float | None = None
) -> Spelling:
    """The buffers of causal masks of two layers, `{}` being the layer; `masked` is the value of the one beside it."""

    def change(tensors: Tensors) -> Tensors:
        mask = torch.ones(size, size).tril().to(dtype)
        mask = mask if flat else mask[None, None]
        more = {pattern.format(layer): mask.clone() for layer in range(2)}
        if masked is not None:
            more |= {
                pattern.format(layer).removesuffix("bias") + "masked_bias": torch.tensor(masked) for layer in range(2)
            }
        return {**tensors, **more}

    return change


def inverse_frequencies(pattern: str, width: int, theta: float = 10_000.0) -> Spelling:
    """The buffers of rotary positions, `{}` being the layer."""
    values = theta ** -(torch.arange(0, width, 2).float() / width)
    return lambda tensors: {**tensors, **{pattern.format(layer): values.clone() for layer in range(2)}}


def sinusoids(*names: str, count: int = 64, width: int = 32) -> Spelling:
    """Fixed positions that are stored: all sines in the first half, all cosines in the second."""
    place = torch.arange(count, dtype=torch.float64)[:, None]
    angles = place * 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    table = torch.cat([angles.sin(), angles.cos()], -1).float()
    return lambda tensors: {**tensors, **{name: table.clone() for name in names}}


def write_safetensors(tensors: Tensors, path: Path) -> None:
    save_file({name: each.clone().contiguous() for name, each in tensors.items()}, path, metadata={"format": "pt"})


def write_pickle(tensors: Tensors, path: Path) -> None:
    torch.save(dict(tensors), path)


FORMATS = {
    "safetensors": ("model", ".safetensors", write_safetensors),
    "bin": ("pytorch_model", ".bin", write_pickle),
}


def write_weights(tensors: Tensors, folder: Path, kind: str, shards: int, dtype: str) -> None:
    """Write weights of a dtype into one file, or into shards with an index."""
    target = getattr(torch, dtype)
    tensors = {name: each.to(target) if each.is_floating_point() else each for name, each in tensors.items()}
    stem, suffix, write = FORMATS[kind]
    if shards == 1:
        write(tensors, folder / f"{stem}{suffix}")
        return
    names, weight_map = list(tensors), {}
    each_has = -(-len(names) // shards)
    for shard in range(shards):
        file = f"{stem}-{shard + 1:05}-of-{shards:05}{suffix}"
        part = {name: tensors[name] for name in names[shard * each_has : (shard + 1) * each_has]}
        write(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    total = sum(each.numel() * each.element_size() for each in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index, indent=2) + "\n")
