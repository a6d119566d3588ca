"""Pickled files that hold more than one flat dict of tensors: whole models, runs with averages, dicts in dicts.

The strict reader (`files/pickled.py`) refuses them. Here the pickle is read with stand-ins, so nothing of it is run,
and every state dict in it is found by the keys that lead to it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockformer.files.errors import CheckpointError, shown
from blockformer.files.pickled import records_of
from blockformer.files.regular import open_regular
from blockformer.files.safetensors_io import TensorInfo

from .finding import ERROR, WARNING, Finding
from .rank_files import contents_of, header_of, is_tensor
from .stand_ins import StandIn

FEWEST = 4
"""Tensors of the smallest state dict; an optimizer keeps two or three for each weight."""
DEEPEST = 4
"""Keys that lead to a state dict, at most."""
OPTIMIZER = {"state", "param_groups"}


@dataclass
class PickledModel:
    """What a pickled file holds.

    Attributes:
        infos: the tensors of the model; none where it is not clear which they are.
        findings: what is unusual about the file.
        extras: the plain dicts next to the model.
    """

    infos: list[TensorInfo] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)


def read_pickled_model(path: Path, key: str | None) -> PickledModel | None:
    """The model in a pickled file; None if the file has no tensors that could be one.

    Args:
        path: the file.
        key: the keys that lead to the model, with dots between them; None if nobody says it.

    Raises:
        CheckpointError: it is damaged, or nothing lies under that key.
    """
    with open_regular(path) as file:
        records_of(file, path)
    loaded, places = contents_of(path)
    found = dict(_state_dicts(loaded, ()))
    if key is not None:
        if key not in found:
            raise CheckpointError(f"{path}: no tensors under {shown(key)}; there are some under {_named(found)}")
        chosen = key
    elif len(found) > 1:
        fix = f"say which is the model: {' or '.join(f'--key {each}' for each in found)}"
        return PickledModel([], [Finding("several", ERROR, f"the file has tensors under {_named(found)}", fix)])
    elif found:
        chosen = next(iter(found))
    else:
        return _without_names(loaded)
    infos = [header_of(name, each, path, places) for name, each in found[chosen].items()]
    entries = loaded.items() if isinstance(loaded, dict) else ()
    extras = {str(name): each for name, each in entries if isinstance(each, dict)}
    return PickledModel(infos, _findings(loaded, chosen), extras)


def others_in(loaded: Mapping[Any, Any], key: str) -> list[str]:
    """Keys of a pickled file, read by torch, under which there are as many tensors as a model has, without this one."""
    sizes = {str(name): _tensor_count(each) for name, each in loaded.items() if isinstance(each, dict)}
    return [name for name, size in sizes.items() if name != key and size >= FEWEST and size >= sizes.get(key, 0) // 2]


def _tensor_count(entries: Mapping[Any, Any]) -> int:
    return sum(hasattr(each, "dtype") and hasattr(each, "shape") and "." in str(name) for name, each in entries.items())


def _state_dicts(value: Any, keys: tuple[str, ...]) -> Iterator[tuple[str, dict[str, StandIn]]]:
    """The keys to each state dict, with dots between them, and its tensors by name."""
    tensors = dict(_tensors(value))
    if len(tensors) >= FEWEST and any("." in name for name in tensors):
        yield ".".join(keys), tensors
    elif isinstance(value, dict) and len(keys) < DEEPEST and not {*map(str, value)} >= OPTIMIZER:
        for key, each in value.items():
            yield from _state_dicts(each, (*keys, str(key)))


def _tensors(value: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, StandIn]]:
    """The tensors of a state dict, or of a module and of those in it, by their names."""
    if isinstance(value, dict):
        yield from ((str(name), each) for name, each in value.items() if is_tensor(each))
    elif _is_module(value) and depth < 100:
        transient = value.state.get("_non_persistent_buffers_set")
        passing = transient.arguments[0] if isinstance(transient, StandIn) and transient.arguments else ()
        for kind in ("_parameters", "_buffers"):
            own = value.state.get(kind)
            for name, each in own.items() if isinstance(own, dict) else ():
                if is_tensor(each) and name not in passing:
                    yield f"{prefix}{name}", each
        inner = value.state.get("_modules")
        for name, each in inner.items() if isinstance(inner, dict) else ():
            yield from _tensors(each, f"{prefix}{name}.", depth + 1)


def _is_module(value: Any) -> bool:
    return isinstance(value, StandIn) and "_modules" in value.state and "_parameters" in value.state


def _named(found: Mapping[str, Any]) -> str:
    return " and ".join(shown(key) for key in found) or "no key"


def _findings(loaded: Any, chosen: str) -> list[Finding]:
    """How the model lies in its file."""
    value = loaded
    for key in chosen.split(".") if chosen else ():
        value = next(each for name, each in value.items() if str(name) == key) if isinstance(value, dict) else value
    fix = "save its state dict; --mend writes the tensors as safetensors"
    if _is_module(value):
        said = f"the file holds a whole model, pickled with its class ({shown(value.name)}); nothing of it was run"
        return [Finding("module", WARNING, said, fix, True)]
    if chosen:
        keys = f"the key{'s' * ('.' in chosen)} {', '.join(map(shown, chosen.split('.')))}"
        said = f"the tensors are under {keys} of a pickled file, where no class looks"
        fix = "save only them: --mend writes them as safetensors"
    else:
        said = "the pickled file holds more than tensors"
    objects = sorted({each.name for each in _objects(loaded) if not is_tensor(each)})
    if objects:
        said += f"; it has objects too ({', '.join(map(shown, objects[:3]))}), and nothing of it was run"
    return [Finding("key", WARNING, said, fix, True)]


def _objects(value: Any, depth: int = 0) -> Iterator[StandIn]:
    if isinstance(value, StandIn):
        yield value
    elif isinstance(value, dict | list | tuple) and depth < DEEPEST:
        for each in value.values() if isinstance(value, dict) else value:
            yield from _objects(each, depth + 1)


def _without_names(loaded: Any) -> PickledModel | None:
    """What a file is that has no state dict."""
    if not isinstance(loaded, dict):
        return None
    if {*map(str, loaded)} >= OPTIMIZER:
        said = "the file holds the state of an optimizer, and no model"
        return PickledModel([], [Finding("no-weights", ERROR, said, "name the file with the model")])
    lists = [str(name) for name, each in loaded.items() if isinstance(each, list) and sum(map(is_tensor, each))]
    if lists:
        said = f"its tensors are a list under {shown(lists[0])}, without names, as averages of weights often are"
        fix = "put them into the model with the code that made the file (copy_to), and save the model"
        return PickledModel([], [Finding("no-weights", ERROR, said, fix)])
    return None
