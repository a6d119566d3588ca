"""What a model says of how it runs, and what it logs where compiled code is of no use to a call."""

import contextlib

import pytest
import torch
from packed_layers import can_pack, pack_whatever_can_be
from pairs import token_ids
from sizes import STRONG
from torch import nn
from transformers import BertConfig, BertModel

import blockformer
from blockformer import explain, preset, warm_up
from blockformer.engine import choices, step_functions


@pytest.fixture
def said(monkeypatch):
    """What is logged where a call runs uncompiled."""
    lines = []
    monkeypatch.setattr(step_functions.logger, "warning", lines.append)
    return lines


def make(family="qwen3", **settings):
    torch.manual_seed(0)
    config = preset(family, **STRONG, **settings)
    kind = "DecoderForCausalLM" if config.is_decoder else "EncoderModel"
    if config.is_encoder_decoder:
        kind = "EncoderDecoderForConditionalGeneration"
    return getattr(blockformer, f"Blockformer{kind}")(config).eval()


def ways_of(model):
    return {part.name: part.way for part in explain(model).parts}


def test_a_model_as_loaded_says_what_would_make_it_faster():
    parts = {part.name: part for part in explain(make()).parts}
    assert "compile=True" in parts["one more token"].reason
    assert "prepare_for_inference()" in parts["the prompt's layers"].reason
    assert parts["attention"].way == "'sdpa'"
    assert parts["padding"].way.startswith("computed")
    prepared = ways_of(make().prepare_for_inference())
    assert prepared["padding"].startswith("skipped")
    assert [part.way for name, part in parts.items() if "linear layers" in name] == ["PyTorch's matmul"]
    assert "buffers" in prepared["one more token"]
    assert "one more token" not in ways_of(make("bert"))


def test_a_prepared_model_names_what_is_packed_and_what_is_not(monkeypatch):
    if not can_pack(torch.bfloat16):
        pytest.skip("this PyTorch has no packed product of this dtype here")
    pack_whatever_can_be(monkeypatch)
    model = make(tie_word_embeddings=True).bfloat16().prepare_for_inference()
    found = [part for part in explain(model).parts if "linear layer" in part.name]
    assert [part.name.split(",")[0] for part in found] == [
        "1 linear layer",
        f"{7 * len(model.model.layers)} linear layers",
    ]
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.randn(48, 32, dtype=torch.bfloat16))
    reasons = [part.reason for part in explain(model).parts if part.name.startswith("1 linear layer,")]
    assert sum("other weights since" in reason for reason in reasons) == 1
    model.prepare_for_inference()
    assert not any("other weights since" in part.reason for part in explain(model).parts)
    assert "tied to an embedding" in found[0].reason
    assert "packed" in found[1].way
    assert explain(model).matmuls["packed weights (bfloat16)"] is True


def test_the_matmuls_of_this_processor_are_named(monkeypatch):
    monkeypatch.setattr(
        choices, "FASTER_HERE", {(choices.IN_PARTS, torch.float32): True, (choices.PACKED, torch.float32): False}
    )
    explanation = explain(make())
    assert explanation.matmuls == {"few rows in parts (float32)": True, "packed weights (float32)": False}
    assert str(explanation).endswith("few rows in parts (float32)")
    monkeypatch.setattr(choices, "FASTER_HERE", {})
    assert str(explain(make())).endswith("PyTorch's matmul")


def test_the_text_is_a_table():
    explanation = explain(make())
    lines = str(explanation).splitlines()
    starts = {line.find(part.way) for part in explanation.parts for line in lines if line.startswith(part.name)}
    assert len(starts) == 1
    assert repr(explanation) == str(explanation)
    assert any(line.startswith("held twice") and "0.0 MB" in line for line in lines)


@pytest.mark.usefixtures("untraced")
@torch.no_grad()
def test_a_compiled_model_says_which_batches_it_has_code_for(said):
    model = make().prepare_for_inference(compile=True)
    assert "at the first batch that needs" in ways_of(model)["one more token"]
    warm_up(model, [{"input_ids": token_ids(1, 5, vocab=97)}, {"input_ids": token_ids(3, 5, vocab=97)}])
    assert ways_of(model)["one more token"] == "compiled for 1 row, 3 rows"
    assert all("compiled code" in way for name, way in ways_of(model).items() if "linear layers" in name)
    assert ways_of(model)["the prompt's layers"] == "layer by layer"
    assert not said
    assert not explain(model).fallbacks
    for functions in model.runtime.decoding.steps._functions.values():
        functions.has_failed = True
    assert not any("compiled code" in way for way in ways_of(model).values())
    model = make("t5", decoder_start_token_id=0)
    model.prepare_for_inference(compile=True)
    warm_up(model, [{"input_ids": token_ids(1, 5, vocab=97)}], num_beams=3)
    assert ways_of(model)["one more token"] == "compiled for 1 text with 3 beams"
    assert not said


def hooked(model):
    return contextlib.nullcontext(model.model.layers[0].register_forward_hook(lambda *_: None))


def attended(model):
    model.set_attn_implementation("eager")
    return contextlib.nullcontext()


def in_training(model):
    model.train()
    return contextlib.nullcontext()


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    ("given", "change", "reason"),
    [
        ({"output_hidden_states": True}, None, "output_hidden_states is given"),
        ({}, hooked, "has a hook"),
        ({}, attended, "'eager'"),
        ({}, in_training, "training mode"),
        ({}, lambda model: torch.autocast("cpu"), "autocast is on"),
        ({"prompt_lookup_num_tokens": 2}, None, None),
        ({"return_dict_in_generate": True, "output_logits": True}, None, "output_logits is given"),
        ({"token_type_ids": torch.zeros(1, 6, dtype=torch.long)}, None, "token_type_ids is given"),
    ],
)
@torch.no_grad()
def test_each_reason_is_said_once_and_counted(given, change, reason, said):
    model = make().prepare_for_inference(compile=True)
    ids = token_ids(1, 6, vocab=97)
    with change(model) if change else contextlib.nullcontext():
        for _ in range(2):
            model.generate(ids, max_new_tokens=3, **given)
    lines = [line for line in said if line.startswith("writing")]
    assert len(lines) == (reason is not None)  # drafts have a loop of the library's own
    if reason is not None:
        assert reason in lines[0]
        assert list(explain(model).fallbacks.values()) == [2]
        assert reason in str(explain(model))


@torch.no_grad()
def test_an_encoder_is_warmed_up_by_reading():
    model, read = make("bert"), []
    model.register_forward_hook(lambda module, args, output: read.append(output.last_hidden_state.shape[:2]))
    assert warm_up(model, [{"input_ids": token_ids(2, 7, vocab=97)}]) is model
    assert read == [(2, 7)]


def test_what_cannot_be_warmed_up_or_explained_is_refused():
    model = make()
    with pytest.raises(ValueError, match="at least one batch"):
        warm_up(model, [])
    with pytest.raises(TypeError, match=r"arguments by name, such as input_ids, not a Tensor"):
        warm_up(model, [token_ids(1, 5, vocab=97)])
    for function in (explain, lambda other: warm_up(other, [{}])):
        with pytest.raises(TypeError, match="BertModel is not a Blockformer model"):
            function(BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9)))
        with pytest.raises(TypeError, match="Linear is not"):
            function(nn.Linear(1, 1))


def test_copies_are_counted():
    model = make(linear_bits=4, linear_group_size=16).prepare_for_inference(compile=True)
    assert explain(model).bytes_held_twice == 0
    model.runtime.decoding.steps.refresh(model)
    assert explain(model).bytes_held_twice > 0
