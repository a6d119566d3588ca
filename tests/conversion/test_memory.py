import sys

import psutil
import pytest

from blockformer.conversion import memory


def test_free_memory_is_what_the_system_says(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert 0 < memory.available_memory() <= psutil.virtual_memory().total


@pytest.mark.parametrize(("limit", "wanted"), [("3000\n", 2000), ("max\n", None), ("nonsense", None)])
def test_a_container_may_have_less(monkeypatch, tmp_path, limit, wanted):
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("1000\n")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    free = memory.available_memory()
    assert free == wanted if wanted else free > 1 << 20


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_a_process_may_have_less(monkeypatch, tmp_path):
    import resource

    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    held = psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (held + (8 << 20), -1))
    assert memory.available_memory() <= 16 << 20
