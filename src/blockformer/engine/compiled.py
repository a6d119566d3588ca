"""Functions that PyTorch's compiler (AOTInductor) makes machine code of, kept on disk for later processes.

A compiled function holds no weights: it reads the module's, so it is small and loads in a moment.
"""

import functools
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from operator import attrgetter, is_
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.utils import logging

from ..model.axes import BLOCKS, axes
from . import onednn
from .cache_folder import is_trusted, processor, trusted_folder
from .compiling import PACKABLE, READ, SOURCES, compile_to
from .eight_bit_head import ROUNDED
from .four_bit_rows import ORDERED
from .linear import is_bare
from .origin import Origin, last_made

logger = logging.get_logger(__name__)

_KEPT_DAYS = 60  # for which code stays on the disk after a process has last loaded it
_MOST_COMPILERS = 4  # at a time; each takes half a gigabyte
_IS_TRAINING, _DTYPE = attrgetter("training"), attrgetter("dtype")
_SETTINGS = bool | int | float | str | list | tuple | None
_NO_SETTINGS = ("training", "gradient_checkpointing", "name_or_path")  # the first is asked of every module by itself
# Whose classes and functions the name of compiled code knows by their names and versions.
_KNOWN_CODE = {"blockformer", "torch", "transformers", "builtins", "math"}
# By its file. PyTorch never unloads any: what nobody runs any more is run again.
_loaded: dict[tuple, list["_Code"]] = {}
_loading = threading.Lock()


def has_compiler() -> bool:
    """Whether there is a C++ compiler: the one that `CXX` names, or g++ or clang++."""
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "clang++"))


def functions_of(parts: list[tuple], copies: onednn.PackedCopies | None) -> list["CompiledFunction"] | None:
    """The compiled functions of some parts of a model, several compiled at a time; None if one of them cannot be.

    Args:
        parts: the arguments of `CompiledFunction.of` for each, those that take longest first.
        copies: see there.
    """

    if any(_is_unknown(module) for module, *_ in parts):
        return None

    def function_of(part: tuple) -> CompiledFunction | None:
        module, arguments, varying = part
        return CompiledFunction.of(module, arguments, varying, copies)

    with ThreadPoolExecutor(min(_MOST_COMPILERS, os.cpu_count() or 1)) as pool:
        functions = [function for function in pool.map(function_of, parts) if function is not None]
    return functions if len(functions) == len(parts) else None


class _Code:
    """Loaded code, which one function runs at a time.

    PyTorch never lets go of code, nor of a tensor that it was given. So it is given the same ones for good, each of
    which gets the memory of the tensor that it stands for.
    """

    def __init__(self, runner):
        self.runner, self.is_used = runner, True
        self.tensors: dict[str, torch.Tensor] = {}

    def point_to(self, tensors: dict[str, torch.Tensor]) -> None:
        """Give its own tensors, by name, the memory of these."""
        for name, tensor in tensors.items():
            own, is_inference = self.tensors.get(name), tensor.is_inference()
            onednn.nothing(tensor.dtype, is_inference, tensor.is_mkldnn)
            with torch.inference_mode(is_inference):
                if own is None or own.is_inference() is not is_inference:
                    _empty([] if own is None else [own])
                    self.tensors[name] = tensor.detach()
                else:
                    own.data = tensor.detach()

    def read(self) -> None:
        """Have the code look up where its tensors are."""
        self.runner.load_constants(self.tensors, check_full_update=True, user_managed=True)

    def release(self) -> None:
        """Free the memory; another function may run it then."""
        _empty(self.tensors.values())
        self.is_used = False


class CompiledFunction:
    """A compiled module, called as the module is, by one thread at a time.

    Tensors that it writes into must be contiguous.

    Args:
        code: what it runs.
        held: each parameter and buffer of the module by its full name: the dict of its module that holds it, and its
            name there. A later value there is read, too.
        copies: packed copies of the weights, which it reads where oneDNN multiplies by them; None for plain ones.
        arguments: an example.
    """

    def __init__(self, code: _Code, held: dict[str, tuple[dict, str]], copies: onednn.PackedCopies | None, arguments):
        self._code, self._copies, runner = code, copies, code.runner
        self._dtypes = list(map(_DTYPE, _flat(arguments)))
        packable = () if copies is None else json.loads(runner.get_metadata()[PACKABLE])
        self._places = [(name, *held[name]) for name in runner.get_constant_fqns()]
        self._packed = [place for place in self._places if place[0] in packable]
        self._packed_of: Origin | None = None
        weakref.finalize(self, code.release).atexit = False
        output = pytree.treespec_loads(runner.loader.get_call_spec()[1])
        self._output = None if output.is_leaf() else output
        # The engine's own copies have not moved as long as none is made.
        self._foreign = [(holder, name) for _, holder, name in self._places if name not in (*ORDERED, *ROUNDED)]
        absent = [place for place in held.values() if place[0].get(place[1]) is None]
        self._absent = [holder for holder, _ in absent], [name for _, name in absent]
        self._ties = _ties(held, self._places)
        self._state: tuple[object, list, list] = (None, [], [])
        self._addresses: list = []
        self._lock = threading.Lock()
        self._kinds = [_kind(holder[name]) for _, holder, name in self._places]

    @classmethod
    def of(cls, module: nn.Module, arguments: tuple, varying: tuple, copies: onednn.PackedCopies | None = None):
        """Load the compiled module from disk, or compile it and put it there; None if that is impossible.

        Args:
            module: whose `forward` takes tensors, lists of tensors and None. It has a `config`.
            arguments: an example.
            varying: for each argument which of its dimensions vary, as `torch.export` has it, with `Varying` for `Dim`.
            copies: where packed copies of float32 weights are kept; without, it reads the plain ones.
        """
        if _is_unknown(module):
            return None
        held = {
            f"{prefix}.{name}": (holder, name)
            for prefix, part in module.named_modules(remove_duplicate=False)
            for holder in (part._parameters, part._buffers)
            for name in holder
        }
        tensors = {name: holder[key] for name, (holder, key) in held.items() if holder[key] is not None}
        is_float = any(tensor.dtype is torch.float32 for tensor in tensors.values())
        copies = copies if is_float and onednn.is_quicker_packed(torch.float32) else None
        digest = _digest(module, tensors, arguments, varying, copies is not None)
        try:
            code = _load(trusted_folder(), digest)
            if code is None:
                if not has_compiler():
                    logger.warning_once(
                        "there is no C++ compiler, so the model runs uncompiled: install g++ or clang++, or set CXX."
                    )
                    return None
                code = _compile(module, arguments, varying, copies is not None, trusted_folder(to_write=True), digest)
        except Exception as error:  # the compiler's, or of a disk that is full
            reason = " ".join(str(error).split())[:300]
            logger.warning_once(f"the model runs uncompiled because compiling it failed: {reason}")
            return None
        if code is None or not _reads(code.runner, tensors):
            logger.warning_once(f"{type(module).__name__} could not be compiled, so the model runs uncompiled.")
            return None
        return cls(code, held, copies, arguments)

    def __call__(self, *arguments):
        """The result, or None once the module's tensors are others in kind, in their ties or in what they learn.

        None also for arguments of other dtypes than the example's.
        """
        flat = [tensor.contiguous() for tensor in _flat(arguments)]  # the code takes every tensor for such a one
        if list(map(_DTYPE, flat)) != self._dtypes:
            return None
        # Two threads in the code at once would wait for each other for good: the second one waits in C++ and keeps
        # Python to itself, which an operator of the first one needs.
        with self._lock:
            if not self._is_ready():
                return None
            # Calling the runner would look up the structure of arguments and results again: a third of a millisecond.
            flat = self._code.runner.loader.boxed_run(flat)
        return flat[0] if self._output is None else pytree.tree_unflatten(flat, self._output)

    def _is_ready(self) -> bool:
        """Whether the code has the module's current tensors, given to it now if it had others, and is for such."""
        holders, names = self._absent
        if list(map(dict.get, holders, names)).count(None) < len(names):
            return False
        if not all(one[0].get(one[1]) is other[0].get(other[1]) for one, other in self._ties):
            return False
        tensors = [holder.get(name) for holder, name in self._foreign]
        if any(tensor is None for tensor in tensors):  # checked one by one, since comparing tensors would compute
            return False
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return False
        state = (last_made(), [tensor.data_ptr() for tensor in tensors], [tensor.shape for tensor in tensors])
        is_read = state == self._state and (self._packed_of is None or self._packed_of.is_of(self._packed_places))
        return is_read or self._read(state)

    @functools.cached_property
    def _packed_places(self) -> list:
        return [(holder, name) for _, holder, name in self._packed]

    def _read(self, state: tuple[object, list, list]) -> bool:
        """Give the code the module's current tensors; False if it is not for such."""
        tensors = {full_name: holder[name] for full_name, holder, name in self._places}
        if [_kind(tensor) for tensor in tensors.values()] != self._kinds:
            return False
        packed_of = Origin(self._packed_places, sampled=True) if self._packed else None
        copies = {full_name: self._copies.of(holder, name) for full_name, holder, name in self._packed}
        addresses = [tensor.data_ptr() for tensor in tensors.values()]
        self._code.point_to({**tensors, **copies})
        if addresses != self._addresses:
            self._code.read()
            self._addresses = addresses
        self._state, self._packed_of = state, packed_of
        return True


def _reads(runner, tensors: dict) -> bool:
    """Whether the code has all weights that it computes with from outside, and no others: none is written into it."""
    given, read = runner.get_constant_fqns(), json.loads(runner.get_metadata()[READ])
    return set(given) <= set(tensors) and {id(tensors[name]) for name in read} <= {id(tensors[name]) for name in given}


def _ties(held: dict[str, tuple[dict, str]], places: list) -> list:
    """Pairs of places that hold the same tensor: one that the code reads and one that it does not know."""
    read = {id(holder[name]): (holder, name) for _, holder, name in places}
    known = {full_name for full_name, _, _ in places}
    others = [place for full_name, place in held.items() if full_name not in known]
    return [(read[id(holder[name])], (holder, name)) for holder, name in others if id(holder[name]) in read]


def _empty(tensors) -> None:
    for tensor in tensors:
        with torch.inference_mode(tensor.is_inference()):
            tensor.data = onednn.nothing(tensor.dtype, tensor.is_inference(), tensor.is_mkldnn)


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
        parents, names, children, classes = self._places
        is_whole = all(map(is_, map(dict.get, parents, names), children)) and list(map(type, children)) == classes
        is_whole = is_whole and sum(map(len, self._parents)) == len(children) and not _has_any_global_hook()
        return is_whole and not any(map(_IS_TRAINING, self._every)) and all(map(is_bare, self._every))


def _flat(arguments) -> list[torch.Tensor]:
    """The tensors of some arguments: tensors, lists of tensors and None."""
    lists = [each if isinstance(each, list) else [each] for each in arguments if each is not None]
    return [tensor for each in lists for tensor in each]


def _kind(tensor) -> tuple:
    """What the code assumes of a tensor."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _settings(part: nn.Module) -> list:
    """What a module's code may ask its attributes; its place among the layers says nothing."""
    silent = ("layer_idx", "name_or_path")
    is_model = isinstance(part, PreTrainedModel)
    settings = {
        key: _code_of(value) if callable(value) else value
        for key, value in vars(part).items()
        if isinstance(value, bool | int | float | str | list | tuple) or (callable(value) and not is_model)
    }
    told = {key: value for key, value in settings.items() if key not in silent and not (is_model and key[0] == "_")}
    return [_code_of(type(part)), told]


def _code_of(value) -> str:
    """The name of a class, of a function with its bound arguments, or of an object's class."""
    if isinstance(value, functools.partial):
        given = [*value.args, *value.keywords.values()]
        objects = [each for each in given if not isinstance(each, bool | int | float | str | None)]
        if objects:
            return f"functools.partial of {_code_of(objects[0])}"
        return f"{_code_of(value.func)} {[*value.args, *sorted(value.keywords.items())]}"
    if not hasattr(value, "__qualname__"):
        value = type(value)
    return f"{value.__module__ or 'builtins'}.{value.__qualname__}"


def _unknown_code(module: nn.Module) -> str | None:
    """A class or a function in a module that may be changed without another name or version; None if there is none."""
    blocks = tuple(f"{block.cls.__module__}." for known in BLOCKS.values() for block in known.values())
    for part in module.modules():
        name, settings = _settings(part)
        functions = [settings[key] for key, value in vars(part).items() if key in settings and callable(value)]
        for each in (name, *functions):
            if each.partition(".")[0] not in _KNOWN_CODE or each.startswith(blocks):
                return each
    return None


def _is_unknown(module: nn.Module) -> bool:
    """Whether a module has such code; a warning names it."""
    if (name := _unknown_code(module)) is not None:
        logger.warning_once(f"the model runs uncompiled because it contains code of another package: {name}")
    return name is not None


@functools.cache
def _this_process() -> dict:
    """What all code depends on: versions, sources and the processor, looked up once."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": [os.uname().machine, processor()[1]],
        "sources": SOURCES,
    }


def _digest(module, tensors, arguments, varying, packed_copies: bool) -> str:
    """What the code depends on, in one word: versions, sources, sizes, ties, threads and the processor."""
    first: dict[int, str] = {}
    facts = {
        **_this_process(),
        "threads": torch.get_num_threads(),  # the code divides its work by this number
        "onednn": [onednn.is_quicker_in_float32(), packed_copies],
        "module": type(module).__name__,
        "parts": [_settings(part) for part in module.modules()],
        "config": module.config.to_diff_dict(),
        "tensors": {name: [str(_kind(tensor)), first.setdefault(id(tensor), name)] for name, tensor in tensors.items()},
        "arguments": [[str(_kind(tensor)) for tensor in _flat([each])] for each in arguments],
        "varying": str(varying),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _load(folder: Path, digest: str) -> _Code | None:
    """The code of a file that is whole and ours; None if there is none."""
    for path in folder.glob(f"{digest}-*.pt2"):
        try:
            if not is_trusted(path):
                raise ValueError("it belongs to somebody else, or others can write it")
            status = path.stat()
            file = (str(path), status.st_ino, status.st_size)
            code = _take_unused(file)
            if code is None:
                if path.stem != code_name(digest, path):
                    raise ValueError("its content has changed")
                code = _Code(torch._inductor.aoti_load_package(str(path)))
                with _loading:
                    _loaded.setdefault(file, []).append(code)
            with suppress(OSError):  # of a folder that cannot be written to
                os.utime(path)
            return code
        except Exception as error:  # of a file that somebody cut off: compiled again
            logger.warning_once(f"{path} cannot be loaded, so it is compiled again: {error}")
    return None


def code_name(digest: str, path: Path) -> str:
    """The name of a file of code: what the code is for, and what is in it."""
    return f"{digest}-{hashlib.sha256(path.read_bytes()).hexdigest()[:32]}"


def _take_unused(file: tuple) -> _Code | None:
    """The code of a file that no function runs any more, or None."""
    with _loading:
        code = next((code for code in _loaded.get(file, ()) if not code.is_used), None)
        if code is not None:
            code.is_used = True
        return code


def _compile(module, arguments, varying, packed_copies: bool, folder: Path, digest: str) -> _Code | None:
    """The code of the module, which lies on the disk then. Of processes that want it one makes it."""
    with FileLock(folder / f".{digest}.lock"):
        found = _load(folder, digest)
        if found is None:
            for broken in folder.glob(f"{digest}-*.pt2"):
                broken.unlink()
            with tempfile.TemporaryDirectory(dir=folder, prefix=".compiling-") as place:
                made = Path(place) / "code.pt2"
                compile_to(made, module, arguments, varying, packed_copies)
                made.chmod(0o644)
                os.replace(made, folder / f"{code_name(digest, made)}.pt2")
            found = _load(folder, digest)
            _forget_unused(folder)
        return found


def _forget_unused(folder: Path) -> None:
    """Remove code that no process has loaded for long, of older versions above all, and what killed compilers left."""
    oldest = time.time() - _KEPT_DAYS * 86400
    for path in [*folder.glob("*.pt2"), *folder.glob(".*.lock"), *folder.glob(".compiling-*")]:
        with suppress(OSError):  # another process may have removed it
            if path.stat().st_mtime < oldest:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
