"""Whether somebody watches a module, whether a model is what its step was compiled of, and whose code it is."""

import functools
import sys
import weakref
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as of_modules
from transformers import PreTrainedModel

from .declared_fields import from_outside
from .model.axes import axes

_SETTINGS = (bool, int, float, str, list, tuple, type(None))
_TORCH_SETTINGS = (float, type(None))
# The first is checked for every module, and without it the second, a dropout's, is not read.
_NO_SETTINGS = ("training", "p", "gradient_checkpointing", "name_or_path")
# Packages whose modules treat each token by itself, unless a hook looks at rows, as an adapter for each row does.
_KNOWN = ("blockformer", "torch", "transformers", "peft")
# Packages whose modules a step can run.
_KNOWN_CODE = {"blockformer", "torch", "transformers", "builtins", "math"}


# PyTorch's dictionaries of hooks on every module.
_GLOBAL_HOOKS = (
    of_modules._global_forward_pre_hooks,
    of_modules._global_forward_hooks,
    of_modules._global_backward_pre_hooks,
    of_modules._global_backward_hooks,
)


def has_global_hook() -> bool:
    """Whether somebody has set a hook on every module."""
    return any(_GLOBAL_HOOKS)


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
    return has_global_hook() or any(not is_bare(each) or not _is_known(type(each)) for each in module.modules())


def shows_cache(model) -> bool:
    """Whether a hook, or a function in place of a method, can reach the cache while the model writes.

    The decoder and what holds it return the cache; a layer and its parts get it by name.
    """
    decoder = model.get_decoder()
    by_name = any(
        "forward" in vars(part) or part._forward_pre_hooks_with_kwargs or part._forward_hooks_with_kwargs
        for part in decoder.layers.modules()
    )
    return by_name or not all(map(is_bare, (model, model.base_model, decoder)))


def _is_known(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _KNOWN


class Modules:
    """The modules that a function was compiled of, and what each of them was like then.

    Args:
        top: the module that holds them all.
        without: a part of it that the function does not include, except for modules that are other parts, too.
    """

    def __init__(self, top: nn.Module, without: nn.Module | None = None):
        self._top: Any = weakref.ref(top)
        fields = [
            name for name, axis in axes(type(top.config)).items() if axis.group not in ("training", "tokens", "use")
        ]
        self._fields = {name: vars(top.config)[name] for name in fields}
        modules = [module for _, module in top.named_modules(memo=None if without is None else {without})]
        self._snapshots = [(weakref.ref(module), _structure_of(module), _settings_of(module)) for module in modules]

    def are_untouched(self) -> bool:
        """Whether every module is still what it was, in evaluation mode, and calling it only its own `forward`."""
        if has_global_hook() or not self._fields.items() <= vars(self._top().config).items():
            return False
        return all(_is_as_before(module(), structure, settings) for module, structure, settings in self._snapshots)


def _is_as_before(module: Any, structure: tuple, settings: dict) -> bool:
    is_usual = not module.training and is_bare(module)
    return is_usual and _structure_of(module) == structure and settings.items() <= vars(module).items()


def _structure_of(module: nn.Module) -> tuple:
    """A module's class, its parts and the classes of its weights: a library that quantizes puts another class there.

    Of our own modules also how many attributes it has: one more may stand before a method. Copies of weights are kept
    in linear layers.
    """
    own, kind = vars(module), type(module)
    is_ours = not kind.__module__.startswith("torch.") and not isinstance(module, PreTrainedModel | nn.Linear)
    weights = [*map(type, own["_parameters"].values())]
    return kind, [*own["_modules"].values()], weights, len(own) if is_ours else None


def _settings_of(module: nn.Module) -> dict:
    """The attributes that code was compiled with. PyTorch's own classes read few of theirs: integers do not count."""
    kinds = _TORCH_SETTINGS if type(module).__module__.startswith("torch.") else _SETTINGS
    return {
        name: list(value) if isinstance(value, list) else value
        for name, value in vars(module).items()
        if (isinstance(value, kinds) or callable(value)) and name[0] != "_" and name not in _NO_SETTINGS
    }


def unknown_code(module: nn.Module) -> str | None:
    """The first class or function in a module from another package, which may need something that a step lacks."""
    blocks = tuple(f"{block.cls.__module__}." for block in from_outside())
    for part in module.modules():
        if hasattr(part, "parametrizations"):  # it computes a weight wherever one is read, and refuses to be copied
            return "torch.nn.utils.parametrize"
        functions = [] if isinstance(part, PreTrainedModel) else filter(callable, vars(part).values())
        for name in (name for each in (type(part), *functions) for name in _names_of(each)):
            if name.partition(".")[0] not in _KNOWN_CODE or name.startswith(blocks):
                return name
    return None


def _names_of(value) -> list[str]:
    """The name of a class or function, and the names of bound arguments; for an object, the name of its class."""
    if isinstance(value, functools.partial):
        arguments = [*value.args, *value.keywords.values()]
        objects = [each for each in arguments if not isinstance(each, bool | int | float | str | None)]
        return [name for each in (value.func, *objects) for name in _names_of(each)]
    if not hasattr(value, "__qualname__"):
        value = type(value)
    return [f"{value.__module__ or 'builtins'}.{value.__qualname__}"]
