"""A page's facts on each box: parameters, memory, shapes, operations, the fields that steer it, its code."""

import copy
from typing import Any

from ..declared_fields import axes_of
from ..files.sizes import format_size
from ..inputs import inputs_of
from ..pictures.anatomy import Anatomy, Box, StackAnatomy, anatomy
from ..pictures.canvas import short
from ..pictures.figure import figure
from ..summary import cached_numbers, idle_parameters, on_paper, state_bytes
from .dry_run import Record, Shape, dry_run, element_size, weights_of
from .fields import fields_of, plain

LENGTH = 128
"""Tokens of the text where none is given."""
MAX_KINDS = 24
"""Kinds of layers that a page shows at most: pruned heads may make one of every layer."""


class Facts:
    """A model on paper, and a text of a given length going through it.

    Attributes:
        parts: its boxes.
        dtype: of its weights, and `size` the bytes of one.
    """

    def __init__(self, config, length: int | None = None, target: int | None = None):
        self.config = config
        limit = config.max_position_embeddings - config.is_decoder  # with room for the token that a decoder adds
        self.length = min(length or LENGTH, limit)
        target = target if config.is_encoder_decoder else None
        self.target = min(target or self.length, config.max_position_embeddings)
        self.model: Any = on_paper(config)
        self.parts: Anatomy = anatomy(self.model)
        self.dtype, self.size = element_size(config)
        # 4-bit weights query the device's autocast, which "meta" lacks: their matmuls count like plain ones.
        runs = self.model if getattr(config, "linear_bits", None) is None else on_paper(_with_plain_weights(config))
        self.text, self.step = dry_run(runs, self.length, self.target)

    @property
    def text_length(self) -> str:
        """How long the text is, in words."""
        lengths = {True: self.length, False: self.target}
        tokens = [each for each in inputs_of(self.config) if each.kind == "tokens"]
        return " and ".join(f"{lengths[each.of_source]:,} {each.title}" for each in tokens)

    def box(self, box: Box, stack: StackAnatomy | None, layers: tuple[int, ...]) -> dict[str, Any]:
        """All about one box, as data for the page."""
        module = self.model.get_submodule(box.path)
        passes = 1 if stack is None else stack.sharing
        parameters, nbytes = weights_of(module, self.size)
        known = axes_of(self.config)
        steering = [[name, plain(value), known[name].meaning] for name, value in fields_of(box, self.config).items()]
        about: dict[str, Any] = {
            "path": box.path,
            "role": box.role,
            "kind": box.kind,
            "title": box.title,
            "size": box.size,
            "chips": list(box.chips),
            "code": box.code,
            "fields": steering,
            "parameters": parameters,
            "bytes": nbytes,
            "shapes": self.shapes(box.path),
            "flops": self.text.of(box.path) // passes,
            "layers": list(layers),
        }
        if stack is not None and len(layers) < stack.count:
            about["kindTitle"] = next(kind.title for kind in stack.kinds if kind.layers == layers)
        if self.step is not None and not box.role.startswith("encoder."):
            about["stepFlops"] = self.step.of(box.path) // passes
            if box.heads:
                about["cache"] = module.cached_numbers * self.size
            if hasattr(module, "state_bytes"):
                about["state"] = module.state_bytes(self.size)
        return about

    def shapes(self, path: str) -> list[list]:
        """[words, shape read, shape written] of a box and of the modules directly in it."""
        record: Record = self.text
        rows = [["", *_texts(record.shapes.get(path))]]
        children = self.model.get_submodule(path).named_children()
        rows += [
            [name, *_texts(record.shapes[f"{path}.{name}"])]
            for name, _ in children
            if f"{path}.{name}" in record.shapes
        ]
        if path in record.scores:
            rows.append(["probabilities [B, H, T, S]", "", _text(record.scores[path])])
        return rows

    def boxes(self) -> list[dict[str, Any]]:
        """Every box of the figure; where layers differ, the boxes of each kind."""
        placed: dict[str, tuple[StackAnatomy, tuple[int, ...]]] = {}
        hidden: set[str] = set()
        for stack in self.parts.stacks:
            for index, kind in enumerate(stack.kinds):
                paths = [box.path for sub in kind.sublayers for box in (sub.f, *sub.norms.values())]
                paths += [kind.own.path] if kind.own is not None else []
                placed |= dict.fromkeys(paths, (stack, kind.layers))
                hidden |= set(paths if index >= MAX_KINDS else ())
        boxes = (box for box in self.parts.boxes() if box.path not in hidden)
        return [self.box(box, *placed.get(box.path, (None, ()))) for box in boxes]

    def totals(self) -> list[list[str]]:
        """The model's own figures: name, value, a word on it."""
        parameters, nbytes = weights_of(self.model, self.size)
        idle = idle_parameters(self.model)
        words = f"{parameters - idle:,} of them for a token" if idle else "tied ones count once"
        rows = [
            ["parameters", short(parameters), f"{parameters:,}; {words}"],
            ["weights", format_size(nbytes), f"in {self.dtype}: {nbytes:,} bytes"],
        ]
        flops = sum(self.text.flops.values())
        if self.step is not None:
            token = sum(self.step.flops.values())
            rows.append(["FLOPs for a token", short(token), f"{token:,} with {self.target:,} tokens in the cache"])
        rows.append(
            ["FLOPs for a text", short(flops), f"{flops:,} for {self.text_length}, 2 for a multiplication and addition"]
        )
        if self.step is not None:
            cache = cached_numbers(self.model) * self.size
            rows.append(
                ["cache for a token", format_size(cache), f"{cache:,} bytes of keys and values in {self.dtype}"]
            )
        if state := state_bytes(self.model, self.size):
            rows.append(["state for a text", format_size(state), f"{state:,} bytes, however long the text is"])
        return rows

    def sentence(self) -> str:
        """The model, described in a sentence."""
        width, stacks = f"{self.config.hidden_size:,}", self.parts.stacks
        words = [f"{'an' if stack.name == 'encoder' else 'a'} {stack.name} of {stack.count} layers" for stack in stacks]
        return f"{' and '.join(words)}, {width} wide.".capitalize()

    def figures(self, marks: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
        """The figure with each kind of layers opened, and the kind's name."""
        made = []
        for opened in range(min(MAX_KINDS, max(len(stack.kinds) for stack in self.parts.stacks))):
            words = []
            for stack in self.parts.stacks:
                kind = stack.kinds[min(opened, len(stack.kinds) - 1)]
                if len(stack.kinds) > 1:
                    words.append(f"{kind.title} ({spans(kind.layers)})")
            label = "; ".join(dict.fromkeys(words))
            made.append({"label": label, "svg": figure(self.parts, opened, title="The model, box by box", marks=marks)})
        return made


def _with_plain_weights(config):
    config = copy.deepcopy(config)
    config.linear_bits = None
    return config


def spans(numbers: tuple[int, ...]) -> str:
    """(0, 1, 2, 5) -> "layers 0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    shown = words if len(words) < 13 else [*words[:11], "..."]
    return f"layer{'s' * (len(numbers) > 1)} {', '.join(shown)}"


def _text(shape: Shape | None) -> str:
    return "" if shape is None else "[" + ", ".join(f"{size:,}" for size in shape) + "]"


def _texts(shapes: tuple[Shape | None, Shape | None] | None) -> tuple[str, str]:
    return ("", "") if shapes is None else (_text(shapes[0]), _text(shapes[1]))
