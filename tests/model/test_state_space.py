"""The selective state space: in chunks and token by token it is its definition, and a fresh one has all rates."""

import pytest
import torch
from pairs import assert_close, token_ids
from recurrences import assert_chunks_follow, assert_one_follows, assert_packed_texts_are_apart
from transformers import DynamicCache, NemotronHConfig, NemotronHForCausalLM

import blockformer
from blockformer.model.state_space import CHUNK, scan_by_chunk, scan_by_token, scan_of_one

LENGTH = 150  # more than two chunks
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"layer_types": ["state_space", "full_attention"], "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_d_state": 5}
SIZES |= {"mamba_n_groups": 2, "initializer_range": 0.2}


def model(**more):
    torch.manual_seed(0)
    return blockformer.BlockformerDecoderForCausalLM(blockformer.BlockformerDecoderConfig(**{**SIZES, **more})).eval()


def given(length, rows=2, groups=2, heads=3, keys=8, values=5, seed=0):
    """Queries, keys, values and decays of random tokens, and a state, in float64."""
    source = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=source)

    query, key = draw(2, rows, groups, length, keys)
    value, decay = draw(rows, groups, length, heads, values), -draw(rows, groups, length, heads).abs()
    return query, key, value, decay, draw(rows, groups, keys, heads, values)


def test_the_definition_is_the_equation_of_the_article():
    """h <- exp(d A) h + d B x, y = C h, written out for one head of one group."""
    query, key, value, decay, state = given(4, rows=1, groups=1, heads=1)
    outputs, last = scan_by_token(query, key, value, decay, state)
    hidden = state[0, 0, :, 0].T  # [V, K]
    for token in range(4):
        step = torch.outer(value[0, 0, token, 0], key[0, 0, token])
        hidden = decay[0, 0, token, 0].exp() * hidden + step
        assert_close(outputs[0, 0, token, 0], hidden @ query[0, 0, token], tolerance=1e-12)
    assert_close(last[0, 0, :, 0], hidden.T, tolerance=1e-12)


@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, LENGTH])
def test_chunks_give_outputs_state_and_gradients_of_the_definition(length):
    assert_chunks_follow(scan_by_token, scan_by_chunk, given(length))


@torch.no_grad()
def test_one_token_more_is_the_definition_too():
    assert_one_follows(scan_by_token, scan_of_one, given(1))


def test_sequences_of_a_row_do_not_see_each_other():
    assert_packed_texts_are_apart(scan_by_token, scan_by_chunk, given(LENGTH, rows=1))


def test_a_strong_decay_and_long_texts_stay_finite():
    query, key, value, decay, state = (each.float() for each in given(4 * CHUNK))
    for each in (0.0, -30.0, -1e4):
        found = scan_by_chunk(query, key, value, torch.full_like(decay, each), state)
        wanted = scan_by_token(query, key, value, torch.full_like(decay, each), state)
        assert_close([*found], [*wanted])


def test_a_fresh_layer_has_steps_and_rates_of_every_size():
    layer = model().model.layers[0].self_attn
    rates, steps = layer.A_log.exp(), torch.nn.functional.softplus(layer.dt_bias)
    assert 1 <= rates.min() < rates.max() <= 16
    assert steps.min() * 1.001 >= 0.001
    assert steps.max() <= 0.1001
    assert len(rates.unique()) == len(steps.unique()) == 6
    assert torch.equal(layer.D, torch.ones(6))


@torch.no_grad()
def test_steps_have_a_least_size_in_a_prompt_and_token_by_token(tmp_path):
    """Nemotron-H's class has one in a prompt only, so a cache of it continues otherwise than the text read whole."""
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    sizes |= {"num_key_value_heads": 1, "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 5}
    torch.manual_seed(0)
    config = NemotronHConfig(
        **sizes, n_groups=2, hybrid_override_pattern="M-*-", initializer_range=0.2, time_step_min=0.9
    )
    theirs = NemotronHForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    ours, ids = blockformer.from_official(tmp_path), token_ids(2, 20, vocab=97)
    assert ours.config.mamba_step_min == 0.9
    wanted = theirs(ids).logits
    assert_close(ours(ids).logits, wanted)
    cache = ours(ids[:, :18], use_cache=True).past_key_values
    steps = [ours(ids[:, place : place + 1], past_key_values=cache).logits for place in (18, 19)]
    assert_close(torch.cat(steps, dim=1), wanted[:, 18:])


@torch.no_grad()
def test_the_library_makes_caches_and_saves_configs_of_such_layers(tmp_path):
    """It knows them by the name that it has for all layers with a state."""
    a_model = model()
    config = a_model.config
    assert config.get_text_config() is config
    assert config.get_text_config(decoder=True).layer_types == ["linear_attention", "full_attention"]
    assert config.layer_types == ["state_space", "full_attention"]
    kinds = [type(layer).__name__ for layer in DynamicCache(config=config).layers]
    assert kinds == ["LinearAttentionLayer", "DynamicLayer"]
    a_model.save_pretrained(tmp_path)
    again = blockformer.BlockformerDecoderForCausalLM.from_pretrained(tmp_path)
    assert again.config.layer_types == config.layer_types
    ids = token_ids(2, 9, vocab=97)
    assert torch.equal(again(ids).logits, a_model(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("experts", [{}, {"num_experts": 4, "gated_mlp": False}], ids=["dense", "experts"])
def test_a_layer_without_a_network_is_one_whose_network_adds_nothing(experts):
    whole, ids = model(norm_placement="pre_output", **experts), token_ids(2, 9, vocab=97)
    whole.model.layers[0].mlp_output_norm.weight.zero_()
    less = model(norm_placement="pre_output", mlp_layers=[False, True], **experts)
    less.load_state_dict({name: each for name, each in whole.state_dict().items() if ".0.mlp" not in name})
    assert_close(less(ids).logits, whole(ids).logits)
    text = less.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(less.prepare_for_inference().generate(ids, max_new_tokens=4, do_sample=False), text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mlp_layers": [True]}, "mlp_layers must list a bool for each layer, not"),
        ({"mlp_layers": [1, 0]}, "mlp_layers must list a bool for each layer, not"),
        ({"mlp_layers": "all"}, "mlp_layers must list a bool for each layer, not 'all'"),
        ({"mlp_layers": 3}, "mlp_layers must list a bool for each layer, not 3"),
        ({"residual": "parallel"}, "mlp_layers is not supported with residual='parallel'"),
    ],
)
def test_networks_of_some_layers_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        blockformer.BlockformerDecoderConfig(**{**SIZES, "mlp_layers": [True, False], **fields})
