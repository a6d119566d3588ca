"""Products of a prepared model that end in an activation."""

import pytest
import torch
from packed_layers import pack_whatever_can_be
from pairs import assert_close
from sizes import ONE_LAYER
from transformers.activations import ACT2FN

import blockformer
from blockformer.engine import feed_forward, onednn
from blockformer.engine.feed_forward import FusedFeedForward
from blockformer.engine.packed import PackedLinear
from blockformer.model.feed_forward import make_activation

FUSED = ("relu", "silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")


@pytest.fixture
def packs(monkeypatch):
    """Float32 and bfloat16 weights of any size packed, where that is possible."""
    if not onednn.can_pack(torch.float32):
        pytest.skip("this PyTorch has no packed product here")
    pack_whatever_can_be(monkeypatch)


@pytest.fixture
def activated(monkeypatch):
    """The activations that a product ended in."""
    seen = []
    product = onednn.product

    def counted(states, weight, bias=None, activation=("none", "")):
        seen.append(activation[0])
        return product(states, weight, bias, activation)

    for kind in feed_forward._ACTIVATIONS:
        feed_forward._is_right(kind)  # asks too, the first time
    monkeypatch.setattr(onednn, "product", counted)
    return seen


def make(hidden_act, dtype=torch.float32, **settings):
    torch.manual_seed(0)
    sizes = {**ONE_LAYER, "initializer_range": 0.3, "hidden_act": hidden_act, "vocab_size": 40, **settings}
    return blockformer.BlockformerEncoderModel(blockformer.preset("bert", **sizes)).to(dtype).eval()


@pytest.mark.parametrize("name", sorted(ACT2FN))
def test_every_activation_is_that_of_its_name(name):
    states = torch.linspace(-9, 9, 1001)
    torch.manual_seed(0)
    ours = make_activation(name)(states)
    torch.manual_seed(0)
    assert_close(ours, ACT2FN[name](states), 1e-6)


@pytest.mark.usefixtures("packs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*FUSED, "quick_gelu", "tanh"])
@torch.no_grad()
def test_a_product_ends_in_its_activation(name, dtype, activated):
    if not onednn.can_pack(dtype):
        pytest.skip("no packed product of this dtype here")
    model, plain = make(name, dtype), make(name, dtype)
    model.prepare_for_inference()
    network = model.layers[0].mlp
    assert (type(network) is FusedFeedForward) == (name in FUSED)
    for shape in ((1, 1, 32), (2, 9, 32)):
        activated.clear()
        states = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        assert_close(network(states), plain.layers[0].mlp(states), 1e-5 if dtype is torch.float32 else 0.03)
        assert len(set(activated) - {"none"}) == (name in FUSED)
    assert type(model.prepare_for_training().layers[0].mlp) is type(plain.layers[0].mlp)


@pytest.mark.usefixtures("packs")
@pytest.mark.parametrize("place", ["up_proj", "act_fn"])
@torch.no_grad()
def test_a_hook_is_asked(place, activated):
    model, plain = make("gelu"), make("gelu")
    model.prepare_for_inference()
    networks, states = [each.layers[0].mlp for each in (model, plain)], torch.randn(1, 3, 32)
    for network in networks:
        getattr(network, place).register_forward_hook(lambda module, args, output: 2 * output)
    activated.clear()
    assert_close(*(network(states) for network in networks))
    assert set(activated) == {"none"}


@pytest.mark.usefixtures("packs")
def test_gradients_autocast_and_transforms_are_those_of_two_operators():
    model, plain = make("gelu"), make("gelu")
    model.prepare_for_inference()
    networks, states = [each.layers[0].mlp for each in (model, plain)], torch.randn(1, 3, 32)
    gradients = []
    for network in networks:
        inputs = states.clone().requires_grad_()
        network(inputs).square().sum().backward()
        gradients.append(inputs.grad)
    assert_close(*gradients)
    assert_close(*(torch.func.vmap(network)(states) for network in networks))
    with torch.no_grad(), torch.autocast("cpu"):
        found, expected = (network(states) for network in networks)
    assert found.dtype is expected.dtype
    assert_close(found, expected, 0.03)


@pytest.mark.usefixtures("packs")
@pytest.mark.parametrize("answer", [None, 1.0])
@torch.no_grad()
def test_where_onednn_does_not_end_a_product_in_an_activation(answer, monkeypatch):
    def wrong(states, weight, bias=None, activation=("none", "")):
        if activation[0] == "none":
            return product(states, weight, bias)
        if answer is None:
            raise RuntimeError("no such activation")
        return product(states, weight, bias) + answer

    product = onednn.product
    monkeypatch.setattr(onednn, "product", wrong)
    feed_forward._is_right.cache_clear()
    model, plain, states = make("gelu").prepare_for_inference(), make("gelu"), torch.randn(1, 3, 32)
    assert type(model.layers[0].mlp) is type(plain.layers[0].mlp)
    assert_close(model.layers[0].mlp(states), plain.layers[0].mlp(states))
    feed_forward._is_right.cache_clear()


@pytest.mark.usefixtures("packs")
def test_a_network_whose_layers_a_tool_has_put_together_stays_as_it_is():
    network = make("relu").layers[0].mlp
    assert feed_forward.can_be_fused(network)
    del network.up_proj
    assert not feed_forward.can_be_fused(network)


@pytest.mark.usefixtures("packs")
@torch.no_grad()
def test_states_that_do_not_fit_are_refused_in_pytorch_s_words():
    model, plain = make("gelu").prepare_for_inference(), make("gelu")
    assert isinstance(model.layers[0].mlp.up_proj, PackedLinear)
    for states in (torch.ones(2, 31), torch.ones(2, 32, dtype=torch.float64)):
        with pytest.raises(RuntimeError) as expected:
            plain.layers[0].mlp(states)
        with pytest.raises(RuntimeError) as found:
            model.layers[0].mlp(states)
        assert str(found.value) == str(expected.value)
