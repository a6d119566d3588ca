"""What every test shares: no network, a cache folder of its own, a fixed seed, a small tokenizer."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

gc.disable()  # until everything is imported and collected, which leaves little to find

# Set before anything imports huggingface_hub, which reads them once. Remote-code tests then cannot meet modules that an
# earlier run left in the user's cache.
_HF_HOME = tempfile.mkdtemp(prefix="blockformer-tests-")
os.environ.update(
    HF_HOME=_HF_HOME,
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
    MPLBACKEND="Agg",
)
os.environ.pop("HF_MODULES_CACHE", None)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported: a thread that spins takes a core
if "ATEN_CPU_CAPABILITY" in os.environ:
    # Inductor keeps kernels by their source, not by the instruction set that PyTorch's own code has meanwhile.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{_HF_HOME}/inductor"

import pytest
from allowed_skips import ENVIRONMENTS, SkipGate

# torch and transformers are imported where they are used: the process that only shares out the tests needs neither.
if TYPE_CHECKING:
    from fork_server import ForkServer
    from transformers import PreTrainedTokenizerFast


def pytest_addoption(parser: pytest.Parser) -> None:
    add = parser.addoption
    add("--margins", type=int, default=0, help="list so many tests that came nearest to their bound")
    add("--threads", type=int, default=2, help="of PyTorch in the tests of what generates (default: %(default)s)")
    add("--environment", choices=ENVIRONMENTS, default="development", help="whose skips are allowed; allowed_skips.py")
    add("--fresh-seeds", action="store_true", help="draw other examples than last time, and print the seed of them")


def pytest_configure(config: pytest.Config) -> None:
    """Draw the same examples in every run, so that a failure is of the change and not of the draw.

    With `--fresh-seeds` they are new ones; `--hypothesis-seed` then repeats a run.
    """
    if not hasattr(config, "workerinput"):  # the process that shares out the tests hears of all
        config.pluginmanager.register(SkipGate(config.getoption("--environment")))
    if importlib.util.find_spec("hypothesis") is None:  # not in every environment that runs some of the tests
        return
    from hypothesis import settings

    is_fresh = config.getoption("--fresh-seeds")
    if is_fresh and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(1 << 32))
    settings.register_profile("blockformer", derandomize=not is_fresh, print_blob=True)
    settings.load_profile("blockformer")


def pytest_report_header(config: pytest.Config) -> list[str]:
    seed = config.getoption("hypothesis_seed", None) if config.getoption("--fresh-seeds") else None
    return [] if seed is None else [f"examples drawn with --fresh-seeds --hypothesis-seed={seed}"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test's report tells how near `assert_close` came to its bound, from another process too."""
    from pairs import margins

    margins.clear()
    result = yield
    item.user_properties.append(("margin", max(margins, default=0.0)))
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    count, passed = config.getoption("--margins"), terminalreporter.getreports("passed")
    if count and passed:
        terminalreporter.section("nearest to their bound, as a share of it")
        margin_of = {report.nodeid: dict(report.user_properties)["margin"] for report in passed}
        for test in sorted(margin_of, key=margin_of.__getitem__, reverse=True)[:count]:
            terminalreporter.line(f"{margin_of[test]:.2f} {test}")


def pytest_collection_finish() -> None:
    """What there is by then stays: the collector need not look through a million objects again and again."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """So does what a file of tests has left: libraries collect garbage often, `Trainer` in each run."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


def pytest_unconfigure() -> None:
    shutil.rmtree(_HF_HOME, ignore_errors=True)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Every test starts from the same random state and leaves torch's defaults as it found them."""
    import torch

    random.seed(0)
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture(scope="session", autouse=True)
def usual_least_saving() -> Iterator[int]:
    """The models of the tests are so small that padding would be left in: tests skip it, however little there is.

    So do the fixtures of a module. Gives what stacks have otherwise.
    """
    from blockformer.engine.runtime import TrainingRuntime

    usual, TrainingRuntime.least_saving = TrainingRuntime.least_saving, 0
    yield usual
    TrainingRuntime.least_saving = usual


@pytest.fixture(scope="session", autouse=True)
def real_fsync() -> Iterator[Callable[[int], None]]:
    """What `os.fsync` is otherwise: no test cuts the power, so nothing waits for the disk.

    A wrong descriptor is still an error, and other processes sync as always. That everything is synced before it is
    renamed has a test (`files/test_writer.py`).
    """
    real = os.fsync
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield real


@pytest.fixture(scope="session")
def first_seed(pytestconfig: pytest.Config) -> int:
    """Where a test begins to count its own cases: 0, or with `--fresh-seeds` the seed that the run prints."""
    return int(pytestconfig.option.hypothesis_seed) if pytestconfig.getoption("--fresh-seeds") else 0


# Tests of what generates, and of code that is compiled for a number of threads.
SEVERAL_THREADS = (
    "engine/",
    "test_generation.py",
    "test_compile.py",
    "model/test_awq_linear.py",
    "model/test_modeling_encoder_decoder.py",
)


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.relative_to(Path(__file__).parent).as_posix().startswith(SEVERAL_THREADS):
        item.add_marker("several_threads")


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those tests run with `--threads` threads, their child processes too; the others with what the process has."""
    if request.node.get_closest_marker("several_threads") is None:
        yield
        return
    import torch

    before, count = torch.get_num_threads(), request.config.getoption("--threads")
    monkeypatch.setenv("OMP_NUM_THREADS", str(count))
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 512 tokens over three standard-library files; eos `<|end|>` is id 0, pad `<|pad|>` id 1."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    stdlib = Path(sysconfig.get_paths()["stdlib"])
    texts = [(stdlib / name).read_text(encoding="utf-8") for name in ("bisect.py", "heapq.py", "textwrap.py")]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|end|>", "<|pad|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", padding_side="left", model_max_length=512
    )


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Fresh processes, offline."""
    from fork_server import ForkServer

    folder = tmp_path_factory.mktemp("processes")
    server = ForkServer(folder / "home", {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"})
    yield server
    server.close()


@pytest.fixture(scope="session")
def fresh(processes: ForkServer) -> Callable[..., str]:
    """What a program prints last in a process that cannot import this package; see `ForkServer.said`."""
    return processes.said
