"""Whether fast paths are allowed, and which matmuls are faster on this processor."""

import os
from pathlib import Path

import torch
from torch.utils._device import DeviceContext


def is_switched_on() -> bool:
    """Whether the environment allows fast paths: not with BLOCKFORMER_FAST=0."""
    return os.environ.get("BLOCKFORMER_FAST", "1") != "0"


def is_seen() -> bool:
    """Whether this thread traces a graph, where sizes may be symbols, or one of PyTorch's dispatch modes is active."""
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0


def is_enabled() -> bool:
    """Whether fast paths are allowed: not with BLOCKFORMER_FAST=0, nor where somebody else looks at the operators.

    That is who traces a graph, counts operations (PyTorch's dispatch modes) or replaces functions (its function modes)
    in this thread; what other threads do says nothing.
    """
    return is_switched_on() and not (is_seen() or torch.jit.is_tracing() or _replaces_functions())


def _replaces_functions() -> bool:
    """Whether a function mode is active, other than PyTorch's own for a default device."""
    count = torch._C._len_torch_function_stack()
    return any(type(torch._C._get_function_stack_at(index)) is not DeviceContext for index in range(count))


def is_exported() -> bool:
    """Whether this thread records a graph by `torch.export` or `torch.jit.trace`.

    `torch.compiler.is_compiling` by itself says whether any thread does. `torch.compile` may compile a function like
    this one by itself, so callers ask about that themselves.
    """
    fake = torch._C._TorchDispatchModeKey.FAKE
    is_fake = torch.compiler.is_compiling() and torch._C._get_dispatch_mode(fake) is not None
    return torch.jit.is_tracing() or is_fake


IN_PARTS, ONEDNN, PACKED, WIDENED = "few rows in parts", "oneDNN's matmul", "packed weights", "by way of float32"


def _faster_here() -> dict[tuple[str, torch.dtype], bool]:
    """Each way to multiply, and whether it is faster here: what docs/measurements.md has of such processors.

    PyTorch's float32 matmul is MKL's, which is at its best on Intel's processors. Elsewhere oneDNN's is faster, and so
    are parts of a weight, which all threads read. Where nothing was measured, PyTorch's own is used.
    """
    path, instructions = Path("/proc/cpuinfo"), torch.backends.cpu.get_cpu_capability()
    processor = path.read_text()[: 1 << 13] if path.exists() else ""  # the first of its cores
    is_other = "AuthenticAMD" in processor and instructions in ("AVX2", "AVX512")
    has_onednn = hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.backends.mkldnn.is_available()
    is_wide = instructions == "AVX512"
    has_half = is_wide and "avx512_fp16" in processor
    return {
        (IN_PARTS, torch.float32): is_other,
        (ONEDNN, torch.float32): is_other and has_onednn,
        (PACKED, torch.float32): is_other and has_onednn,
        (PACKED, torch.bfloat16): is_wide and has_onednn,
        (WIDENED, torch.bfloat16): instructions == "AVX2",
        (WIDENED, torch.float16): instructions in ("AVX2", "AVX512") and not has_half,
    }


FASTER_HERE = _faster_here()


def is_faster(way: str, dtype: torch.dtype) -> bool:
    """Whether a way to multiply matrices of this dtype is faster on this processor than PyTorch's own."""
    return FASTER_HERE.get((way, dtype), False)
