"""A process that writes, or prepares a model and undoes it, again and again holds no more memory after many times."""

import json

import pytest
from fork_server import program

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
