"""By whose attention a model attends."""

import pytest
import torch
from pairs import assert_close, left_padded, pair
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

import blockformer
from blockformer import preset
from blockformer.engine.attention import is_in_use
from blockformer.model.attention import ALL_ATTENTION_FUNCTIONS, LIBRARY

SIZES = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 61,
    "initializer_range": 0.3,
}  # fmt: skip


def test_only_our_attention_is_compiled(monkeypatch):
    model = blockformer.BlockformerDecoderForCausalLM(preset("qwen3", **SIZES))
    assert is_in_use(model.config)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", lambda *given, **more: None)
    assert not is_in_use(model.config)
    monkeypatch.undo()
    model.set_attn_implementation("eager")
    assert not is_in_use(model.config)


@torch.no_grad()
def test_another_attention_than_ours_is_attended_by(untraced, monkeypatch):
    """Also once steps have been compiled."""
    model = (
        blockformer.BlockformerDecoderForCausalLM(preset("qwen3", **SIZES)).eval().prepare_for_inference(compile=True)
    )
    ids, called = torch.tensor([[3, 4, 5, 6]]), []
    ours = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def sharper(module, query, *given, scaling, **more):
        called.append(module)
        return ours(module, query, *given, scaling=3 * scaling, **more)

    def written():
        return model.generate(ids, max_new_tokens=3, do_sample=False, output_scores=True, return_dict_in_generate=True)

    first = written()
    monkeypatch.setitem(AttentionInterface._global_mapping, "sharper", sharper)
    model.set_attn_implementation("sharper")
    second = written()
    assert called
    assert not torch.allclose(first.scores[0], second.scores[0])
    model.set_attn_implementation("sdpa")
    assert all(map(torch.equal, written().scores, first.scores))


@pytest.mark.parametrize("prepares", [None, {}, {"compile": True}], ids=["loaded", "prepared", "compiled"])
@pytest.mark.parametrize("name", ["sdpa", "quieter"])
@torch.no_grad()
def test_a_function_that_is_put_into_the_library_s_table_is_called(name, prepares, untraced, monkeypatch):
    """As ring attention and the like do, under a new name or under one that is there."""
    ours, theirs = pair()
    if prepares is not None:
        ours.prepare_for_inference(**prepares)
    ids, mask = left_padded(3, 9)
    before = ours(ids).logits
    usual = LIBRARY["sdpa"]

    def quieter(*given, **more):
        output, probabilities = usual(*given, **more)
        return output * 0.5, probabilities

    monkeypatch.setitem(LIBRARY._local_mapping, name, quieter)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._local_mapping, name, sdpa_mask)
    outputs, texts = [], []
    for model in (ours, theirs):
        model.set_attn_implementation(name)
        outputs.append(model(ids).logits)
        texts += [model.generate(ids, attention_mask=mask, max_new_tokens=6, num_beams=beams) for beams in (1, 2)]
    assert_close(*outputs)
    assert not torch.allclose(before, outputs[0], atol=0.1)
    assert torch.equal(texts[0], texts[2])
    assert torch.equal(texts[1], texts[3])
