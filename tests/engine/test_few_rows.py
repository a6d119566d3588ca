"""Products of few rows are loops for the compiler; those of any number of rows stay products."""

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from blockformer.engine import few_rows


def products(program):
    return [node for node in program.graph.nodes if node.target is torch.ops.aten.linear.default]


ROWS = {"one": (1, None), "three": (3, None), "two to four": (3, Dim("rows", min=2, max=4))}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_few_rows_are_a_loop_with_the_same_result(dtype, bias, rows):
    torch.manual_seed(0)
    count, varies = ROWS[rows]
    layer, states = nn.Linear(96, 40, bias=bias).to(dtype), torch.randn(count, 1, 96).to(dtype)
    program = export(layer, (states,), dynamic_shapes=(None if varies is None else {0: varies},))
    program = few_rows.with_products_as_loops(program)
    assert not products(program)
    for number in (count,) if varies is None else (2, 3, 4):
        states = torch.randn(number, 1, 96).to(dtype)
        exact = nn.functional.linear(states.double(), layer.weight.double(), layer.bias.double() if bias else None)
        found = program.module()(states)
        assert found.dtype is dtype
        assert found.shape == (number, 1, 40)
        assert (found - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max()


def test_many_rows_stay_a_product_of_any_number_of_rows():
    layer = nn.Linear(8, 4)
    program = export(layer, (torch.randn(3, 1, 8),), dynamic_shapes=({0: Dim("rows", min=2)},))
    program = few_rows.with_products_as_loops(program)
    assert len(products(program)) == 1
    rows = torch.randn(7, 1, 8)
    assert torch.equal(program.module()(rows), layer(rows))


class Repeats(nn.Module):
    """Computes some things twice: two that are alike, two that are drawn, and two that are its results."""

    def forward(self, states):
        alike = (2 * states).sin() * (2 * states).sin().cos()
        return alike, torch.rand(3) - torch.rand(3), 2 * states, 2 * states, torch.zeros(2 * states.shape[0])


def test_what_is_computed_twice_alike_is_computed_once():
    program = export(Repeats(), (torch.randn(5),), dynamic_shapes=({0: Dim.DYNAMIC},))
    program = few_rows.without_repeats(program.run_decompositions({}))
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(torch.ops.aten.sin.default) == 1
    assert targets.count(torch.ops.aten.rand.default) == 2
    assert {node.name for node in program.graph.nodes} >= set(program.graph_signature.user_outputs)
    states = torch.randn(7)
    alike, drawn, *others = program.module()(states)
    torch.testing.assert_close(alike, (2 * states).sin() * (2 * states).sin().cos())
    assert drawn.all()
    assert [len(other) for other in others] == [7, 7, 14]


def test_in_64_bits_it_stays_a_product():
    for dtype, count in ((torch.float32, 0), (torch.bfloat16, 0), (torch.float64, 1)):
        program = export(nn.Linear(8, 4).to(dtype), (torch.randn(1, 8).to(dtype),))
        assert len(products(few_rows.with_products_as_loops(program))) == count


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
