"""Positions that are computed: exact after a cast, and right after loading."""

import pytest
import torch
from pairs import model, token_ids

from blockformer import BlockformerDecoderModel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_frequencies_stay_in_float32_when_the_model_is_cast(dtype):
    ours = model("qwen3")
    exact = ours.model.rotary_emb.inv_freq.clone()
    ours.to(dtype)
    assert ours.model.embed_tokens.weight.dtype == dtype
    assert torch.equal(ours.model.rotary_emb.inv_freq, exact)
    assert torch.equal(ours.float().model.rotary_emb.inv_freq, exact)


@pytest.mark.parametrize("position_type", ["rotary", "sinusoidal", "sinusoidal_halves", "sinusoidal_inclusive"])
def test_computed_positions_are_right_after_loading(position_type, tmp_path):
    ours = model("qwen3", cls=BlockformerDecoderModel, position_type=position_type, **_no_rope(position_type))
    ours.save_pretrained(tmp_path)
    loaded = BlockformerDecoderModel.from_pretrained(tmp_path)
    ids = token_ids(2, 30)
    assert torch.equal(loaded(ids).last_hidden_state, ours(ids).last_hidden_state)
    with torch.device("meta"):
        empty = BlockformerDecoderModel(ours.config)
    empty.to_empty(device="cpu").load_state_dict(ours.state_dict())
    assert torch.equal(empty.eval()(ids).last_hidden_state, ours(ids).last_hidden_state)


def _no_rope(position_type):
    return {} if position_type == "rotary" else {"rope_parameters": None}
