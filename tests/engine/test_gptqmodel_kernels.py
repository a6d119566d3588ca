"""The kernels of gptqmodel for 4-bit layers: a stand-in of that package, and the package itself where it is installed.

They are for CUDA devices. Here the CPU takes that role (`gptqmodel_kernels.BACKENDS`); the package has some for it too.
"""

import copy
import importlib.util
import sys
import types

import pairs
import pytest
import torch
from quantized_layers import low_of, prepared_pair
from quantized_layers import prepared_of as layer_of

from blockformer.awq_linear import dequantize
from blockformer.engine import gptqmodel_kernels
from blockformer.engine.gptqmodel_kernels import Kernel

LOW = (torch.bfloat16, torch.float16)


class StandIn(torch.nn.Module):
    """A kernel as gptqmodel has them: integers in, made ready by `post_init`, a product out."""

    made, fault = 0, None

    def __init__(self, bits, group_size, desc_act, sym, in_features, out_features, bias, register_buffers, dtype):
        super().__init__()
        if self.fault == "construct":
            raise NotImplementedError(f"{in_features} inputs")
        type(self).made += 1
        groups = 1 if group_size == -1 else in_features // group_size
        self.qweight = torch.nn.Parameter(torch.empty(in_features, out_features // 8, dtype=torch.int32), False)
        self.register_buffer("qzeros", torch.empty(groups, out_features // 8, dtype=torch.int32))
        self.register_buffer("scales", torch.empty(groups, out_features, dtype=dtype))
        assert (bits, desc_act, sym, bias, register_buffers) == (4, False, False, False, True)

    def post_init(self):
        assert not torch.is_grad_enabled()
        self.weight = dequantize(self.qweight, self.qzeros, self.scales, self.scales.dtype)
        if self.fault == "wrong":
            self.weight = self.weight.roll(1, 1)
        if self.fault == "nan":
            self.weight[0, 0] = torch.nan
        for tensor in (self.qweight, self.qzeros, self.scales):
            tensor.zero_()  # a kernel may do with its own what it likes
        self.workspace = torch.zeros(1)

    def forward(self, states):
        assert states.dim() == 2
        assert states.is_contiguous()
        assert states.dtype is self.scales.dtype
        assert not self.training
        assert not torch.is_grad_enabled()
        if self.fault == "call" or len(states) > (1024 if self.fault == "many" else 2000):
            raise RuntimeError("no such product")
        self.workspace += 1
        with torch.inference_mode():
            return states @ self.weight.to(states.dtype)


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Kernels are for the CPU, and nothing is known about them."""
    monkeypatch.setattr(gptqmodel_kernels, "BACKENDS", {"cpu": "auto"})
    cached = (gptqmodel_kernels._agrees, gptqmodel_kernels._kernel_class)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.fixture
def warnings(monkeypatch):
    said = []
    monkeypatch.setattr(gptqmodel_kernels.logger, "warning_once", said.append)
    return said


@pytest.fixture
def stand_in(on_the_cpu, monkeypatch):
    """The class that a stand-in of gptqmodel chooses; its `asked` holds what it was asked for."""
    chosen = type("Chosen", (StandIn,), {"asked": []})

    def select(**asked):
        chosen.asked.append(asked)
        if chosen.fault == "select":
            raise ValueError("no kernel for this")
        return chosen

    names = ("gptqmodel", "gptqmodel.utils", "gptqmodel.utils.importer")
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[names[-1]].hf_select_quant_linear_v2 = select
    return chosen


def pair(**settings):
    """A prepared model whose layers multiply one by one, as on a GPU, and its plain twin."""
    model, plain = prepared_pair(**settings)
    for layer in low_of(model):
        layer.fused = None
    return model, plain


def is_by_kernel(layer):
    return layer._copy is not None and layer._copy.kind[0] is Kernel and layer._copy.made._kernel is not None


def assert_right(layer, plain, dtype=torch.bfloat16, shape=(2, 5)):
    """The product is in the dtype, and as exact as it can be."""
    states = torch.randn(*shape, 2 * layer.in_features).to(dtype)[..., ::2]
    with torch.no_grad():
        product, exact = layer(states), plain(states.float())
    assert product.dtype is dtype
    assert product.shape == exact.shape
    assert not product.is_inference()
    assert (product.float() - exact).norm() < 5e-3 * exact.norm()


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("group", [16, 32, 64, -1])
def test_a_kernel_multiplies(stand_in, warnings, dtype, group):
    layer, plain = layer_of(48, 192, group, bias=True)
    layer.to(dtype)
    before = copy.deepcopy(layer.state_dict())
    for shape in ((), (1,), (3, 40)):
        assert_right(layer, plain, dtype, shape)
        assert is_by_kernel(layer)
    assert stand_in.made == 2  # of random weights, and of the layer's
    assert list(layer.state_dict()) == list(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
    assert not list(layer.children())
    expected = {
        "bits": 4,
        "group_size": group,
        "quant_method": "awq",
        "format": "gemm",
        "zero_point": True,
        "sym": False,
    }
    expected |= {"backend": "auto", "device_map": {"": torch.device("cpu")}, "dtype": dtype, "desc_act": False}
    assert stand_in.asked == [{**expected, "pack": False}]
    assert not warnings


def test_a_kernel_is_made_anew_with_other_weights(stand_in):
    layer, plain = layer_of(64, 64, 32)
    other, other_plain = layer_of(64, 64, 32, seed=1)
    assert_right(layer, plain)
    layer.load_state_dict(other.state_dict())
    assert_right(layer, other_plain)
    assert_right(layer, other_plain, torch.float16)
    assert is_by_kernel(layer)
    assert copy.deepcopy(layer)._copy is None
    layer.to(torch.float16)
    assert layer._copy is None
    assert_right(layer, other_plain)


@pytest.mark.parametrize("fault", ["select", "construct", "call", "many", "wrong", "nan"])
def test_a_faulty_kernel_is_not_taken(stand_in, warnings, fault):
    stand_in.fault = fault
    layer, plain = layer_of(48, 192, 64)  # a size of groups that PyTorch's own product takes
    for _ in range(3):
        assert_right(layer, plain)
    assert not is_by_kernel(layer)
    assert len(stand_in.asked) == len(warnings) == 1
    reason = {"select": "no kernel for this", "construct": "192 inputs"}
    reason |= {"call": "no such product", "many": "no such product"}
    assert reason.get(fault, "the product of Chosen is wrong by") in warnings[0]
    assert "4-bit weights on cpu" in warnings[0]


def test_a_kernel_that_fails_later_is_left(stand_in, warnings):
    layer, plain = layer_of(32, 64, 32)
    assert_right(layer, plain)
    assert_right(layer, plain, shape=(2001,))
    assert not is_by_kernel(layer)
    assert len(warnings) == 1
    stand_in.fault = "construct"
    layer, plain = layer_of(32, 64, 32, seed=1)
    assert_right(layer, plain)
    assert not is_by_kernel(layer)
    assert len(warnings) == 2


def test_memory_that_runs_out_is_the_callers_matter(stand_in, monkeypatch):
    layer, plain = layer_of(32, 64, 32)
    assert_right(layer, plain)

    def forward(self, states):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(stand_in, "forward", forward)
        with pytest.raises(torch.OutOfMemoryError):
            assert_right(layer, plain)
    assert_right(layer, plain)
    assert is_by_kernel(layer)


def test_where_no_kernel_is_asked_for(stand_in, warnings, monkeypatch):
    layer, _ = layer_of(32, 64, 32)
    states = torch.randn(3, 64).bfloat16()
    layer(states)  # gradients are recorded
    with torch.no_grad():
        layer(states.float())
        layer(states[:0])
        layer(states.as_subclass(type("Other", (torch.Tensor,), {})))
        torch.func.vmap(layer)(states)
        monkeypatch.setenv("BLOCKFORMER_FAST", "0")
        layer(states)
        monkeypatch.delenv("BLOCKFORMER_FAST")
        torch.compile(layer, backend="eager", fullgraph=True)(states)
        gptqmodel_kernels.BACKENDS.clear()
        layer(states)
        gptqmodel_kernels.BACKENDS["cpu"] = "auto"
        layer.to("meta")(states)
    assert not stand_in.asked
    assert not warnings


def test_gradients_and_adapters_go_by_plain_weights(stand_in):
    """A kernel's product may be a tensor that autograd refuses; the layers below an adapter meet it."""
    model, _ = pair()
    model.to(torch.bfloat16)
    ids = pairs.token_ids(1, 6)
    with torch.no_grad():
        model(ids)
    assert all(is_by_kernel(layer) for layer in low_of(model))
    model.requires_grad_(False)
    model.model.layers[-1].mlp.down_proj.register_forward_hook(lambda module, args, output: output * factor)
    factor = torch.ones((), dtype=torch.bfloat16, requires_grad=True)
    model(ids, labels=ids).loss.backward()
    assert factor.grad is not None


@pytest.mark.parametrize("is_inference", [True, False])
def test_modes_of_the_first_call_do_not_matter(stand_in, warnings, is_inference):
    layer, plain = layer_of(32, 64, 32)
    with (
        torch.inference_mode(is_inference),
        torch.no_grad(),
        torch.autocast("cpu", torch.float16),
        torch.device("meta"),
    ):
        assert layer(torch.zeros(3, 64, device="cpu")).dtype is torch.float16
    for dtype in LOW[::-1]:
        assert_right(layer, plain, dtype)
        assert is_by_kernel(layer)
    assert not warnings


@pytest.mark.skipif(importlib.util.find_spec("gptqmodel") is not None, reason="gptqmodel is installed")
def test_without_the_package(on_the_cpu, warnings):
    layer, plain = layer_of(48, 192, 64)
    assert_right(layer, plain)
    assert not is_by_kernel(layer)
    assert not warnings


def test_nothing_is_imported_for_a_cpu(monkeypatch):
    assert gptqmodel_kernels.BACKENDS == {"cuda": "auto"}
    gptqmodel_kernels._agrees.cache_clear()
    gptqmodel_kernels._kernel_class.cache_clear()
    monkeypatch.setattr(gptqmodel_kernels.importlib, "import_module", None)
    layer, plain = layer_of(48, 192, 64)
    assert_right(layer, plain)
    assert gptqmodel_kernels._agrees.cache_info().misses == 0


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("auto", torch.bfloat16),
        ("awq_torch", torch.bfloat16),
        ("awq_torch", torch.float16),
        ("awq_torch_aten", torch.bfloat16),
        ("awq_torch_fused", torch.bfloat16),
        ("awq_torch_fused", torch.float16),
    ],
)
def test_a_model_by_the_package_itself(on_the_cpu, warnings, monkeypatch, backend, dtype):
    pytest.importorskip("gptqmodel", reason="gptqmodel, in an environment of its own")
    monkeypatch.setitem(gptqmodel_kernels.BACKENDS, "cpu", backend)
    model, twin = pair()
    model.to(dtype)
    ids, mask = pairs.left_padded(4, 60)
    with torch.no_grad():
        exact = twin(ids, attention_mask=mask).logits[mask.bool()]
    errors = []
    for fast in ("0", "1"):
        monkeypatch.setenv("BLOCKFORMER_FAST", fast)
        with torch.no_grad():
            logits = model(ids, attention_mask=mask).logits[mask.bool()]
        errors.append((logits - exact).norm() / exact.norm())
        assert all(is_by_kernel(layer) == (fast == "1") for layer in low_of(model))
    assert errors[1] < 1.1 * errors[0]  # as exact as plain weights of the same dtype
    # Every token of a text is the likeliest one, or was before rounding.
    text = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    with torch.no_grad():
        exact = twin(text, attention_mask=torch.nn.functional.pad(mask, (0, 12), value=1)).logits[:, 59:-1]
    chosen = exact.gather(-1, text[:, 60:, None])
    assert (exact.amax(-1, keepdim=True) - chosen).max() < 0.1 * exact.std()
    kinds = {type(layer._copy.made._kernel).__module__.partition(".")[0] for layer in low_of(model)}
    assert kinds == {"gptqmodel"}
    assert not warnings


@torch.no_grad()
def test_a_lack_of_memory_decides_nothing(on_the_cpu, monkeypatch):
    """It goes to the caller, and the next call asks again."""
    layer, _ = layer_of(32, 64, 32)
    calls = []

    def fails(layer, dtype):
        calls.append(dtype)
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(gptqmodel_kernels, "_make", fails)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            layer(torch.randn(1, 64).bfloat16())
    with pytest.raises(torch.OutOfMemoryError):
        Kernel(layer, torch.bfloat16)
    assert len(calls) == 3
