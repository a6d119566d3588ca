"""Attention and a state space in one layer, and a network with two factors: their formulas, and what cannot be."""

import pytest
import torch
from pairs import assert_close

import blockformer

BOTH = "attention_and_state_space"
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 5, "layer_types": [BOTH] * 2}


def config(**more):
    return blockformer.BlockformerDecoderConfig(**{**SIZES, **more})


@torch.no_grad()
def test_a_layer_adds_attention_and_a_state_space():
    torch.manual_seed(0)
    factors = {"attention_out_multiplier": 0.5, "ssm_out_multiplier": 0.25}
    block = blockformer.BlockformerDecoderModel(config(**factors)).eval().layers[0].self_attn
    states, mask = torch.randn(2, 7, 32), torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    both, _ = block(states, (mask, None))
    block.after = 0.0
    of_states, _ = block(states, (mask, None))
    block.after, block.state_space.after = 0.5, 0.0
    of_attention, _ = block(states, (mask, None))
    assert of_states.std() > 0 < of_attention.std()
    assert_close(both, of_attention + of_states)
    block.after = 1.0
    assert_close(of_attention, block(states, (mask, None))[0] * 0.5)


@torch.no_grad()
def test_a_network_with_two_factors():
    network = (
        blockformer.BlockformerDecoderModel(config(mlp_type="scaled", mlp_gate_multiplier=0.3, mlp_down_multiplier=1.5))
        .layers[0]
        .mlp
    )
    states = torch.randn(2, 3, 32)
    gate, up, down = (getattr(network, f"{name}_proj").weight for name in ("gate", "up", "down"))
    wanted = (torch.nn.functional.silu(states @ gate.T * 0.3) * (states @ up.T)) @ down.T * 1.5
    assert_close(network(states), wanted)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers must list a number for each of z, v, k, q and dt"),
        ({"ssm_multipliers": [1.0, 2.0, 3.0, 4.0, "5"]}, "ssm_multipliers must list a number for each of z"),
        ({"layer_types": [BOTH, "state_space"]}, f"layer_types names '{BOTH}': add a layer of 'full_attention'"),
        ({"layer_types": [BOTH, "sliding_attention"], "sliding_window": 5}, "not supported with sliding_window=5"),
        ({"mlp_type": "scaled", "gated_mlp": False}, "mlp_type='scaled' is not supported with gated_mlp=False"),
        ({"mlp_type": "scaled", "num_experts": 4}, "num_experts=4"),
        ({"position_type": "alibi"}, f"layer_types names '{BOTH}', which is not supported with position_type='alibi'"),
    ],
)
def test_what_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)


def test_a_step_of_such_layers_is_not_compiled():
    model = blockformer.BlockformerDecoderForCausalLM(config())
    with pytest.raises(ValueError, match="compile=True is not supported with layer_types"):
        model.prepare_for_inference(compile=True)
