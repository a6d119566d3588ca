"""What a process holds: no more after it has written many times, and nothing of a model that has no name any more."""

import gc
import itertools
import json
import weakref

import pytest
import torch
from fork_server import program
from sizes import STRONG

import blockformer
from blockformer.engine import choices

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


@pytest.fixture
def without_collector():
    """Nothing in a cycle is freed, as in programs that turn the collector off."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("family", "way"), [*itertools.product(["qwen3", "t5"], ["prepared", "packed"]), ("qwen3", "compiled")]
)
def test_a_prepared_model_goes_with_its_last_name(family, way, monkeypatch, without_collector):
    dtype = torch.bfloat16 if way == "packed" else torch.float32
    monkeypatch.setattr(choices, "FASTER_HERE", {(choices.PACKED, dtype): way == "packed"})
    monkeypatch.setattr("blockformer.engine.packed._LEAST_WEIGHTS", {torch.bfloat16: 0})
    kind = "EncoderDecoderForConditionalGeneration" if family == "t5" else "DecoderForCausalLM"
    model = getattr(blockformer, f"Blockformer{kind}")(blockformer.preset(family, **STRONG)).to(dtype)
    model.prepare_for_inference(compile=way == "compiled")
    model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, do_sample=False)
    assert not model.runtime.decoding.fallbacks.reasons
    held = [weakref.ref(each) for each in (*model.modules(), *model.parameters())]
    del model
    assert not [each() for each in held if each() is not None]
