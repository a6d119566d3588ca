"""What the machine can do at most, measured in the same run as everything else."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers


@dataclass(frozen=True)
class Machine:
    """Limits and names; read_gbs in 10^9 bytes a second, gemm_gflops by dtype in 10^9 operations a second.

    `instructions` is the set that torch uses, such as AVX512: fewer than the processor has where
    ATEN_CPU_CAPABILITY says so.
    """

    processor: str
    instructions: str
    threads: int
    torch: str
    transformers: str
    read_gbs: float
    gemm_gflops: dict[str, float]

    def multiplies(self, dtype: torch.dtype) -> bool:
        """Whether a large product in this dtype takes less than seconds, so that models of many tokens can be timed."""
        return self.gemm_gflops[str(dtype).removeprefix("torch.")] > _SLOW


def best(work: Callable[[], object], repeats: int = 7) -> float:
    """The least of some timings of one piece of work, in seconds, after one that does not count."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def processor_name() -> str:
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def named() -> dict[str, object]:
    """What a record says of the machine where its limits are not measured."""
    instructions, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"processor": processor_name(), "instructions": instructions, "threads": threads, **versions}


def measure(dtypes: list[torch.dtype], size: int = 2048, read_bytes: int = 2**29) -> Machine:
    """Read bandwidth by `torch.sum` over 512 MB, and a square matrix product in each dtype."""
    data = torch.ones(read_bytes // 4)
    read = data.nbytes / best(data.sum) / 1e9
    del data
    gemm = {str(dtype).removeprefix("torch."): product_gflops(dtype, size) for dtype in dtypes}
    return Machine(**named(), read_gbs=read, gemm_gflops=gemm)


# 10^9 operations a second with which the large product would take seconds, as bfloat16's does with only AVX2.
_SLOW = 20


def product_gflops(dtype: torch.dtype, size: int) -> float:
    """Speed of a square matrix product in 10^9 operations a second; of a small one where large ones are slow."""
    speed = _gflops(dtype, min(size, 256))
    return _gflops(dtype, size) if speed > _SLOW and size > 256 else speed


def _gflops(dtype: torch.dtype, size: int) -> float:
    left, right = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    return 2 * size**3 / best(lambda: left @ right) / 1e9
