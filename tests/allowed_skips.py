"""The skips that are allowed in each environment. Any other skip fails the run, by `conftest.py`.

An environment is what `--environment` names: "development" is what `make` installs; scripts/versions.py and
scripts/extra_tests.py name theirs. A skip that depends on the machine says which machines may have it.
"""

import os
import re
import sys
from collections.abc import Callable

import pytest


def _lacks_avx512() -> bool:
    """Whether PyTorch multiplies without AVX-512 here, where it packs neither bfloat16 nor 8-bit weights."""
    import torch

    return torch.backends.cpu.get_cpu_capability() != "AVX512"


def _is_not_linux() -> bool:
    return sys.platform != "linux"


def _is_not_root() -> bool:
    return not hasattr(os, "geteuid") or os.geteuid() != 0


# What depends on the machine: a pattern of reasons -> on which machines it may be the reason.
MACHINES: dict[str, Callable[[], bool]] = {
    r"this PyTorch has no packed (bfloat16 )?product|no packed product of this dtype here": _lacks_avx512,
    r"this PyTorch has no oneDNN linear": _is_not_linux,
    r"needs? (Linux|POSIX files|links)|(reads|limits|watches).*/proc": _is_not_linux,
    r"devices can be made by root only|a small tmpfs cannot be mounted here": _is_not_root,
    r"the file system has no sparse files of this size|needs 30 GB of disk": lambda: True,
}

# Packages of the extra environments: each runs the tests that need it.
_EXTRAS = {
    "quantization": r"(torchao|bitsandbytes|optimum\.quanto) is not installed",
    "look-inside": r"could not import '(transformer_lens|nnsight)'",
    "onnx": r"could not import 'onnxscript'|could not import 'onnxruntime'",
    "int8": r"could not import '(nncf|openvino)'",
    "peers": r"(gguf|llama_cpp) is not installed",
    "sign": r"could not import 'model_signing'",
    "trained": r"could not find the package '\w+', which carries a trained checkpoint",
    "own-code": r"could not import '(litgpt\.model|x_transformers|tiktoken)'",
    "torchtune": r"could not import 'torchtune'",
    "trl": r"could not import 'trl'",
    "deepspeed": r"DeepSpeed itself is not installed",
    "openai": r"could not import 'openai'",
    "few-bits": r"could not import 'compressed_tensors'",
}

# What an older transformers or torch lacks, or a newer one has changed.
_OLDER = (
    r"transformers [\d.]+ has no \w+",
    r"this transformers has no \w+",
    r"this release's class reads a pooler that it does not make",
    r"with windows in some layers, transformers 5\.5\.0 and 5\.10\.4 write another text, their models too",
    r"transformers [\d.]+ has errors in its (deepseek_v[23]|groups of experts)",
    r"transformers [\d.]+ has keys that nothing reads in its gemma4_text",
    r"transformers [\d.]+ caches the keys and values of all heads",
    r"transformers [\d.]+ mixes up the rotary parameters of layer types",
    r"transformers 5\.5\.0 and 5\.10\.4 take a quantized cache for windows, too",
    r"transformers 5\.10\.4's decoders of Megatron-BERT see what comes later",
    r"transformers 5\.5\.0's eager T5Gemma cannot search with beams",
    r"transformers 5\.5\.0 and 5\.10\.4 run a folder's code without trust",
    r"this release's router gives chances for logits",
    r"torch\.optim\.Muon came with torch 2\.9",
    r"torch\.func\.debug_unwrap came with torch 2\.7",
    r"^newer$",
)

# What the newest transformers has changed, and a client does not know yet.
_NEWEST = r"PEFT 0\.21 passes prefixes by a name that the classes of transformers 5\.24 ignore"

ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "development": (*_EXTRAS.values(), _NEWEST),
    "versions": (*_EXTRAS.values(), *_OLDER, _NEWEST),
    **{name: tuple(pattern for other, pattern in _EXTRAS.items() if other != name) for name in _EXTRAS},
}
ENVIRONMENTS["quantization"] += (r"^its product has no derivative$",)  # torchao's int4


def is_allowed(reason: str, environment: str) -> bool:
    """Whether a test may be skipped for this reason in this environment, on this machine."""
    if any(re.search(pattern, reason) for pattern in ENVIRONMENTS[environment]):
        return True
    return any(re.search(pattern, reason) and applies() for pattern, applies in MACHINES.items())


class SkipGate:
    """A plugin that fails a run with a skip that is not allowed, and lists those."""

    def __init__(self, environment: str):
        self.environment = environment
        self.refused: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._look_at(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look_at(report)

    def _look_at(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped:
            return
        said = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        reason = str(said).removeprefix("Skipped: ")
        if not is_allowed(reason, self.environment):
            self.refused.append(f"{report.nodeid}: {reason}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.refused and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.refused:
            terminalreporter.section(f"skips that allowed_skips.py does not allow in '{self.environment}'", red=True)
            for line in self.refused:
                terminalreporter.line(line)
