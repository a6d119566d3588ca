"""Blocks from outside: a class in a file of its author's is one more value of an axis.

A repo whose config names such blocks has this file and theirs, as they are, and `ENTRY`, which imports them before the
model. Other repos have none of the three.
"""

import copy
import functools
import hashlib
import re
import sys
from collections.abc import Collection
from pathlib import Path

import torch

from .attention import LAYER_TYPES, Attention
from .axes import BLOCKS, blocks_of
from .compat import CACHE, create_causal_mask
from .positions import POSITION_TYPES

ENTRY = "with_blocks.py"
# Settings that nothing reads next to a block of an axis, and the values that say nothing.
_IDLE: dict[str, dict[str, Collection]] = {
    "attention_type": {"pruned_heads": (None, {}), "position_type": {*POSITION_TYPES} - {"disentangled"}},
    "mlp_type": dict.fromkeys(
        ("chunk_size_feed_forward", "float32_down_proj", "linear_bits", "num_experts"), (0, None)
    ),
    "norm_type": {"norm_bias": (False, None), "norm_weight": ("plain",), "qk_norm": (False, True, "projection")},
}
# What no test has together with an attention of some layers only.
_WITHOUT_LAYERS = ("kv_lora_rank", "pruned_heads", "attention_type", "add_cross_attention")
# What a position scheme gives, by its class attribute `gives` -> where the stack has its module.
SCHEMES = {"vectors": "embed_positions", "rotations": "rotary_emb", "biases": "relative_bias"}


def block(axis: str, value: str, **fields):
    """Enter the class below under a value of an axis, with its own fields, each declared by `axes.axis`."""

    def enter(cls: type) -> type:
        if axis == "layer_types":
            cls.kind = value  # type: ignore[attr-defined]
        BLOCKS.setdefault(axis, {})[value] = Block(axis, value, cls, fields)
        if axis == "position_type" and "forward" in vars(cls):
            cls.forward = _with_a_limit(value, cls.forward)  # type: ignore[attr-defined]
        return cls

    return enter


def _with_a_limit(value: str, forward):
    """The `forward` of a position scheme, which says so where a text is longer than the scheme's table."""

    @functools.wraps(forward)
    def limited(self, *arguments, **named):
        try:
            return forward(self, *arguments, **named)
        except IndexError as error:
            what = f"position_type={value!r} reads outside its table ({error})"
            raise ValueError(f"{what}: shorten the text, or train with a longer table.") from error

    return limited


class Block:
    """A class from outside, and the file that it stands in.

    Attributes:
        gives: of a position scheme, which positions: a key of `SCHEMES`; of others empty.
        fields: its fields by name, each an `axes.Axis`.
        file: the file's name, `path` where it stood, `source` its content, `digest` the SHA-256 of that in hexadecimal.
        digests: the same of it and of each file with blocks that it imports, which only some repos have.
        tensor_parallel_plan: how processes share its modules, by name within it; empty: it is whole in each.
        library_type: of a layer type, the library's word for it, by which caches are made.
    """

    def __init__(self, axis: str, value: str, cls: type, fields: dict):
        self.axis, self.value, self.cls = axis, value, cls
        self.gives: str = getattr(cls, "gives", "")
        if plain := [name for name, field in fields.items() if "axis" not in getattr(field, "metadata", ())]:
            raise TypeError(f"the field {plain[0]} of {value!r} is not declared: write {plain[0]}=axis(...) of .axes.")
        declared = {name: field.metadata["axis"] for name, field in fields.items()}
        self.fields = {name: each._replace(optional=each.default is None) for name, each in declared.items()}
        self.file = f"{cls.__module__.rpartition('.')[2]}.py"
        self.path = Path(sys.modules[cls.__module__].__file__)  # type: ignore[arg-type]
        self.source = self.path.read_bytes()
        self.digest = hashlib.sha256(self.source).hexdigest()
        self._needed = _imported(self.source)
        others = {name: hashlib.sha256(source).hexdigest() for name, source in self._needed.items()}
        self.digests = {self.file: self.digest, **others}
        self.tensor_parallel_plan: dict[str, str] = getattr(cls, "tensor_parallel_plan", {})
        self.library_type: str = getattr(cls, "library_type", LAYER_TYPES[0])

    def __call__(self, *arguments, **named):
        """A module of the class."""
        return self.cls(*arguments, **named)

    def take_fields(self, config, settings: dict) -> None:
        """Move this block's settings into the config that names it, with its defaults; refuse what nothing reads."""
        for name, each in self.fields.items():
            each.check(name, value := settings.pop(name, copy.deepcopy(each.default)))
            setattr(config, name, value)
        getattr(self.cls, "check_config", self._check_place)(config)
        for name, idle in _IDLE.get(self.axis, {}).items():
            if (value := getattr(config, name)) not in idle and value not in BLOCKS.get(name, ()):
                what = f"{self.axis}={self.value!r} is a block from outside, which does not read {name}={value!r}"
                raise ValueError(f"{what}: leave {name} out.")

    def _check_place(self, config) -> None:
        """Refuse models in which the block could not do its work."""
        what = f"{self.axis}={self.value!r} is a block from outside, which"
        groups, latent = config.num_hidden_groups, config.kv_lora_rank
        keeps = getattr(self.cls, "before_cache", None) not in (None, Attention.before_cache)
        if self.axis == "attention_type" and keeps and groups not in (None, config.num_hidden_layers):
            why = f"tells layers apart by index, and with num_hidden_groups={groups} some layers share one"
            raise ValueError(f"{what} {why}: leave num_hidden_groups out.")
        if self.axis == "layer_types":
            self._check_layers(config, what)
        if self.axis == "position_type" and latent is not None:
            why = f"does not say which part of each head rotates, as rope_parameters do for kv_lora_rank={latent}"
            raise ValueError(f"{what} {why}: set position_type='rotary', or leave kv_lora_rank out.")

    def _check_layers(self, config, what: str) -> None:
        """Refuse a layer's attention where layers of its type would not be found, or nothing has tried them."""
        if not config.is_decoder or config.bidirectional:
            raise ValueError(f"{what} needs a decoder that reads from left to right: leave it out.")
        for name in _WITHOUT_LAYERS:
            if value := getattr(config, name):
                raise ValueError(f"{what} is not supported with {name}={value!r}: leave {name} out.")

    @staticmethod
    def in_library(config):
        """A copy of a config, or itself, whose layer types are the library's words."""
        words = {kind: each.library_type for kind, each in BLOCKS["layer_types"].items()}
        types = [words.get(kind, kind) for kind in config.layer_types]
        if types == config.layer_types:
            return config
        side = copy.copy(config)
        side.layer_types = types
        return side

    def mask_of(self, inputs, config):
        """What layers of this type get as `attention_mask`, of a `layer.StackInputs`: an attention's is the usual."""
        return getattr(self.cls, "mask_of", causal_mask_of)(inputs, config)

    def share_out(self, plan: dict[str, str]) -> None:
        """Put this block's plan into that of a stack. Without one it is whole in each process, as a norm always is.

        The library finds modules by names without a layer's number. So where layers of a type have no plan, attention,
        which may have the same names, is whole in each process, too.
        """
        own, is_shared = self.tensor_parallel_plan, "layers.*.self_attn.q_proj" in plan
        if self.axis == "position_type":
            place = f"{SCHEMES[self.gives]}."
        else:
            places = {"attention_type": "layers.*.self_attn.", "mlp_type": "layers.*.mlp.", "residual": "layers.*."}
            place = (places | {"layer_types": places["attention_type"]}).get(self.axis, "")
        if self.axis == "layer_types" and not hasattr(self.cls, "tensor_parallel_plan"):
            for name in [name for name in plan if name.startswith(place)]:
                del plan[name]
        if self.axis in ("attention_type", "mlp_type"):
            usual = [name for name in plan if name.startswith(place)]
            is_shared = bool(usual) or self.axis == "mlp_type"
            for name in usual if self.axis == "mlp_type" or not own else ():
                del plan[name]
        if place and is_shared:
            plan |= {f"{place}{name}".rstrip("."): style for name, style in own.items()}

    def write(self, config, beside) -> None:
        """Write what a repo with the config has more than others next to a file, this block's own as it is.

        Raises:
            ValueError: the file that was registered stands there and was edited since, so writing would undo that.
        """
        folder = Path(beside).parent
        if self.path.exists() and self.path == (folder / self.file).resolve() and self.path.read_bytes() != self.source:
            what = f"{self.path} was edited after it was registered, and saving a repo next to it would undo the edit"
            raise ValueError(f"{what}: save to another folder.")
        for name, content in {self.file: self.source, **self._needed}.items():
            (folder / name).write_bytes(content)
        (folder / Path(__file__).name).write_bytes(Path(__file__).read_bytes())
        files = sorted({name for each in blocks_of(config) for name in each.digests})
        source = Path(sys.modules[type(config).__module__].__file__).read_text("utf-8")  # type: ignore[arg-type]
        (folder / ENTRY).write_bytes(entry(files, config.auto_classes, source).encode())


def _imported(source: bytes) -> dict[str, bytes]:
    """The files with blocks, next to this one, that a block's file imports and that those import: name -> content."""
    found: dict[str, bytes] = {}
    for name in re.findall(rb"^\s*from \.(\w+) import", source, re.MULTILINE):
        path = Path(__file__).with_name(f"{name.decode()}.py")
        if b"\n@block(" in (content := path.read_bytes()):
            found |= {path.name: content, **_imported(content)}
    return found


def causal_mask_of(inputs, config):
    """The mask of attention to all earlier tokens, of a `layer.StackInputs`, in the form that the backend wants."""
    given = {"attention_mask": inputs.attention_mask, "position_ids": inputs.given_positions}
    given |= {"inputs_embeds": inputs.hidden_states, CACHE: inputs.past_key_values}
    return create_causal_mask(config=config, **given)


def leave(earlier, name: str, tensor) -> None:
    """Keep a tensor for later layers of the same forward; `earlier` is what the attention's `before_cache` gets."""
    setattr(earlier, name, (tensor, torch.is_grad_enabled()))


def read(earlier, name: str):
    """A tensor that an earlier layer of the same forward has left.

    Raises:
        ValueError: reentrant checkpointing would lose its gradients.
    """
    tensor, has_gradients = getattr(earlier, name)
    if torch.is_grad_enabled() and not has_gradients:
        fix = "leave out use_reentrant=True, or set gradient_checkpointing_kwargs={'use_reentrant': False}"
        raise ValueError(f"use_reentrant=True loses the gradients of '{name}', which an earlier layer left: {fix}.")
    return tensor


def entry(files: list[str], auto_classes: dict[str, str], source: str) -> str:
    """The code of `ENTRY`: it imports files with blocks, the model's modules, and what the config's `source` imports.

    All stand there by name: older loaders follow no import of an import.
    """
    modules = sorted({code.partition(".")[0] for code in auto_classes.values()})
    others = {"blocks", *re.findall(r"^ *from \.(\w+) import", source, re.MULTILINE)} - {*modules}
    names = (*(file.removesuffix(".py") for file in files), *sorted(others))
    lines = [f"from .{name} import __doc__ as _  # noqa: F401" for name in names]
    lines += [f"from .{name} import *  # noqa: F403" for name in modules]
    return "\n".join(['"""The blocks of this repo, and its model. Written by Blockformer."""', "", *lines, ""])
