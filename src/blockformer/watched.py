"""Whether somebody watches a module, whether a model is what its step was compiled of, and whose code it is."""

import functools
import sys
from operator import attrgetter, is_

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook
from transformers import PreTrainedModel

from .declared_fields import from_outside
from .model.axes import BLOCKS, axes

_IS_TRAINING = attrgetter("training")
_SETTINGS = bool | int | float | str | list | tuple | None
_NO_SETTINGS = ("training", "gradient_checkpointing", "name_or_path")  # the first is asked of every module by itself
# Packages whose modules treat each token by itself and look at no row, unless a hook does, such as an adapter a row.
_KNOWN = ("blockformer", "torch", "transformers", "peft")
# Packages whose parts of a model a step knows.
_KNOWN_CODE = {"blockformer", "torch", "transformers", "builtins", "math"}


def is_transformed() -> bool:
    """Whether forward-mode differentiation or torch.func is active: they know only plain operations."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def is_plain_linear(module) -> bool:
    """Whether calling the module would be `F.linear` with its weights and nothing else: no wrapper, no hook."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and is_bare(module)


def is_bare(module) -> bool:
    """Whether calling the module is calling its class's `forward` and nothing else: no wrapper, no hook.

    A call that asks for hidden states or attentions leaves transformers' hooks behind: they count while a call asks.
    """
    own = module.__dict__  # a compiled step asks this of all modules: an attribute takes longer to look up
    if "forward" in own or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return False
    return not own["_forward_hooks"] or all(map(_is_idle, own["_forward_hooks"].values()))


def _is_idle(hook) -> bool:
    """Whether a hook is transformers' own that collects outputs, and no call asks for any."""
    name, source = getattr(hook, "__name__", None), sys.modules.get(getattr(hook, "__module__", None) or "")
    if source is None or not source.__name__.startswith("transformers.") or name != "output_capturing_hook":
        return False
    collector = getattr(source, "_active_collector", None)
    return collector is not None and not collector.get()


def is_watched(module: nn.Module) -> bool:
    """Whether something may look at the rows that a module or one within it sees: a hook, or code of somebody else."""
    return _has_any_global_hook() or any(not is_bare(each) or not _is_known(type(each)) for each in module.modules())


def _is_known(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _KNOWN or kind.__module__ in _modules_of_blocks()


def _modules_of_blocks() -> set:
    """The modules of registered blocks from outside, which were checked with several sequences in a row."""
    blocks = (getattr(block, "cls", block) for kinds in BLOCKS.values() for block in kinds.values())
    return {block.__module__ for block in blocks if isinstance(block, type)}


class Modules:
    """The modules that a function was compiled of.

    Args:
        top: the module that holds them all.
        without: a part of it that the function does not include.
    """

    def __init__(self, top: nn.Module, without: nn.Module | None = None):
        self._top, self._without = top, without

    @functools.cached_property
    def _parents(self) -> list[dict]:
        """Of each module that has others what holds them."""
        others = set() if self._without is None else set(self._without.modules())
        return [parent._modules for parent in self._top.modules() if parent not in others]

    @functools.cached_property
    def _places(self) -> tuple[list, list, list, list]:
        """For each module below the top: the dict of its parent that holds it, its name there, itself and its class."""
        held = [(parent, name, child) for parent in self._parents for name, child in parent.items()]
        columns = [list(column) for column in zip(*held, strict=True)] or [[], [], []]
        return columns[0], columns[1], columns[2], list(map(type, columns[2]))

    @functools.cached_property
    def _every(self) -> list[nn.Module]:
        return [self._top, *(child for child in self._places[2] if child is not None)]

    @functools.cached_property
    def _settings(self) -> tuple[list, list, list]:
        """What holds each setting that code was compiled with: the config's fields, and the modules' own attributes.

        A call asks for all of these, and PyTorch's own classes read few of theirs: their integers do not count.
        """
        config = self._top.config
        fields = [name for name, axis in axes(type(config)).items() if axis.group not in ("training", "tokens", "use")]
        held = [(vars(config), name, vars(config)[name]) for name in fields]
        for module in self._every:
            kinds = float | None if type(module).__module__.startswith("torch.") else _SETTINGS
            own = vars(module).items()
            held += [
                (vars(module), name, list(each) if isinstance(each, list) else each)
                for name, each in own
                if (isinstance(each, kinds) or callable(each)) and name[0] != "_" and name not in _NO_SETTINGS
            ]
        columns = zip(*held, strict=True)
        return list(next(columns)), list(next(columns)), list(next(columns))

    @functools.cached_property
    def _weights(self) -> tuple[list, list, list]:
        """What holds each weight, its name there and its class: a library that quantizes puts another kind there."""
        held = [
            (each._parameters, name, type(weight)) for each in self._every for name, weight in each._parameters.items()
        ]
        columns = zip(*held, strict=True)
        return list(next(columns)), list(next(columns)), list(next(columns))

    @functools.cached_property
    def _attributes(self) -> tuple[list, list]:
        """What each of our own modules holds, and how many entries it had: one more may stand before a method.

        Linear layers are left out, since copies of their weights are kept in them.
        """
        own = [each for each in self._every if not isinstance(each, PreTrainedModel | nn.Linear)]
        holders = [vars(each) for each in own if not type(each).__module__.startswith("torch.")]
        return holders, list(map(len, holders))

    def are_untouched(self) -> bool:
        """Whether every module is still what it was, in evaluation mode, and calling it only its own `forward`."""
        holders, settings, values = self._settings
        own, numbers = self._attributes
        if list(map(dict.get, holders, settings)) != values or list(map(len, own)) != numbers:
            return False
        parents, names, kinds = self._weights
        if list(map(type, map(dict.get, parents, names))) != kinds:
            return False
        parents, names, children, classes = self._places
        is_whole = all(map(is_, map(dict.get, parents, names), children)) and list(map(type, children)) == classes
        is_whole = is_whole and sum(map(len, self._parents)) == len(children) and not _has_any_global_hook()
        return is_whole and not any(map(_IS_TRAINING, self._every)) and all(map(is_bare, self._every))


def unknown_code(module: nn.Module) -> str | None:
    """The first class or function in a module from another package, which may need what a step does not give it."""
    blocks = tuple(f"{block.cls.__module__}." for block in from_outside())
    for part in module.modules():
        functions = [] if isinstance(part, PreTrainedModel) else filter(callable, vars(part).values())
        for name in (name for each in (type(part), *functions) for name in _names_of(each)):
            if name.partition(".")[0] not in _KNOWN_CODE or name.startswith(blocks):
                return name
    return None


def _names_of(value) -> list[str]:
    """The name of a class or function, and the names of bound arguments; for an object, the name of its class."""
    if isinstance(value, functools.partial):
        given = [*value.args, *value.keywords.values()]
        objects = [each for each in given if not isinstance(each, bool | int | float | str | None)]
        return [name for each in (value.func, *objects) for name in _names_of(each)]
    if not hasattr(value, "__qualname__"):
        value = type(value)
    return [f"{value.__module__ or 'builtins'}.{value.__qualname__}"]
