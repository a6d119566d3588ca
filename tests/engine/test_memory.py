"""A process that writes, or prepares a model and undoes it, again and again holds no more memory after many times."""

import json

import pytest
import torch

from blockformer.engine import compiled

# Each job in a process of its own: what other tests have left free would hide what this one keeps.
PROGRAM = """
import json
import psutil, torch
import blockformer

family, job, warm, cycles = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
sizes = {
    "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 520, "num_attention_heads": 4, "vocab_size": 777,
    "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 128,
}
torch.manual_seed(0)
config = blockformer.preset(family, **sizes, **({"decoder_start_token_id": 0} if family == "t5" else {}))
kind = "EncoderDecoderForConditionalGeneration" if config.is_encoder_decoder else "DecoderForCausalLM"
model = getattr(blockformer, "Blockformer" + kind)(config).eval()
if job.endswith("second copy"):
    model.to(torch.bfloat16)

def prepare():
    how = {"compile": True} if job.endswith("compiled") else {"second_copy": True} if job.endswith("copy") else {}
    model.prepare_for_inference(**how)

def write(cycle):
    ids = torch.randint(3, 777, (1, 90 + cycle % 3), generator=torch.Generator().manual_seed(cycle % 7))
    beams = 3 if job.endswith("beams") else 1
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, num_beams=beams)

def prepare_and_undo(cycle):
    prepare()
    write(cycle)
    model.prepare_for_training()

if job in ("write prepared", "write compiled"):
    prepare()
process, held = psutil.Process(), []
for cycle in range(warm + cycles):
    write(cycle) if job.startswith("write") else prepare_and_undo(cycle)
    if cycle + 1 == warm:
        before = process.memory_info().rss
print(process.memory_info().rss - before)
"""
# The keys and values of one row are 400 kB, the smallest matrix 256 kB.
ROOM, ROOM_OF_CYCLE = 8 << 20, 4 << 10
JOBS = ["write", "write with beams", "write prepared", "write compiled"]
JOBS += ["prepare", "prepare with a second copy", "prepare compiled"]
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
    program = (PROGRAM, family, job, warm, cycles)
    grown = json.loads(processes.said(*program, folder=tmp_path, elsewhere=False, XDG_CACHE_HOME=str(tmp_path)))
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
    functions = [type("Function", (), {})() for _ in range(2)]
    for function in functions:
        compiled._note(*load(), function)
    assert len(loaded) == 2
    del function
    functions.pop()
    assert load()[1] is loaded[1]
    assert load()[1] is loaded[2]  # the other two are in use
    functions.clear()
    for path in tmp_path.iterdir():
        path.unlink()
    put(b"other code")
    assert load()[1] is loaded[3]
