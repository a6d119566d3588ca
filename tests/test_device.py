"""On an accelerator: no waiting for its values, no tensor of another device, no float64; and other default devices."""

import json
from pathlib import Path

import pytest
import torch
from pairs import model, token_ids
from sizes import TINY
from torch.utils._python_dispatch import TorchDispatchMode

import blockformer

LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
NO_ROPE = {"rope_parameters": None}
SCRIPT = Path(__file__).with_name("fake_device.py")
EXPECTED = {"some": 51, "every": 73}


def example(name, dtype):
    """A small model, its labels and its other inputs."""
    kind, settings = CONFIGS[name]
    config = getattr(blockformer, f"Blockformer{kind}Config")(**TINY, vocab_size=199, pad_token_id=0, **settings)
    head = {"Decoder": "ForCausalLM", "Encoder": "ForMaskedLM"}.get(kind, "ForConditionalGeneration")
    ours = getattr(blockformer, f"Blockformer{kind}{head}")(config).to(dtype).eval()
    ids, mask = token_ids(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[1, 7:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    if kind == "EncoderDecoder":
        batch["decoder_input_ids"] = ids
    return ours, {"labels": ids}, batch


@pytest.mark.parametrize("cases", ["some", pytest.param("every", marks=pytest.mark.exhaustive)])
def test_nothing_waits_for_an_accelerator(processes, cases):
    code = "import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"
    done = processes.run(code, SCRIPT, f"--{cases}", folder=SCRIPT.parent, elsewhere=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == EXPECTED[cases]
    wrong = {case: what for case, what in found.items() if what}
    assert not wrong, json.dumps(wrong, indent=1)


def test_what_a_prepared_model_reads_of_each_padded_batch(processes):
    code = "import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"
    done = processes.run(code, SCRIPT, "--prepared", folder=SCRIPT.parent, elsewhere=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found.keys() == {"encoder mask", "encoder packed", "decoder mask", "decoder packed", "encoder-decoder mask"}
    for case, what in found.items():
        # A list, on this device number by number: lengths, and how often rows change.
        reads = {"_local_scalar_dense of [] at unpadding.py": 8} if case.endswith("mask") else {}
        assert {place.partition(":")[0]: times for place, times in what["first"].items()} == reads, case
        assert len(what["first"]) == len(reads), case
        assert what["tokens"] == ([1, 4] if reads else [1, 48]), case  # what is read says that a row is one token
        assert not what["then"], case


CONFIGS = {
    "decoder": ("Decoder", {"position_type": "rotary", "num_key_value_heads": 2}),
    "longrope": ("Decoder", {"rope_parameters": {"rope_type": "longrope", **LONG}, "max_position_embeddings": 128}),
    "yarn": ("Decoder", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}),
    "relative": ("Decoder", {"position_type": "relative_bias"}),
    "encoder": ("Encoder", {"position_type": "relative_key_query", "type_vocab_size": 2}),
    "sinusoidal": ("Encoder", {"position_type": "sinusoidal"}),
    "encoder-decoder": ("EncoderDecoder", {"position_type": "learned", "decoder_start_token_id": 0}),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_default_device(name, dtype):
    """A model on the CPU stays there; "meta" for a GPU, since its tensors do not mix with others either."""
    ours, labels, batch = example(name, dtype)

    def step():
        ours.zero_grad()
        outputs = ours(**batch, **labels)
        outputs.loss.backward()
        return outputs.logits.detach(), [parameter.grad.clone() for parameter in ours.parameters()]

    expected = step()
    with torch.device("meta"):
        logits, gradients = step()
    assert torch.equal(logits, expected[0])
    assert all(map(torch.equal, gradients, expected[1]))


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_a_prepared_model_with_another_default_device(name):
    ours, _, batch = example(name, torch.bfloat16)
    ours.prepare_for_inference()
    batch["input_ids"] = batch["input_ids"].repeat(1, 40)  # a long prompt
    del batch["attention_mask"]
    if "decoder_input_ids" in batch:
        batch["decoder_input_ids"] = batch["input_ids"]
    expected = ours(**batch).logits
    with torch.device("meta"):
        assert torch.equal(ours(**batch).logits, expected)
        assert ours.to("cpu") is ours


class NoFloat64(TorchDispatchMode):
    """Refuses float64 outside of the CPU, as MPS does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype is torch.float64:
            assert result.device.type == "cpu", func
        return result


@pytest.mark.parametrize("position_type", ["sinusoidal", "rotary"])
def test_a_model_is_built_on_the_default_device(position_type):
    with torch.device("meta"), NoFloat64():
        ours = model("qwen3", position_type=position_type, **({} if position_type == "rotary" else NO_ROPE))
    assert {tensor.device.type for tensor in (*ours.parameters(), *ours.buffers())} == {"meta"}
