"""Products of one row are loops for the compiler; those of several rows, and large ones in float32, stay products."""

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from blockformer.engine import one_row


def products(program):
    return [node for node in program.graph.nodes if node.target is torch.ops.aten.linear.default]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_row_is_a_loop_with_the_same_result(dtype, bias):
    torch.manual_seed(0)
    layer, row = nn.Linear(96, 40, bias=bias).to(dtype), torch.randn(1, 1, 96).to(dtype)
    program = one_row.with_one_row_products(export(layer, (row,)))
    assert not products(program)
    exact = nn.functional.linear(row.double(), layer.weight.double(), layer.bias.double() if bias else None)
    found = program.module()(row)
    assert found.dtype is dtype
    assert found.shape == (1, 1, 40)
    assert (found - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max()


def test_several_rows_stay_a_product_of_any_number_of_rows():
    layer = nn.Linear(8, 4)
    program = export(layer, (torch.randn(3, 1, 8),), dynamic_shapes=({0: Dim("rows", min=2)},))
    program = one_row.with_one_row_products(program)
    assert len(products(program)) == 1
    rows = torch.randn(7, 1, 8)
    assert torch.equal(program.module()(rows), layer(rows))


def test_in_64_bits_it_stays_a_product():
    for dtype, count in ((torch.float32, 0), (torch.bfloat16, 0), (torch.float64, 1)):
        program = export(nn.Linear(8, 4).to(dtype), (torch.randn(1, 8).to(dtype),))
        assert len(products(one_row.with_one_row_products(program))) == count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [1, 2, 6])
def test_attention_of_one_token_is_the_library_s(dtype, heads):
    torch.manual_seed(0)
    query = torch.randn(3, heads * 2, 1, 8).to(dtype)
    key, value = (torch.randn(3, 2, 12, 8).to(dtype) for _ in range(2))
    seen = torch.rand(3, 1, 1, 12) < 0.6
    seen[..., 0] = True
    bias = torch.randn(1, heads * 2, 1, 12)
    for mask in (seen, bias.masked_fill(~seen, torch.finfo(dtype).min)):
        found = one_row.attend_one_token(query, key, value, mask, 0.3)
        parts = [part.double() for part in (query, key, value)]
        exact = mask if mask.dtype is torch.bool else mask.double()
        expected = nn.functional.scaled_dot_product_attention(*parts, exact, scale=0.3, enable_gqa=True)
        assert (found.dtype, found.shape) == (dtype, (3, 1, heads * 2, 8))
        error = (found.transpose(1, 2) - expected).abs().max()
        assert error <= 4 * torch.finfo(dtype).eps * expected.abs().max()
