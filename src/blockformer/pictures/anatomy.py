"""The parts of a model, box by box, from its modules and its config, for a figure to draw and a page to explain."""

import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..inputs import inputs_of
from ..model.attention import Attention
from ..model.axes import BLOCKS
from ..model.layer import PARALLEL
from ..model.stack import Stack
from .canvas import TIMES
from .words import (
    added_title,
    attended_title,
    attention_words,
    end_words,
    feed_forward_words,
    head_title,
    kind_titles,
    language_model_head_words,
    norm_title,
    own_title,
)


@dataclass(frozen=True)
class Box:
    """One box of a figure.

    Attributes:
        role: what it is in its model, the same word in every model, such as "decoder.self_attn.pre_norm".
        path: the name of its module, of the first layer that has it.
        kind: "embedding", "positions", "norm", "attention", "feed-forward", "residual" or "head".
        title: its name in the figure.
        size: its sizes, in a few words.
        code: its file and name, "attention.py · Attention".
        chips: what is special about it, each in a word or three.
        heads: query heads and key/value heads.
        experts: how many, and how many of them for a token.
        mask: what a token sees: "both", "causal", "window", "causal_window" or "cross".
    """

    role: str
    path: str
    kind: str
    title: str
    size: str = ""
    code: str = ""
    chips: tuple[str, ...] = ()
    heads: tuple[int, int] | None = None
    experts: tuple[int, int] | None = None
    mask: str = ""


@dataclass(frozen=True)
class SubLayer:
    """A sub-layer f and its norms, of the slots "input", "pre", "output", "post"."""

    f: Box
    norms: dict[str, Box]


@dataclass(frozen=True)
class LayerKind:
    """Layers that are made alike.

    Attributes:
        title: what sets them apart from the others of their stack, or nothing.
        layers: their numbers.
        is_positioned: whether the stack's positions reach them.
        parallel: whether the sub-layers read the same states.
        multiplier: factor of what a sub-layer adds, or None.
        own: the box around all of a layer whose residual is a block from outside, or None.
    """

    title: str
    layers: tuple[int, ...]
    sublayers: tuple[SubLayer, ...]
    is_positioned: bool
    parallel: bool
    multiplier: float | None
    own: Box | None


@dataclass(frozen=True)
class StackAnatomy:
    """One stack, from the tokens up.

    Attributes:
        name: "encoder" or "decoder".
        path: its module's name.
        reads: what its tokens are called.
        embeddings: the tables whose rows are added up, the token table first.
        projected: what widens the token vectors before that, or None.
        added: positions that are added to the embeddings, or None.
        attended: positions that enter each layer's self-attention, or None.
        after: the boxes between the sum and the first layer.
        sharing: how many layers share one set of weights.
        above: what stands on the layers.
    """

    name: str
    path: str
    reads: str
    embeddings: tuple[Box, ...]
    projected: Box | None
    added: Box | None
    attended: Box | None
    after: tuple[Box, ...]
    kinds: tuple[LayerKind, ...]
    count: int
    sharing: int
    above: tuple[Box, ...]


@dataclass(frozen=True)
class Anatomy:
    """A whole model: its stacks, an encoder first, and what stands on the last one."""

    stacks: tuple[StackAnatomy, ...]
    heads: tuple[Box, ...]
    has_language_model_head: bool

    def boxes(self) -> Iterator[Box]:
        """Every box, from the tokens up; where layers differ, the boxes of each kind."""
        for stack in self.stacks:
            between = (stack.projected, stack.added, stack.attended)
            yield from (*stack.embeddings, *(box for box in between if box), *stack.after)
            for kind in stack.kinds:
                yield from (kind.own,) if kind.own is not None else ()
                for sub in kind.sublayers:
                    yield from (box for box in (sub.norms.get("input"), sub.norms.get("pre"), sub.f) if box)
                    yield from (sub.norms[slot] for slot in ("output", "post") if slot in sub.norms)
            yield from stack.above
        yield from self.heads


SUBLAYERS = {
    "self_attn": "Self-attention",
    "cross_attn": "Cross-attention",
    "mlp": "Feed-forward",
    "end": "Layer's end",
}


def anatomy(model: Any) -> Anatomy:
    """The boxes of a Blockformer model, in the order in which states pass them. It may be on the meta device."""
    body = getattr(model, model.base_model_prefix, model)
    stacks = [body] if isinstance(body, Stack) else [body.encoder, body.decoder]
    names = {id(module): name for name, module in model.named_modules()}
    reads = [each.title for each in inputs_of(model.config) if each.kind == "tokens"]
    described = tuple(_stack(stack, names, words) for stack, words in zip(stacks, reads, strict=True))
    heads, seen = [], (Stack, nn.Dropout)
    for owner in (body, model) if body is not model else (model,):
        parts = list(owner.named_children())
        if owner is body and isinstance(body, Stack):
            parts = [part for part in parts if part[0] == "pooler"]
        # The transform of a head is its last child where a base class makes it last, and yet comes first.
        for name, module in sorted(parts, key=lambda part: "transform" not in part[0]):
            if module is not body and not isinstance(module, seen) and _weighs(module):
                heads.append(_head(owner, name, module, names, model.config))
    return Anatomy(described, tuple(heads), hasattr(model, "lm_head"))


def _weighs(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _stack(stack: Stack, names: dict[int, str], reads: str) -> StackAnatomy:
    config, side = stack.config, "decoder" if stack.is_causal else "encoder"
    path = names[id(stack)]
    prefix = f"{path}." if path else ""

    def box(attribute: str, kind: str, title: str, size: str = "", chips: tuple[str, ...] = ()) -> Box:
        code = code_of(stack, attribute)
        return Box(f"{side}.{attribute}", prefix + attribute, kind, title, size, code, chips)

    width, tokens = config.embedding_size, config.token_size
    scale = () if config.embedding_scale is None else (f"{TIMES} {config.embedding_scale:.4g}",)
    vocabulary = stack.embed_tokens.num_embeddings
    embeddings = [box("embed_tokens", "embedding", "Token embedding", f"{vocabulary:,} {TIMES} {tokens:,}", scale)]
    for attribute, title in (("embed_token_types", "Segments"), ("embed_task_types", "Tasks")):
        if (table := getattr(stack, attribute)) is not None:
            embeddings.append(box(attribute, "embedding", title, f"{table.num_embeddings} {TIMES} {width:,}"))
    projected = added = attended = None
    if stack.token_projection is not None:
        projected = box("token_projection", "embedding", "Projection", f"{tokens:,} → {config.hidden_size:,}")
    if stack.embed_positions is not None:
        added = box("embed_positions", "positions", added_title(config))
    for attribute in ("rotary_emb", "relative_bias"):
        if getattr(stack, attribute) is not None:
            attended = box(attribute, "positions", attended_title(config))
    after = []
    if stack.embedding_norm is not None:
        after.append(box("embedding_norm", "norm", norm_title(config)))
    if stack.embed_projection is not None:
        after.append(box("embed_projection", "embedding", "Projection", f"{width:,} → {config.hidden_size:,}"))
    if stack.token_inputs is not None:
        size = f"{vocabulary:,} {TIMES} {len(stack.layers)} {TIMES} {stack.token_inputs.size:,}"
        after.append(box("token_inputs", "embedding", "Vectors for the layers", size))
    above: tuple[Box, ...] = () if stack.norm is None else (box("norm", "norm", norm_title(config, "Final ")),)
    if stack.final_projection is not None:
        size = f"{config.hidden_size:,} → {stack.final_projection.out_features:,}"
        above += (box("final_projection", "embedding", "Projection", size),)
    kinds, passes = _kinds(stack, side, prefix), stack.passes
    count = passes * len(stack.layers)
    boxes = tuple(embeddings), projected, added, attended, tuple(after)
    return StackAnatomy(side, path, reads, *boxes, kinds, count, passes, above)


def _kinds(stack: Stack, side: str, prefix: str) -> tuple[LayerKind, ...]:
    groups: dict[tuple, list[int]] = {}
    layers: list[Any] = list(stack.layers)
    for index, layer in enumerate(layers):
        names = tuple(name for name, _ in layer.named_children())
        inner = layer.mlp.up_proj.out_features if getattr(stack.config, "intermediate_sizes", None) else 0
        reads = getattr(layer.self_attn, "k_proj", True) is None
        kind = (layer.layer_type, layer.rotates, type(layer.mlp), len(layer.self_attn.heads), reads, inner)
        signature = (*kind, names)
        groups.setdefault(signature, []).append(index)
    titles = kind_titles(stack.config, [signature[:-1] for signature in groups], [names for *_, names in groups])
    kinds = []
    for title, indices in zip(titles, groups.values(), strict=True):
        layer = layers[indices[0]]
        subs = [name for name in SUBLAYERS if getattr(layer, name, None) is not None]
        described = tuple(_sublayer(stack, layer, side, f"{prefix}layers.{indices[0]}.", name) for name in subs)
        numbers = tuple(index * stack.passes + turn for index in indices for turn in range(stack.passes))
        positioned = layer.rotates or stack.rotary_emb is None
        is_parallel, own = layer.residual in PARALLEL, None
        if layer.residual in BLOCKS["residual"]:
            path, code = f"{prefix}layers.{indices[0]}", code_of(stack.layers, str(indices[0]))
            own = Box(f"{side}.layer", path, "residual", own_title(layer.residual), code=code)
        kinds.append(LayerKind(title, numbers, described, positioned, is_parallel, layer.multiplier, own))
    return tuple(kinds)


def _sublayer(stack: Stack, layer: nn.Module, side: str, prefix: str, name: str) -> SubLayer:
    config, module = stack.config, getattr(layer, name)
    role, code = f"{side}.{name}", code_of(layer, name)
    if isinstance(module, Attention):
        size, chips = attention_words(module, layer)
        mask = "cross" if module.is_cross_attention else "causal" if module.is_causal else "both"
        if module.sliding_window:
            mask = "window" if mask == "both" else "causal_window"
        count = len(module.heads)
        heads = (count, count // module.num_key_value_groups)
        f = Box(role, prefix + name, "attention", SUBLAYERS[name], size, code, chips, heads=heads, mask=mask)
    elif hasattr(module, "state_bytes"):
        size, *more = module.words
        f = Box(role, prefix + name, "attention", SUBLAYERS[name], size, code, tuple(more), mask="causal")
    elif name == "end":
        size, chips = end_words(module)
        f = Box(role, prefix + name, "feed-forward", SUBLAYERS[name], size, code, chips)
    else:
        size, chips, experts = feed_forward_words(module, config)
        title = "Experts" if experts else SUBLAYERS[name]
        f = Box(role, prefix + name, "feed-forward", title, size, code, chips, experts=experts)
    norms = {}
    for slot in ("input", "pre", "output", "post"):
        if (norm := f"{name}_{slot}_norm") in layer._modules:
            code = code_of(layer, norm)
            norms[slot] = Box(f"{role}.{slot}_norm", prefix + norm, "norm", norm_title(config), code=code)
    return SubLayer(f, norms)


def _head(owner: nn.Module, name: str, module: nn.Module, names: dict[int, str], config) -> Box:
    path = names[id(owner)]
    box = Box(f"head.{name}", f"{path}.{name}".lstrip("."), "head", head_title(name), code=code_of(owner, name))
    if isinstance(module, nn.Linear):
        chips = language_model_head_words(config) if name == "lm_head" else ("bias",) * (module.bias is not None)
        return replace(box, size=f"{module.in_features:,} → {module.out_features:,}", chips=chips)
    dense = next((part for part in module.modules() if isinstance(part, nn.Linear)), None)
    size = "" if dense is None else f"{dense.in_features:,} → {dense.out_features:,}"
    return replace(box, size=size)


def code_of(owner: nn.Module, attribute: str) -> str:
    """File and name of a module's code; of torch's own modules, the place that makes them."""
    module = getattr(owner, attribute)
    if type(module) in (nn.LayerNorm, nn.RMSNorm):
        return "normalization.py · make_norm"
    made = type(module)
    if made.__module__.startswith("blockformer."):
        return f"{_file(made)} · {made.__name__}"
    if isinstance(module, nn.ModuleDict):
        first = type(next(iter(module.values())))
        return f"{_file(first)} · {first.__name__}"
    maker = next(cls for cls in type(owner).__mro__ if f"self.{attribute} = " in _initializer(cls))
    return f"{_file(maker)} · {maker.__name__}"


def _file(cls: type) -> str:
    return f"{cls.__module__.rpartition('.')[2]}.py"


@functools.cache
def _initializer(cls: type) -> str:
    return inspect.getsource(cls.__dict__["__init__"]) if "__init__" in cls.__dict__ and cls is not object else ""
