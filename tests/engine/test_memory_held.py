"""A process that writes, or prepares a model and undoes it, again and again holds no more memory after many times."""

import json

import pytest
import torch
from fork_server import program

from blockformer.engine import compiled

# The keys and values of one row are 400 kB, the smallest matrix 256 kB.
ROOM, ROOM_OF_CYCLE = 8 << 20, 4 << 10
JOBS = ["write", "write with beams", "write prepared", "write compiled"]
JOBS += ["prepare", "prepare in bfloat16", "prepare compiled"]
CASES = [
    pytest.param("qwen3", "write", 20, 60),
    pytest.param("t5", "write prepared", 20, 60),
    pytest.param("qwen3", "prepare", 20, 60),
    *(
        pytest.param(family, job, 100, 1000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(3600)])
        for family in ("qwen3", "t5")
        for job in JOBS
    ),
]


@pytest.mark.parametrize(("family", "job", "warm", "cycles"), CASES)
def test_memory_does_not_grow(processes, tmp_path, family, job, warm, cycles):
    how = {"folder": tmp_path, "elsewhere": False, "XDG_CACHE_HOME": str(tmp_path)}
    # In a process of its own: what other tests have left free would hide what this one keeps.
    grown = json.loads(processes.said(program("memory_of_many_texts"), family, job, warm, cycles, **how))
    assert grown < ROOM + cycles * ROOM_OF_CYCLE, f"{grown / cycles:.0f} bytes a cycle"


def test_code_that_no_function_runs_any_more_is_run_again(monkeypatch, tmp_path):
    """PyTorch would hold what it loads for good: 1.6 MB for each time that a small model is prepared and undone."""
    loaded = []

    def put(content):
        written = tmp_path / "written"
        written.write_bytes(content)
        written.rename(tmp_path / f"{compiled.code_name('digest', written)}.pt2")

    def load():
        return compiled._load(tmp_path, "digest")

    put(b"code")
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: loaded.append(object()) or loaded[-1])
    codes = [load() for _ in range(2)]
    assert len(loaded) == 2
    codes[1].release()
    assert load() is codes[1]
    assert load().runner is loaded[2]  # the other two are in use
    for code in codes:
        code.release()
    for path in tmp_path.iterdir():
        path.unlink()
    put(b"other code")
    assert load().runner is loaded[3]
