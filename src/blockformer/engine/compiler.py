"""PyTorch's compiler, as the steps of this engine use it."""

import functools
import os
import shutil
import time
import types
from contextlib import contextmanager

import torch

_BITS = {"AVX512": 512, "AVX2": 256}  # of a vector
# A product and its sum are one instruction (FMA). PyTorch finds code on the disk by its options, but not by the
# processor's instructions: on a processor with shorter vectors, code for longer ones reads beyond its data.
# On a GPU several loops are tried for each product of one row. PyTorch keeps on disk which was best, but up to 2.11
# its static launcher does not look there: every process would try again.
_OPTIONS: dict[str, dict] = {
    "cpu": {
        "cpp.enable_floating_point_contract_flag": "fast",
        "cpp.simdlen": _BITS.get(torch.backends.cpu.get_cpu_capability()),
    },
    "cuda": {"coordinate_descent_tuning": True, "use_static_cuda_launcher": False},
}
_LONGEST = 600.0  # seconds that a call waits for another thread's compiler; by hand


def has_compiler() -> bool:
    """Whether there is a C++ compiler: the one that `CXX` names, or g++ or clang++."""
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "clang++"))


def is_of_compiler(error: Exception) -> bool:
    """Whether an error comes from the compiler."""
    return any(each.__module__.startswith(("torch._dynamo", "torch._inductor")) for each in type(error).__mro__)


def compiled(function, device: str):
    """`torch.compile` of a copy of a function, since the compiler bounds how often it compiles the same one.

    It is compiled again for arguments of another kind; what it makes stays in PyTorch's own cache on the disk.
    """
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return _patient(torch.compile(own, fullgraph=True, backend=functools.partial(_backend, _OPTIONS.get(device, {}))))


def _patient(function):
    """A compiled function that waits while another thread's compiler traces, when PyTorch refuses to call it."""

    @functools.wraps(function)
    def call(*arguments):
        end = time.monotonic() + _LONGEST
        while True:
            try:
                return function(*arguments)
            except RuntimeError as error:  # before anything was computed
                if "symbolically trace a dynamo-optimized" not in str(error) or time.monotonic() > end:
                    raise
            time.sleep(0.001)

    return call


def _backend(options: dict, graph_module, example_inputs):
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_once(graph_module, *inputs, **named):
        return compile_fx_inner(without_repeats(graph_module), *inputs, **named)

    return compile_fx(graph_module, example_inputs, inner_compile=compile_once, config_patches=options)


def without_repeats(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph that computes equal expressions once, such as a joined product that each of its parts names."""
    from torch._functorch.compile_utils import fx_graph_cse

    graph_module.graph = fx_graph_cse(graph_module.graph)
    graph_module.recompile()
    return graph_module


@contextmanager
def progress():
    """A line on the terminal that says what takes so long, and for how long it has."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        shown.add_task("Compiling parts of the model; later runs find them on disk", total=None)
        yield
