"""Layers with a dense network and experts: the formula, its norms, what it is combined with, its plan, its code."""

import pytest
import torch
from pairs import SIZES, assert_close, token_ids
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer

import blockformer
from blockformer.model.dense_and_sparse import DenseAndSparse
from blockformer.model.left_out import LeftOut
from blockformer.pictures.words import feed_forward_words
from blockformer.publishing.repo_code import code_files, left_out
from blockformer.summary import describe

BOTH = {
    **SIZES,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_layer_types": ["both"] * 3,
    "norm_placement": "pre_output",
}
SHARED = {"shared_expert_intermediate_size": 40, "shared_expert_gate": True, "mlp_bias": True}


def model(**settings):
    """A decoder with such layers, its norms and factors random."""
    torch.manual_seed(0)
    made = blockformer.BlockformerDecoderForCausalLM(blockformer.BlockformerDecoderConfig(**{**BOTH, **settings}))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return made.eval()


def rms(states, weight):
    return weight * states * (states.square().mean() + 1e-6).rsqrt()


def test_a_network_is_the_formula():
    """Written out for one token: each network between two norms, and a router that reads a third one."""
    network = model().model.layers[0].mlp
    token = torch.randn(64) * 3
    norms = {name: each.weight for name, each in network.named_children() if name.endswith("_norm")}
    assert len(norms) == 5
    scores = (network.gate.weight @ rms(token, norms["router_norm"]) / 8).softmax(0)
    chosen, read = scores.topk(2).indices, rms(token, norms["sparse_pre_norm"])
    sparse = torch.zeros(64)
    for expert in chosen:
        gate, up = (network.experts.gate_up_proj[expert] @ read).chunk(2)
        states = network.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
        sparse += network.gate.expert_scale[expert] * scores[expert] / scores[chosen].sum() * states
    dense = network.dense(rms(token, norms["dense_pre_norm"]))
    expected = rms(dense, norms["dense_output_norm"]) + rms(sparse, norms["sparse_output_norm"])
    assert_close(network(token[None, None])[0, 0], expected)


def test_a_layer_is_the_official_one():
    """The feed-forward half of a layer, which leaves attention out by an output norm of zeros."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24}
    heads = {"layer_types": ["full_attention"], "head_dim": 16, "global_head_dim": 16}
    config = Gemma4TextConfig(**sizes, **experts, **heads, num_hidden_layers=1, hidden_size_per_layer_input=0)
    config._attn_implementation = config._experts_implementation = "eager"
    theirs = Gemma4TextDecoderLayer(config, 0).eval()
    ours = model(**sizes, hidden_act="gelu_pytorch_tanh").model.layers[0]
    with torch.no_grad():
        for tensor in (*theirs.parameters(), *theirs.buffers()):
            tensor.copy_(torch.randn_like(tensor) * 0.3)
        theirs.layer_scalar.fill_(1)
        for layer, norm in ((theirs, "post_attention_layernorm"), (ours, "self_attn_output_norm")):
            getattr(layer, norm).weight.zero_()
        network = ours.mlp
        pairs = {
            "pre_feedforward_layernorm": network.dense_pre_norm,
            "post_feedforward_layernorm_1": network.dense_output_norm,
            "pre_feedforward_layernorm_2": network.sparse_pre_norm,
            "post_feedforward_layernorm_2": network.sparse_output_norm,
            "post_feedforward_layernorm": ours.mlp_output_norm,
            "mlp": network.dense,
            "experts": network.experts,
        }
        for name, module in pairs.items():
            module.load_state_dict(getattr(theirs, name).state_dict())
        network.gate.weight.copy_(theirs.router.proj.weight)
        network.gate.expert_scale.copy_(theirs.router.per_expert_scale)
        network.router_norm.weight.copy_(theirs.router.scale)
        states = torch.randn(2, 7, 64)
        turns = (torch.ones(1, 7, 16), torch.zeros(1, 7, 16))
        found = ours.residual_step("mlp", states, network(states))
        expected = theirs(states.clone(), position_embeddings=turns, shared_kv_states={})
    assert_close(found, expected)


@pytest.mark.parametrize("placement", ["pre", "post", "output", "pre_output", "input"])
def test_the_layer_norms_the_network_only_after_it(placement):
    ours = model(norm_placement=placement)
    for layer in ours.model.layers:
        names = {name for name, _ in layer.named_children() if name.startswith("mlp_")}
        assert names == {"mlp_output_norm"}
    assert ours(token_ids(2, 9)).logits.isfinite().all()


@pytest.mark.parametrize(
    "settings",
    [{"moe_latent_size": 20}, SHARED, {"gated_mlp": False, "hidden_act": "relu2"}, {"expert_bias": True}],
    ids=["latent", "shared expert", "no gate", "biases"],
)
def test_a_network_takes_what_experts_take(settings):
    """The sum of the dense network and of the experts, each as it is without the other."""
    network = model(**settings).model.layers[0].mlp
    states = torch.randn(2, 7, 64)
    read, routed = network.sparse_pre_norm(states), network.router_norm(states)
    sparse = super(DenseAndSparse, network).forward(read, routed)
    dense = network.dense(network.dense_pre_norm(states))
    assert_close(network(states), network.dense_output_norm(dense) + network.sparse_output_norm(sparse))
    other = super(DenseAndSparse, network).forward(read)
    assert not torch.allclose(sparse, other)  # the router reads other states than the experts


def test_a_fresh_router_has_the_factor_1():
    ours = blockformer.BlockformerDecoderForCausalLM(blockformer.BlockformerDecoderConfig(**BOTH))
    assert (ours.model.layers[0].mlp.gate.expert_scale == 1).all()
    assert ours.model.layers[0].mlp.gate.weight.std() > 0.01


def test_its_routers_are_recorded_and_balanced():
    ours = model().train()
    output = ours(token_ids(2, 9), output_router_logits=True, labels=token_ids(2, 9))
    assert [logits.shape for logits in output.router_logits] == [(18, 6)] * 3
    assert output.aux_loss > 0
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in ours.parameters())


def test_the_tensor_parallel_plan_shares_both():
    plan = {
        name.removeprefix("layers.*.mlp."): style
        for name, style in blockformer.BlockformerDecoderConfig(**BOTH).base_model_tp_plan.items()
        if ".mlp." in name
    }
    dense = {"dense.gate_proj": "colwise", "dense.up_proj": "colwise", "dense.down_proj": "rowwise"}
    experts = {"experts.gate_up_proj": "packed_colwise", "experts.down_proj": "rowwise", "experts": "moe_tp_experts"}
    assert plan == dense | experts
    official = Gemma4TextConfig.base_model_tp_plan
    assert experts == {name: official[f"layers.*.{name}"] for name in experts}


def test_only_a_repo_that_needs_it_has_its_code():
    config = blockformer.BlockformerDecoderConfig(**BOTH)
    assert "dense_and_sparse" not in left_out(config)
    assert code_files(config)["dense_and_sparse.py"].name == "dense_and_sparse.py"
    sparse = blockformer.BlockformerDecoderConfig(**{**BOTH, "mlp_layer_types": ["sparse"] * 3})
    assert {"dense_and_sparse", "experts"} & left_out(sparse) == {"dense_and_sparse"}
    assert code_files(sparse)["dense_and_sparse.py"].name == f"{LeftOut.left_out}.py"


def test_inspect_names_both():
    config = blockformer.BlockformerDecoderConfig(**BOTH)
    network = model().model.layers[0].mlp
    size, chips, experts = feed_forward_words(network, config)
    assert size == "2 of 6 experts, each 24 wide"
    assert "dense network 96" in chips
    assert experts == (6, 2)
    described = describe(config)
    total = sum(parameter.numel() for parameter in model().parameters())
    assert (described.parameters, described.active) == (total, total - 3 * 4 * 3 * 24 * 64)
