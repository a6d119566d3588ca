"""Fast paths give what the plain ways give, over shapes, strides, dtypes and masks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import assert_close, model, token_ids
from torch import nn

from blockformer.attention import eager_attention_forward
from blockformer.kernels import attend_grouped, can_attend_grouped

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float64: 1e-6}


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    groups=st.integers(2, 4),
    length=st.integers(1, 70),
    dtype=st.sampled_from(list(TOLERANCES)),
    mask=st.sampled_from(["none", "boolean", "additive", "by head", "by head, one row"]),
    is_view=st.booleans(),
)
@torch.no_grad()
def test_grouped_attention_of_one_query(batch, kv_heads, groups, length, dtype, mask, is_view):
    heads, size = kv_heads * groups, 16
    query = torch.randn(batch, 1, heads, size, dtype=dtype).transpose(1, 2)
    key, value = (torch.randn(batch, kv_heads, length + 9, size, dtype=dtype)[:, :, :length] for _ in range(2))
    if not is_view:
        key, value = key.contiguous(), value.contiguous()
    attention_mask = None
    if mask == "boolean":
        attention_mask = torch.rand(batch, 1, 1, length) > 0.3
        attention_mask[..., 0] = True
    elif mask != "none":
        rows = 1 if mask == "by head, one row" else batch
        attention_mask = torch.randn(rows, 1 if mask == "additive" else heads, 1, length, dtype=dtype)
    assert can_attend_grouped(query, key, {})
    fast = attend_grouped(query, key, value, attention_mask, 0.3, 0.0)
    plain, _ = eager_attention_forward(nn.Module().eval(), query, key, value, attention_mask, 0.3)
    assert fast.shape == plain.shape == (batch, 1, heads, size)
    assert_close(fast, plain, tolerance=TOLERANCES[dtype])


def test_when_it_is_taken(monkeypatch):
    query, key = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 5, 8)
    assert can_attend_grouped(query, key, {"cache": None})
    assert not can_attend_grouped(query, key, {"cache": object()})
    assert not can_attend_grouped(torch.randn(1, 4, 2, 8), key, {})
    assert not can_attend_grouped(torch.randn(1, 2, 1, 8), key, {})
    assert not can_attend_grouped(query.to("meta"), key, {})
    monkeypatch.setenv("BLOCKFORMER_FAST", "0")
    assert not can_attend_grouped(query, key, {})


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_text_is_the_same_without_fast_paths(family, monkeypatch):
    ours, ids = model(family), token_ids(3, 20)
    arguments = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    fast = ours.generate(ids, **arguments)
    monkeypatch.setenv("BLOCKFORMER_FAST", "0")
    assert torch.equal(ours.generate(ids, **arguments), fast)
