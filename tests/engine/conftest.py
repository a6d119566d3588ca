"""What the tests of compiled functions share."""

import os
import pickle
import threading

import pytest

from blockformer.engine import compiled, compiling
from blockformer.engine.cache_folder import cache_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One cache folder for the whole file, and not the user's."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")  # its workers share what was compiled
    base = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(base.parent / run if run else base))
        patch.setitem(compiling._CONFIG, "aot_inductor.compile_wrapper_opt_level", "O0")  # a third less to compile
        yield cache_folder()


@pytest.fixture
def compiling_here(monkeypatch):
    """Compile in this process, one part after the other: another one would not know what a test has set here."""
    one_at_a_time = threading.Lock()

    def make(job):
        with one_at_a_time:
            compiling._make(pickle.loads(job))

    monkeypatch.setattr(compiling, "_ask", make)


@pytest.fixture
def untraced(monkeypatch):
    """Run the functions that would be compiled as they are."""
    monkeypatch.setattr(compiled.CompiledFunction, "of", classmethod(lambda cls, module, *_: module))
