"""What the tests of compiled functions share."""

import pickle
import threading

import pytest

from blockformer.engine import compiled, compiling


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


@pytest.fixture
def compile_only(monkeypatch):
    """A function that has only modules of some classes compiled from then on; the others run as they are."""
    compile_it = compiled.CompiledFunction.of

    def only(*classes):
        def of(cls, module, *given):
            return compile_it(module, *given) if isinstance(module, classes) else module

        monkeypatch.setattr(compiled.CompiledFunction, "of", classmethod(of))

    return only
