"""The matmul of few rows in parts, and which matmul is taken on which processor."""

import pytest
import torch
from packed_layers import faster_here
from torch import nn
from torch.nn import functional as F

from blockformer.engine import choices, linear
from blockformer.engine.choices import IN_PARTS, ONEDNN, PACKED, WIDENED

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outputs", [7, 160, 163])  # fewer than parts, whole parts, and some more
@pytest.mark.parametrize("shape", [(1, 24), (2, 1, 24), (4, 24), (24,)])
def test_the_product_is_the_plain_one(shape, outputs, bias):
    layer, states = nn.Linear(24, outputs, bias=bias), torch.randn(shape)
    found = linear.in_parts(states, layer.weight, layer.bias)
    torch.testing.assert_close(found, layer(states), atol=1e-5, rtol=1e-5)
    found.view(-1)


@pytest.mark.parametrize("faster", [{choices.IN_PARTS}, {choices.ONEDNN}, {choices.IN_PARTS, choices.ONEDNN}, set()])
@torch.no_grad()
def test_each_number_of_rows_has_its_matmul(faster, monkeypatch):
    """Few rows in parts, and many by oneDNN's: where that is faster."""
    faster_here(monkeypatch, *((way, torch.float32) for way in faster))
    layer, small = nn.Linear(256, 1024), nn.Linear(64, 64)
    for each in (layer, small):
        each.__class__ = linear.QuickLinear
    few = linear.in_parts if choices.IN_PARTS in faster else None
    wide = nn.Linear(64, 4096)  # many weights in rows that are too short
    wide.__class__ = linear.QuickLinear
    for rows in (1, 4):
        assert layer._matmul(torch.ones(rows, 256)) is few
        assert wide._matmul(torch.ones(rows, 64)) is None
    assert layer._matmul(torch.ones(100, 256)) is (linear.by_onednn if choices.ONEDNN in faster else None)
    assert layer._matmul(torch.ones(5, 256)) is None  # too little work
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for rows in (1, 3):
        assert layer._matmul(torch.ones(rows, 256)) is few
    assert layer._matmul(torch.ones(4, 256)) is None
    monkeypatch.setattr(linear, "can_multiply", lambda *_: pytest.fail("asked about a small matmul"))
    assert torch.equal(small(torch.ones(1, 64)), F.linear(torch.ones(1, 64), small.weight, small.bias))


@torch.no_grad()
def test_a_graph_has_the_plain_matmul(monkeypatch):
    """One graph, of any number of rows: where it is traced, no number of threads and no size is asked for."""
    faster_here(monkeypatch, (IN_PARTS, F32), (ONEDNN, F32))
    layer = nn.Linear(256, 1024)
    layer.__class__ = linear.QuickLinear
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    shape = {"states": {0: torch.export.Dim("rows", min=2, max=4096)}}
    exported = torch.export.export(layer, (torch.randn(9, 256),), dynamic_shapes=shape, strict=False).module()
    for rows in (3, 5, 100):
        states = torch.randn(rows, 256)
        expected = F.linear(states, layer.weight, layer.bias)
        assert torch.equal(compiled(states), expected)
        assert torch.equal(exported(states), expected)


AMD, INTEL, OTHER = "vendor_id : AuthenticAMD\nflags : avx2", "vendor_id : GenuineIntel\nflags : avx512_fp16", ""


@pytest.mark.parametrize(("processor", "instructions", "faster"), [
    (AMD, "AVX512", {(IN_PARTS, F32), (ONEDNN, F32), (PACKED, F32), (PACKED, BF16), (WIDENED, F16)}),
    (AMD, "AVX2", {(IN_PARTS, F32), (ONEDNN, F32), (PACKED, F32), (WIDENED, F16), (WIDENED, BF16)}),
    (INTEL, "AVX512", {(PACKED, BF16)}),
    (INTEL, "AVX2", {(WIDENED, F16), (WIDENED, BF16)}),
    (OTHER, "DEFAULT", set()),
])  # fmt: skip
def test_what_is_faster_on_a_processor(processor, instructions, faster, monkeypatch):
    monkeypatch.setattr(choices.Path, "read_text", lambda path: processor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    assert {way for way, answer in choices._faster_here().items() if answer} == faster
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    by_onednn = {way for way in faster if way[0] in (ONEDNN, PACKED)}
    assert {way for way, answer in choices._faster_here().items() if answer} == faster - by_onednn
