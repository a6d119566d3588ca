"""Products of few rows are loops in a compiled step; those of any number of rows stay products."""

import pytest
import torch
from torch import nn

from blockformer.engine import compiler, few_rows
from blockformer.engine.compiler import without_repeats
from blockformer.engine.step import StepLayers, StepLinear
from blockformer.engine.step_functions import twin


@pytest.mark.parametrize(("rows", "outputs"), [(1, 40), (1, 3), (2, 41), (3, 40), (4, 43)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@torch.no_grad()
def test_few_rows_are_a_loop_with_the_same_result(dtype, bias, rows, outputs, monkeypatch):
    torch.manual_seed(0)
    layer = nn.Linear(96, outputs, bias=bias).to(dtype)
    loop = twin(layer, StepLayers(rows, dtype, {}))
    monkeypatch.setattr(nn.functional, "linear", None)
    states = torch.randn(rows, 1, 96).to(dtype)
    exact = states.double() @ layer.weight.double().t() + (layer.bias.double() if bias else 0)
    found = loop(states)
    assert found.dtype is dtype
    assert found.shape == (rows, 1, outputs)
    assert (found - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max()


@torch.no_grad()
def test_a_loop_reads_the_layer_s_weights():
    layer, states = nn.Linear(8, 4), torch.randn(1, 1, 8)
    loop = twin(layer, StepLayers(1, torch.float32, {}))
    layer.weight = nn.Parameter(2 * layer.weight)
    torch.testing.assert_close(loop(states), layer(states))
    assert type(layer) is nn.Linear


def test_many_rows_and_those_in_64_bits_stay_a_product():
    for rows, dtype in ((None, torch.float32), (1, torch.float64)):
        loop = twin(nn.Linear(8, 4, dtype=dtype), StepLayers(rows, dtype, {}))
        assert type(loop) is StepLinear
        assert loop.rows is None


def repeating(states, weight, kept):
    """Computes some things twice: some that are alike, some that are drawn, and one that is written to in between."""
    alike = nn.functional.linear(states, weight)[:, :2] * nn.functional.linear(states, weight)[:, 2:]
    drawn = torch.rand(3) - torch.rand(3)
    before = kept.exp()
    kept.add_(1)
    return alike, drawn, before, kept.exp()


def test_what_is_computed_twice_alike_is_computed_once(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing is compiled yet
    counts = []

    def counted(graph_module):
        graph_module = without_repeats(graph_module)
        names = [str(node.target) for node in graph_module.graph.nodes]
        counts.append([sum(name.startswith(each) for name in names) for each in ("aten.mm", "prims.inductor_random")])
        return graph_module

    monkeypatch.setattr(compiler, "without_repeats", counted)
    states, weight, kept = torch.randn(5, 8), torch.randn(4, 8), torch.zeros(5)
    alike, drawn, before, after = compiler.compiled(repeating, "cpu")(states, weight, kept)
    assert counts == [[1, 2]]
    output = states @ weight.T
    torch.testing.assert_close(alike, output[:, :2] * output[:, 2:])
    assert drawn.all()
    torch.testing.assert_close(after, before * torch.e)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize(("queries", "length"), [(1, 12), (2, 13)])
def test_attention_of_few_tokens_is_the_library_s(dtype, heads, queries, length):
    torch.manual_seed(0)
    query = torch.randn(3, heads * 2, queries, 8).to(dtype)
    key, value = (torch.randn(3, 2, length, 8).to(dtype) for _ in range(2))
    seen = torch.rand(3, 1, 1, length) < 0.6
    seen[..., 0] = True
    seen[2] = False  # a text of nothing but padding
    bias = torch.randn(1, heads * 2, 1, length)
    for mask in (seen, bias.masked_fill(~seen, torch.finfo(dtype).min)):
        found = few_rows.attend(query, key, value, mask, 0.3)
        parts = [part.double() for part in (query, key, value)]
        exact = mask if mask.dtype is torch.bool else mask.double()
        expected = nn.functional.scaled_dot_product_attention(*parts, exact, scale=0.3, enable_gqa=True)
        assert (found.dtype, found.shape) == (dtype, (3, queries, heads * 2, 8))
        error = (found.transpose(1, 2) - expected).abs().max()
        assert error <= 4 * torch.finfo(dtype).eps * expected.abs().max()
