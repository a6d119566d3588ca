"""Which of a family's tensors an unknown code's tensors may be, by their shapes, and then by their names.

The family's model is built once with sizes that are all different, so that each axis of its tensors shows which size it
is. The checkpoint's sizes are the ones with which its tensors are exactly the family's: one by one, transposed, or
several of them joined.
"""

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from blockformer.conversion.rules.operations import Shape
from blockformer.files.errors import ConversionError, shown

NUMBER = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,3})(?![0-9])")
LAYER, WEIGHT, BIAS = "{layer}", ".weight", ".bias"
COMPUTED = re.compile(r"(mask|inv_freq|freqs?(_cis|_cos|_sin)?|cos|sin|cos_cached|sin_cached|tril|position_ids)$")
"""How names end of what code keeps as buffers, and computes again."""
ROLES: Mapping[str, Sequence[str]] = {
    "q": ("q", "wq", "query", "queries", "q_proj", "to_q", "q_lin"),
    "k": ("k", "wk", "key", "keys", "k_proj", "to_k", "k_lin"),
    "v": ("v", "wv", "value", "values", "v_proj", "to_v", "v_lin"),
    "o": ("o", "wo", "o_proj", "out_proj", "to_out", "out_lin"),
    "gate": ("gate", "gate_proj"),
    "up": ("up", "up_proj", "fc1", "fc_in", "c_fc"),
    "down": ("down", "down_proj", "fc2", "fc_out"),
    "embeddings": ("wte", "embed_tokens", "token_embedding", "tok_emb", "token_emb", "tok_embeddings", "tok"),
    "positions": ("wpe", "pos", "position", "positions", "pos_emb", "position_embedding", "position_embeddings"),
    "head": ("head", "lm_head", "unembed", "unembedding", "logits", "to_logits"),
    "first norm": ("norm1", "norm_1", "ln1", "ln_1", "input_layernorm", "attn_norm", "attention_norm"),
    "second norm": ("norm2", "norm_2", "ln2", "ln_2", "post_attention_layernorm", "ffn_norm", "mlp_norm"),
    "q norm": ("q_norm", "norm_q"),
    "k norm": ("k_norm", "norm_k"),
}
"""What a tensor does -> parts of names that say so, without underscores."""
TOGETHER = (("q", "k", "v"), ("k", "v"), ("gate", "up"))
"""Matrices that code joins."""


@dataclass(frozen=True)
class Slot:
    """A tensor of the family's model: its name, and its size along each axis, by the names of sizes.

    Attributes:
        has_bias: whether it is a weight that a bias belongs to.
    """

    name: str
    sizes: tuple[str, ...]
    has_bias: bool = False

    def shape(self, sizes: Mapping[str, int]) -> Shape:
        """Its shape with these sizes; a number before a name multiplies it."""
        return tuple(_valued(each, sizes) for each in self.sizes)

    @property
    def bias(self) -> "Slot":
        """The bias that belongs to it, with the sizes of the weight."""
        return Slot(f"{self.name.removesuffix(WEIGHT)}{BIAS}", self.sizes)


@dataclass(frozen=True)
class Choice:
    """What a tensor may be: one slot or several joined ones, as they are or transposed."""

    slots: tuple[Slot, ...]
    is_turned: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Of the slots."""
        return tuple(slot.name for slot in self.slots)

    @property
    def of_biases(self) -> "Choice":
        """The same of the biases that belong to the slots."""
        return Choice(tuple(slot.bias for slot in self.slots))


@dataclass
class Sources:
    """The tensors of the code.

    Attributes:
        outside: the tensors outside the layers, without biases of others.
        of_layer: the tensors of each layer, with `{layer}` in their names.
        biases: weights of both that a bias belongs to.
        layers: how many there are.
        computed: names of tensors that look like what code computes again: masks, rotations, positions.
    """

    outside: dict[str, Shape]
    of_layer: dict[str, Shape]
    layers: int
    biases: frozenset[str]
    computed: list[str] = field(default_factory=list)


@dataclass
class Match:
    """What is known of each tensor.

    Attributes:
        sizes: of the model, by name.
        choices: tensor -> what it may be; one choice where it is known.
        by_name: tensors of which the shape leaves several choices, and the name one.
        free: slots that no tensor is left for.
        zero: biases that the code does without.
    """

    sizes: dict[str, int]
    choices: dict[str, list[Choice]] = field(default_factory=dict)
    by_name: list[str] = field(default_factory=list)
    free: list[Slot] = field(default_factory=list)
    zero: list[Slot] = field(default_factory=list)


def sources_of(shapes: Mapping[str, Shape]) -> Sources:
    """Tell the layers by the numbers in names: from 0, each with the same names.

    Raises:
        ConversionError: no numbers do, or tensors of different layers have different shapes.
    """
    places: dict[str, dict[int, dict[str, Shape]]] = defaultdict(lambda: defaultdict(dict))
    for name, shape in shapes.items():
        for found in NUMBER.finditer(name):
            places[name[: found.start()]][int(found[0])][name[found.end() :]] = shape
    alike = {
        head: layers
        for head, layers in places.items()
        if {*layers} == {*range(len(layers))} and len({frozenset(each) for each in layers.values()}) == 1
    }
    if not alike:
        raise ConversionError("no layers: none of the names have numbers from 0, each followed by the same names")
    head = max(alike, key=lambda each: (sum(map(len, alike[each].values())), -len(each)))
    layers = alike[head]
    if differing := [end for end, shape in layers[0].items() if any(each[end] != shape for each in layers.values())]:
        name = f"{head}{LAYER}{differing[0]}"
        raise ConversionError(f"{shown(name)} has another shape in some layers: write this file of names by hand")
    inside = {f"{head}{number}{end}" for number, each in layers.items() for end in each}
    outside = {name: shape for name, shape in shapes.items() if name not in inside}
    of_layer = {f"{head}{LAYER}{end}": shape for end, shape in layers[0].items()}
    computed = [name for name in (*outside, *of_layer) if COMPUTED.search(name.lower())]

    all_ = {**outside, **of_layer}
    biases = {f"{name.removesuffix(BIAS)}{WEIGHT}" for name in all_ if name.endswith(BIAS)} & {*all_}
    left_out = {*computed, *(f"{name.removesuffix(WEIGHT)}{BIAS}" for name in biases)}

    def without(tensors: Mapping[str, Shape]) -> dict[str, Shape]:
        return {name: shape for name, shape in tensors.items() if name not in left_out}

    return Sources(without(outside), without(of_layer), len(layers), frozenset(biases), computed)


def match(
    sources: Sources, outside: Sequence[Slot], of_layer: Sequence[Slot], known: Mapping[str, int]
) -> Match | None:
    """Sizes with which the tensors are a family's, and what each may be; None if there are none.

    Args:
        sources: the tensors.
        outside, of_layer: of the family's model.
        known: sizes that the user says.

    Raises:
        ConversionError: there are several such sizes.
    """
    known = {"C": _width(sources), **known}
    biases = sources.biases
    inner = [*_sizes(sources.of_layer, of_layer, known, biases)]
    all_ = [each for sizes in inner for each in _sizes(sources.outside, outside, sizes, biases)]
    if len(all_) > 1:
        raise AmbiguousSizes(all_)
    if not all_:
        return None
    found = Match(all_[0])
    for tensors, slots in ((sources.outside, outside), (sources.of_layer, of_layer)):
        _settle(found, tensors, slots, biases)
    return found


class AmbiguousSizes(ConversionError):
    """The tensors fit with several sizes.

    Args:
        sizes: each of them, by name.
    """

    def __init__(self, sizes: Sequence[Mapping[str, int]]):
        super().__init__("the shapes fit with several sizes")
        self.values = {name: [*dict.fromkeys(each[name] for each in sizes)] for name in sizes[0]}


def _width(sources: Sources) -> int:
    """The size that is most often an axis of the tensors of a layer."""
    axes = Counter(size for shape in sources.of_layer.values() for size in _squeezed(shape))
    return axes.most_common(1)[0][0] if axes else 0


def _valued(text: str, sizes: Mapping[str, int]) -> int:
    factor = text.rstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    return int(factor or 1) * sizes.get(text[len(factor) :], 0)


def _squeezed(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def _sizes(
    tensors: Mapping[str, Shape], slots: Sequence[Slot], known: Mapping[str, int], biases: frozenset[str]
) -> Iterator[dict[str, int]]:
    """All sizes that the slots need and that are not known yet, with which the tensors are these slots."""
    named = {each.lstrip("0123456789") for slot in slots for each in slot.sizes} - {*known}
    axes = {size for shape in tensors.values() for size in _squeezed(shape)}
    width = known["C"]
    parts = {size // 2 for size in axes} | {(size - width) // 2 for size in axes if size > width}
    candidates = sorted(axes | {each for each in parts if each > 1})
    for values in itertools.product(candidates, repeat=len(named)):
        sizes = {**known, **dict(zip(sorted(named), values, strict=True))}
        query, key, head = sizes.get("Q", width), sizes.get("K"), sizes.get("D")
        if (key is not None and query % key) or (head is not None and math.gcd(query, key or query) % head):
            continue
        if _is_possible(tensors, slots, sizes, biases):
            yield sizes


def _is_possible(
    tensors: Mapping[str, Shape], slots: Sequence[Slot], sizes: Mapping[str, int], biases: frozenset[str]
) -> bool:
    """Whether the tensors are these slots, and none of the slots is left but a head."""
    vectors, matrices = _apart(tensors)
    of_one, of_two = _apart({slot.name: slot.shape(sizes) for slot in slots})
    if Counter(vectors.values()) != Counter(of_one.values()):
        return False
    named = [slot for slot in slots if slot.name in of_two]
    return all(_options(matrices, named, sizes, {}, biases).values())


def _may_lack(slot: Slot) -> bool:
    return "head" in roles_of(slot.name)


def _apart(tensors: Mapping[str, Shape]) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Vectors, and what has more axes."""
    plain = {name: _squeezed(shape) for name, shape in tensors.items()}
    one = {name: shape for name, shape in plain.items() if len(shape) < 2}
    return one, {name: shape for name, shape in plain.items() if name not in one}


def _options(
    tensors: Mapping[str, Shape],
    slots: Sequence[Slot],
    sizes: Mapping[str, int],
    fixed: Mapping[str, list[Choice]],
    biases: frozenset[str],
) -> dict[str, list[Choice]]:
    """What each matrix may be in some way in which all of them are these slots.

    All are as they are, or all are transposed; each is one or the other only where neither is possible.

    Args:
        tensors: name -> shape.
        slots: of the family, all matrices.
        sizes: of the model.
        fixed: tensor -> what it may be, if that is known.
        biases: tensors that a bias belongs to.
    """
    turns: tuple[bool, ...]
    found: dict[str, list[Choice]] = {name: [] for name in tensors}
    for turns in ((False,), (True,), (False, True)):
        if len(turns) > 1 and all(found.values()):
            break
        options = {
            name: [
                each
                for is_turned in turns
                for each in _choices(shape, slots, sizes, is_turned)
                if each in fixed.get(name, [each]) and _has_biases(name, each, biases)
            ]
            for name, shape in tensors.items()
        }
        for name, choices in options.items():
            found[name] += [each for each in choices if _covers({**options, name: [each]}, {*slots})]
    return {name: [*dict.fromkeys(choices)] for name, choices in found.items()}


def _covers(options: Mapping[str, list[Choice]], free: set[Slot]) -> bool:
    """Whether each tensor can be one of its choices, so that every slot is taken once."""
    if not options:
        return all(map(_may_lack, free))
    open_ = {name: [each for each in choices if {*each.slots} <= free] for name, choices in options.items()}
    name = min(open_, key=lambda each: len(open_[each]))
    rest = {other: choices for other, choices in open_.items() if other != name}
    return any(_covers(rest, free - {*choice.slots}) for choice in open_[name])


def _choices(shape: Shape, slots: Sequence[Slot], sizes: Mapping[str, int], is_turned: bool) -> Iterator[Choice]:
    """What a matrix of this shape may be; tables of embeddings are never transposed."""
    turned = shape[::-1] if is_turned else shape
    for slot in slots:
        is_table = slot.sizes[0] in ("V", "P") and not _may_lack(slot)
        if (shape if is_table else turned) == slot.shape(sizes):
            yield Choice((slot,), is_turned and not is_table)
    by_role = {role: slot for slot in slots for role in roles_of(slot.name)}
    for names in TOGETHER:
        parts = tuple(by_role[name] for name in names if name in by_role)
        shapes = [slot.shape(sizes) for slot in parts]
        if len(parts) == len(names) and turned == (sum(each[0] for each in shapes), *shapes[0][1:]):
            yield Choice(parts, is_turned)


def _has_biases(name: str, choice: Choice, biases: frozenset[str]) -> bool:
    return name not in biases or all(slot.has_bias for slot in choice.slots)


def _settle(found: Match, tensors: Mapping[str, Shape], slots: Sequence[Slot], biases: frozenset[str]) -> None:
    """What each tensor may be, by its shape; then by its name, which may settle others."""
    vectors, matrices = _apart(tensors)
    of_one, of_two = _apart({slot.name: slot.shape(found.sizes) for slot in slots})
    named = [slot for slot in slots if slot.name in of_two]
    free = [slot for slot in slots if slot.name in of_one]
    fixed: dict[str, list[Choice]] = {}
    while True:
        open_ = _options(matrices, named, found.sizes, fixed, biases)
        taken = {slot for name, each in fixed.items() if name in vectors for slot in each[0].slots}
        for name, shape in vectors.items():
            fitting = [Choice((slot,)) for slot in free if slot not in taken and slot.shape(found.sizes) == shape]
            open_[name] = fixed.get(name, [each for each in fitting if _has_biases(name, each, biases)])
        new = {name: narrow for name, each in open_.items() if (narrow := _narrowed(name, each))}
        slots_of = Counter(slot for each in new.values() for slot in each[0].slots)
        new = {name: each for name, each in new.items() if all(slots_of[slot] == 1 for slot in each[0].slots)}
        if {*new} <= {*fixed}:
            break
        found.by_name += [name for name in new if name not in fixed and len({each.slots for each in open_[name]}) > 1]
        fixed = new
    left = {slot for each in open_.values() for choice in each for slot in choice.slots}
    found.free += [slot for slot in slots if slot not in left]
    of_biases = {
        f"{name.removesuffix(WEIGHT)}{BIAS}": [*dict.fromkeys(each.of_biases for each in open_[name])]
        for name in open_
        if name in biases
    }
    found.by_name += [bias for bias in of_biases if f"{bias.removesuffix(BIAS)}{WEIGHT}" in found.by_name]
    found.choices |= {**open_, **of_biases}
    made = {slot for each in of_biases.values() for choice in each for slot in choice.slots}
    found.zero += [slot.bias for slot in slots if slot.has_bias and slot.bias not in made]


def _narrowed(name: str, choices: Sequence[Choice]) -> list[Choice]:
    """The choices of one slot or group, as they are and transposed, if there is only one or the name says one."""
    if len({each.slots for each in choices}) == 1:
        return [*choices]
    roles = roles_of(name)
    meant = [each for each in choices if len(each.slots) == 1 and roles & roles_of(each.slots[0].name)]
    return meant if len({each.slots for each in meant}) == 1 else []


def roles_of(name: str) -> frozenset[str]:
    """What the parts of a name say that a tensor does; nothing where they say several things."""
    parts = {*name.lower().split(".")}
    found = frozenset(role for role, words in ROLES.items() if parts & {*words})
    return found if len(found) == 1 else frozenset()


def order_in(name: str) -> str:
    """The order of queries, keys and values that a name such as `qkv` says."""
    order = re.search(r"(?<![a-z])w?(qkv|qvk|kqv|kvq|vqk|vkq|kv|vk)(?![a-z])", name.lower())
    return order[1] if order is not None else ""
