"""PyTorch's compiler in processes of its own: whatever it patches while it traces, no thread of this one sees.

Such a process is given a module without its weights and leaves the code on the disk. It serves all calls of this one,
one after the other, and ends when none has come for a while. Nothing that a user sets in this process (Inductor's
settings, a default dtype, modes) reaches it.
"""

import atexit
import hashlib
import json
import os
import pickle  # nosec B403 # of what the parent process writes, through a pipe
import select
import struct
import subprocess
import sys
import threading
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import torch
from torch import nn
from torch.export import Dim
from transformers import PreTrainedModel

from . import measure
from .few_rows import with_products_as_loops, without_repeats

# Under these names a package lists the weights that it reads, and which of them may be packed ones.
READ, PACKABLE = "read", "packable"
_CONFIG = {
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,  # Inductor by itself writes weights of up to 8 numbers into the code
    "cpp.enable_floating_point_contract_flag": "fast",  # a product and its sum are one instruction (FMA)
}
_CODE = Path(__file__).parents[1]
_FILES = sorted((*_CODE.glob("*.py"), *_CODE.glob("model/*.py"), *_CODE.glob("engine/*.py")))
SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in _FILES)).hexdigest()
"""What this process runs: the compiler's process must run the same."""
_IDLE_SECONDS = 60  # after which the compiler's process ends
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from blockformer.engine.compiling import serve; serve()"
)
_lock = threading.Lock()


@dataclass(frozen=True)
class Varying:
    """A size that varies between two bounds, times a constant. (`torch.export.Dim` cannot be pickled.)"""

    name: str
    least: int
    most: int | None = None
    times: int = 1

    def dim(self):
        """As `torch.export` has it."""
        dim = Dim(self.name, min=self.least, max=self.most)
        return dim if self.times == 1 else self.times * dim


@dataclass
class _Job:
    """What to compile, and the settings of the parent process that matter for it."""

    module: nn.Module
    arguments: tuple
    varying: tuple
    packed_copies: bool
    path: str
    settings: dict
    threads: int
    verdicts: dict
    sources: str = SOURCES


def compile_to(path: Path, module: nn.Module, arguments: tuple, varying: tuple, packed_copies: bool) -> None:
    """Compile a module, and put its code into a file.

    Args:
        path: of the file; its folder is there.
        module, arguments, varying: see `CompiledFunction.of`.
        packed_copies: whether the code is to read packed copies of float32 weights.

    Raises:
        RuntimeError: the compiler failed, or its process did.
        OSError: the process cannot be started.
        pickle.PicklingError, TypeError, AttributeError: the module holds something that cannot go to another process.
    """
    if getattr(sys, "frozen", False):
        raise RuntimeError("a frozen program has no interpreter to start the compiler in")
    settings, threads = dict(_CONFIG), torch.get_num_threads()
    job = _Job(module, arguments, varying, packed_copies, str(path), settings, threads, measure.verdicts())
    stream = BytesIO()
    _HollowPickler(stream, pickle.HIGHEST_PROTOCOL).dump(job)
    with _progress():
        error = _ask(stream.getvalue())
    if error is not None:
        raise RuntimeError(error)


class _HollowPickler(pickle.Pickler):
    """Pickles modules with what their code depends on: tensors without their numbers, models without what users add."""

    def reducer_override(self, value):
        """As the library has it."""
        if isinstance(value, torch.Tensor):
            if type(value) not in (torch.Tensor, nn.Parameter) or value.layout is not torch.strided:
                raise pickle.PicklingError(f"weights of type {type(value).__name__} cannot be compiled")
            shape = tuple(value.shape), value.stride(), value.dtype
            return _hollow, (type(value) is nn.Parameter, value.requires_grad, *shape)
        if isinstance(value, PreTrainedModel):
            known = (*vars(nn.Module()), "config")
            plain = (bool, int, float, str, type(None))
            state = {name: each for name, each in vars(value).items() if name in known or isinstance(each, plain)}
            return object.__new__, (type(value),), state
        return NotImplemented


def _hollow(is_parameter: bool, requires_grad: bool, shape: tuple, stride: tuple, dtype) -> torch.Tensor:
    tensor = torch.empty_strided(shape, stride, dtype=dtype)  # memory that nobody touches is none
    return nn.Parameter(tensor, requires_grad) if is_parameter else tensor


class _Process:
    """The compiler's process."""

    def __init__(self):
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            _PROGRAM,
            json.dumps([each for each in sys.path if isinstance(each, str)]),
        ]
        # Of its own helpers Inductor has no use here: they compile for GPUs.
        pipe, ours = subprocess.PIPE, {"BLOCKFORMER_FAST": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        environment = {**os.environ, **ours}
        self.parent = os.getpid()
        self._process = subprocess.Popen(  # nosec B603 # this interpreter, with our own program
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment
        )

    def answer(self, job: bytes) -> dict | None:
        """The result of a job; None if the process is gone."""
        with suppress(OSError, ValueError):
            self._process.stdin.write(struct.pack("<Q", len(job)) + job)
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            return json.loads(line) if line else None
        return None

    def end(self) -> int:
        """Kill it; returns its exit code."""
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()
        self._process.kill()
        return self._process.wait()


_idle: list[_Process] = []


@atexit.register
def _end() -> None:
    with _lock:
        while _idle:
            if _idle[-1].parent == os.getpid():
                _idle[-1].end()
            _idle.pop()


def _ask(job: bytes) -> str | None:
    """Have a job done; returns the error, or None if it went well. As many jobs at a time as threads ask."""
    while True:
        with _lock:
            _idle[:] = [each for each in _idle if each.parent == os.getpid()]  # this process may be a fork
            is_fresh = not _idle
            process = _Process() if is_fresh else _idle.pop()
        try:
            answer = process.answer(job)
        except BaseException:  # an interruption: an answer that nobody has read must not be taken for the next job's
            process.end()
            raise
        if answer is not None:
            with _lock:
                _idle.append(process)
            return answer["error"]
        code = process.end()
        if is_fresh:  # another one has ended after a while without a job
            return f"the compiler's process ended with code {code}"


_shown = threading.Lock()


@contextmanager
def _progress():
    """A line on the terminal that says what takes so long, and for how long it has; one at a time."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    if not _shown.acquire(blocking=False):
        yield
        return
    try:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            progress.add_task("Compiling parts of the model; later runs find them on disk", total=None)
            yield
    finally:
        _shown.release()


def serve() -> None:
    """The compiler's process: do jobs from the standard input until it ends or none comes for a while."""
    import blockformer.api  # noqa: F401 - the engine is plugged in

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that a compiler's own prints are not read as answers
    jobs = os.fdopen(os.dup(0), "rb", buffering=0)
    while select.select([jobs], [], [], _IDLE_SECONDS)[0]:
        if len(header := _exactly(jobs, 8)) < 8:
            return
        error = None
        try:
            _make(pickle.loads(_exactly(jobs, *struct.unpack("<Q", header))))  # nosec B301 # the parent process wrote it
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        answers.write(json.dumps({"error": error}) + "\n")
        answers.flush()


def _exactly(stream, count: int) -> bytes:
    """So many bytes, or fewer if the stream ends."""
    parts, missing = [], count
    while missing and (part := stream.read(missing)):
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _make(job: _Job) -> None:
    if job.sources != SOURCES:
        raise RuntimeError("Blockformer's own files changed while this process was running: restart it")
    torch.set_num_threads(job.threads)
    measure.adopt_verdicts(job.verdicts)
    with torch.no_grad(), measure.own_trace(job.packed_copies), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(job.module, job.arguments, dynamic_shapes=with_dims(job.varying), strict=False)
        program = without_repeats(with_products_as_loops(program))
        lists = {READ: json.dumps(_read(program)), PACKABLE: json.dumps(_packable(program))}
        settings = {**job.settings, "aot_inductor.metadata": lists}
        torch._inductor.aoti_compile_and_package(program, package_path=job.path, inductor_configs=settings)


def with_dims(varying):
    """The same structure with `torch.export`'s own sizes."""
    if isinstance(varying, Varying):
        return varying.dim()
    if isinstance(varying, dict):
        return {key: with_dims(each) for key, each in varying.items()}
    if isinstance(varying, list | tuple):
        return type(varying)(map(with_dims, varying))
    return varying


def _read(program) -> list[str]:
    """The parameters and buffers that a program computes with."""
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    return [names[node.name] for node in program.graph.nodes if node.name in names and node.users]


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
