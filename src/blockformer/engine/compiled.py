"""Functions that PyTorch's compiler (AOTInductor) makes machine code of, kept on disk for later processes.

A compiled function holds no weights: it reads those of the module, so it is small, and loads in a moment.
"""

import functools
import hashlib
import json
import os
import platform
import shutil
import tempfile
import threading
import time
import warnings
import weakref
from contextlib import contextmanager, suppress
from operator import is_
from pathlib import Path

import torch
from filelock import FileLock
from torch import nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.utils import logging

from . import onednn
from .eight_bit_head import ROUNDED
from .few_rows import with_products_as_loops, without_repeats
from .four_bit_rows import ORDERED
from .linear import NOTED, is_bare
from .measure import own_trace
from .origin import last_made

logger = logging.get_logger(__name__)

# A product and its sum are one instruction (FMA); Inductor by itself rounds in between.
_CONFIG = {"aot_inductor.package_constants_in_so": False, "cpp.enable_floating_point_contract_flag": "fast"}
_PACKABLE = "packable"  # under this name a package lists the weights that may be packed ones
_CODE = Path(__file__).parents[1]
_KEPT_DAYS = 60  # for which code stays on the disk after a process has last loaded it
# By its file, code with the function that runs it. PyTorch never unloads any: what nobody runs any more is run again.
_loaded: dict[tuple, list[tuple]] = {}
_loading = threading.Lock()


def cache_folder() -> Path:
    """Where compiled functions are kept: `blockformer` in the user's cache folder (`XDG_CACHE_HOME` or ~/.cache)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockformer"


def has_compiler() -> bool:
    """Whether there is a C++ compiler: the one that `CXX` names, or g++ or clang++."""
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "clang++"))


class CompiledFunction:
    """A compiled module, called as the module is.

    Tensors that it writes into must be contiguous.

    Args:
        runner: the loaded code.
        places: each parameter and buffer that it reads: its full name, the dict of its module that holds it, and its
            name there. What stands there later is read, too.
        copies: packed copies of the weights, which it reads where oneDNN multiplies by them; None for plain ones.
    """

    def __init__(self, runner, places: list[tuple[str, dict, str]], copies: onednn.PackedCopies | None):
        self._runner, self._copies = runner, copies
        packable = () if copies is None else json.loads(runner.get_metadata()[_PACKABLE])
        self._packed = [place for place in places if place[0] in packable]
        self._given: list[torch.Tensor] = []
        weakref.finalize(self, _empty, self._given).atexit = False
        output = pytree.treespec_loads(runner.loader.get_call_spec()[1])
        self._output = None if output.is_leaf() else output
        self._places = places
        # The engine's own copies are where they were as long as none is made.
        self._foreign = [(held, name) for _, held, name in places if name not in (*ORDERED, *ROUNDED)]
        self._state: tuple[object, list, list] = (None, [], [])
        self._addresses: list = []
        self._lock = threading.Lock()
        self._kinds = [_kind(held[name]) for _, held, name in places]

    @classmethod
    def of(cls, module: nn.Module, arguments: tuple, varying: tuple, copies: onednn.PackedCopies | None = None):
        """Load the compiled module from disk, or compile it and put it there; None if there is no way to.

        Args:
            module: whose `forward` takes tensors, lists of tensors and None. It has a `config`.
            arguments: an example.
            varying: for each argument which of its dimensions vary, as `torch.export` has it.
            copies: where packed copies of float32 weights are kept; without, it reads the plain ones.
        """
        places = {
            f"{prefix}.{name}": (held, name)
            for prefix, part in module.named_modules(remove_duplicate=False)
            for held in (part._parameters, part._buffers)
            for name, tensor in held.items()
            if tensor is not None
        }
        tensors = {full_name: held[name] for full_name, (held, name) in places.items()}
        is_float = any(tensor.dtype is torch.float32 for tensor in tensors.values())
        copies = copies if is_float and onednn.is_quicker_packed(torch.float32) else None
        path = cache_folder() / f"{_digest(module, tensors, arguments, varying, copies is not None)}.pt2"
        runner = _load(path)
        if runner is None:
            if not has_compiler():
                logger.warning_once(
                    "there is no C++ compiler, so the model runs uncompiled: install g++ or clang++, or set CXX."
                )
                return None
            try:
                runner = _compile(module, arguments, varying, copies is not None, path)
            except Exception as error:  # the compiler's, or of a disk that is full
                reason = " ".join(str(error).split())[:300]
                logger.warning_once(f"the model runs uncompiled, for compiling it failed: {reason}")
                return None
        names = [] if runner is None else runner.get_constant_fqns()
        if runner is None or not set(names) <= set(places):
            logger.warning_once(f"{type(module).__name__} could not be compiled, so the model runs uncompiled.")
            return None
        function = cls(runner, [(name, *places[name]) for name in names], copies)
        _note(path, runner, function)
        return function

    def __call__(self, *arguments):
        """The result, or None once the module's tensors have another dtype, shape or device."""
        addresses = [held[name].data_ptr() for held, name in self._foreign]
        writes = [onednn.writes_to(held[name]) for _, held, name in self._packed]
        state = (last_made(), addresses, writes)
        if state != self._state and not self._read(state):
            return None
        flat = []
        for each in arguments:
            if isinstance(each, list):
                flat += [tensor.contiguous() for tensor in each]
            elif each is not None:
                flat.append(each.contiguous())  # the code takes every tensor for such a one
        # Calling the runner itself would look the structure of arguments and results up anew: a third of a millisecond.
        flat = self._runner.loader.boxed_run(flat)
        return flat[0] if self._output is None else pytree.tree_unflatten(flat, self._output)

    def _read(self, state: tuple[object, list, list]) -> bool:
        """Give the code the module's current tensors; False if it is not for such."""
        tensors = {full_name: held[name] for full_name, held, name in self._places}
        if [_kind(tensor) for tensor in tensors.values()] != self._kinds:
            return False
        with self._lock:
            copies = {full_name: self._copies.of(held, name) for full_name, held, name in self._packed}
            addresses = [tensor.data_ptr() for tensor in tensors.values()]
            if addresses != self._addresses:
                # The code never lets go of a tensor: it gets others on the same memory, which are emptied in the end.
                tensors = {full_name: tensor.detach() for full_name, tensor in tensors.items()}
                self._given += tensors.values()
                for tensor in tensors.values():
                    onednn.nothing(tensor.dtype, tensor.is_inference())
                self._runner.load_constants({**tensors, **copies}, check_full_update=True, user_managed=True)
                self._addresses = addresses
            self._state = state
        return True


def _empty(tensors: list) -> None:
    for tensor in tensors:
        with torch.inference_mode(tensor.is_inference()):
            tensor.data = onednn.nothing(tensor.dtype, tensor.is_inference())


class Modules:
    """The modules that a function was compiled of.

    Args:
        top: the module that holds them all.
        without: a part of it that the function does not include.
    """

    def __init__(self, top: nn.Module, without: nn.Module | None = None):
        self._top, self._without = top, without

    @functools.cached_property
    def _places(self) -> tuple[list, list, list]:
        """For each module below the top: the dict of its parent that holds it, its name there, and itself."""
        others = set() if self._without is None else set(self._without.modules())
        parents = [parent._modules for parent in self._top.modules() if parent not in others]
        held = [(parent, name, child) for parent in parents for name, child in parent.items() if child is not None]
        columns = [list(column) for column in zip(*held, strict=True)] or [[], [], []]
        return columns[0], columns[1], columns[2]

    def are_untouched(self) -> bool:
        """Whether every module is still the one that it was, and calling it nothing but its own `forward`."""
        parents, names, children = self._places
        is_whole = all(map(is_, map(dict.get, parents, names), children))
        return is_whole and is_bare(self._top) and all(map(is_bare, children))


def _kind(tensor) -> tuple:
    """What the code takes for granted of a tensor."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _settings(part: nn.Module) -> list:
    """What a module's code may ask its attributes; its place among the layers and its quickest products say nothing."""
    settings = {} if isinstance(part, PreTrainedModel) else vars(part)
    kinds = (bool, int, float, str, list, tuple)
    plain = {
        key: value for key, value in settings.items() if isinstance(value, kinds) and key not in ("layer_idx", *NOTED)
    }
    return [type(part).__qualname__, plain]


@functools.cache
def _this_process() -> dict:
    """What all code depends on: versions, sources and the processor, looked up once."""
    sources = hashlib.sha256()
    for path in sorted((*_CODE.glob("*.py"), *_CODE.glob("engine/*.py"))):
        sources.update(path.read_bytes())
    processor = Path("/proc/cpuinfo")
    flags = (
        next((line for line in processor.read_text().splitlines() if line.startswith(("flags", "Features"))), "")
        if processor.exists()
        else platform.processor()
    )
    return {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": [platform.machine(), flags],
        "sources": sources.hexdigest(),
    }


def _digest(module, tensors, arguments, varying, packed_copies: bool) -> str:
    """What the code depends on, in one word: versions, sources, sizes and the processor."""
    facts = {
        **_this_process(),
        "onednn": [onednn.is_quicker_in_float32(), packed_copies],
        "module": type(module).__name__,
        "parts": [_settings(part) for part in module.modules()],
        "config": module.config.to_diff_dict(),
        "tensors": {name: str(_kind(tensor)) for name, tensor in tensors.items()},
        "arguments": [
            [tensor.shape for tensor in each] if isinstance(each, list) else getattr(each, "shape", None)
            for each in arguments
        ],
        "varying": str(varying),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _load(path: Path):
    """The code of a package on disk; None if there is none, or a broken one."""
    if (file := _file_at(path)) is None:
        return None
    try:
        runner = _take_unused(file) or torch._inductor.aoti_load_package(str(path))
        with suppress(OSError):  # of a folder that cannot be written to
            os.utime(path)
        return runner
    except Exception as error:  # of a file that somebody cut off: compiled again
        logger.warning_once(f"{path} cannot be loaded and is made anew: {error}")
        return None


def _file_at(path: Path) -> tuple | None:
    """What tells a file from another one that has been put into its place; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return str(path), status.st_ino, status.st_size


def _note(path: Path, runner, function) -> None:
    """Remember who runs the code of a file."""
    if (file := _file_at(path)) is not None:
        with _loading:
            _loaded.setdefault(file, []).append((runner, weakref.ref(function)))


def _take_unused(file: tuple):
    """The code of a file that no function runs any more, or None."""
    with _loading:
        held = _loaded.get(file, [])
        for index, (runner, function) in enumerate(held):
            if function() is None:
                del held[index]
                return runner
    return None


def _compile(module, arguments, varying, packed_copies: bool, path: Path):
    """The code of the module, which lies on the disk then. Of processes that want the same code one makes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.stem}.lock")):
        if not (runner := _load(path)):
            _make(module, arguments, varying, packed_copies, path)
            runner = _load(path)
            _forget_unused(path.parent)
        return runner


def _forget_unused(folder: Path) -> None:
    """Remove code that no process has loaded for long, of older versions above all, and what killed compilers left."""
    oldest = time.time() - _KEPT_DAYS * 86400
    for path in [*folder.glob("*.pt2"), *folder.glob(".*.lock"), *folder.glob(".compiling-*")]:
        with suppress(OSError):  # another process may have removed it
            if path.stat().st_mtime < oldest:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _make(module, arguments, varying, packed_copies: bool, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".compiling-") as folder, _progress(), torch.no_grad():
        with own_trace(packed_copies), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(module, arguments, dynamic_shapes=varying, strict=False)
            program = without_repeats(with_products_as_loops(program))
            settings = {**_CONFIG, "aot_inductor.metadata": {_PACKABLE: json.dumps(_packable(program))}}
            made = torch._inductor.aoti_compile_and_package(
                program, package_path=str(Path(folder) / path.name), inductor_configs=settings
            )
        os.replace(made, path)


def _packable(program) -> list[str]:
    """The parameters of a program that oneDNN multiplies by, and that are used for nothing else."""
    product = torch.ops.mkldnn._linear_pointwise.default
    return [
        program.graph_signature.inputs_to_parameters[node.name]
        for node in program.graph.nodes
        if node.users
        and node.name in program.graph_signature.inputs_to_parameters
        and all(user.target is product and list(user.args).index(node) == 1 for user in node.users)
    ]


@contextmanager
def _progress():
    """A line on the terminal that says what takes so long, and for how long it has."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task("Compiling parts of the model; later runs find them on disk", total=None)
        yield
