"""Rotary positions: every type against transformers, and a rotation for each layer type."""

import pytest
import torch
from pairs import assert_close, model, pair, token_ids
from sizes import THREE_LAYERS
from test_configuration_blockformer import ROPE_EXTRAS

import blockformer
from blockformer import BlockformerDecoderConfig, BlockformerDecoderForCausalLM
from blockformer.model.positions import rotate
from blockformer.model.rotary import ROPE_TYPES, RotaryPositions


def rope(rope_type):
    extras = dict(ROPE_EXTRAS[rope_type])
    if rope_type == "longrope":
        generator = torch.Generator().manual_seed(0)
        extras["short_factor"] = (1 + torch.rand(16, generator=generator)).tolist()
        extras["long_factor"] = (2 + torch.rand(16, generator=generator)).tolist()
    return {"rope_type": rope_type, "rope_theta": 10_000.0, **extras}


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
@pytest.mark.parametrize("length", [20, 100])
def test_every_rope_type_gives_the_logits_of_transformers(rope_type, length):
    """At 100 tokens the text is longer than the 64 of training, where some types change their frequencies."""
    sizes = {"max_position_embeddings": 64 if rope_type != "llama3" else 128}
    ours, theirs = pair("qwen3", rope_parameters=rope(rope_type), **sizes)
    ids = token_ids(2, length)
    assert_close(ours(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_a_long_text_leaves_no_trace_in_the_next_short_one(rope_type):
    ours = model("qwen3", rope_parameters=rope(rope_type), max_position_embeddings=64)
    short, long = token_ids(1, 20), token_ids(1, 100)
    before = ours(short).logits
    ours(long)
    assert torch.equal(ours(short).logits, before)


@pytest.mark.parametrize("rope_type", ["default", "dynamic", "longrope"])
def test_generated_text_with_rope_types(rope_type):
    ours, theirs = pair("qwen3", rope_parameters=rope(rope_type), max_position_embeddings=64)
    ids = token_ids(1, 40)
    arguments = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    assert torch.equal(ours.generate(ids, **arguments), theirs.generate(ids, **arguments))


def test_a_rotary_module_of_transformers_fails_in_place_of_ours():
    """Its sines have no signs, and would turn half of the channels the wrong way."""
    ours, theirs = pair("qwen3")
    ours.model.rotary_emb = theirs.model.rotary_emb
    with pytest.raises(IndexError, match="Dimension out of range"):
        ours(token_ids(1, 20))


def test_rotation_depends_on_distance_only():
    config = BlockformerDecoderConfig(hidden_size=64, num_attention_heads=4)
    rotary, query, key = RotaryPositions(config), torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def score(query_position, key_position):
        turned = [
            rotate(states, *rotary(states, torch.tensor([[position]])))
            for states, position in ((query, query_position), (key, key_position))
        ]
        return (turned[0] * turned[1]).sum()

    assert_close(score(3, 1), score(103, 101), at_least=(query.norm() * key.norm()).item())
    assert not torch.isclose(score(3, 1), score(3, 2))


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"full_attention": {}}, "need one dict for each of 'full_attention' and 'sliding_attention'"),
        ({"full_attention": {}, "sliding_attention": 1e4}, "of a layer type must be a dict, not 10000.0"),
        ({"full_attention": 5}, "need one dict for each of 'full_attention' and 'sliding_attention'"),
        ({"full_attention": 5, "sliding_attention": 7}, "of a layer type must be a dict, not 5"),
        ({"full_attention": {}, "sliding_attention": {"rope_type": "yarm"}}, "Did you mean 'yarn'?"),
        ({"full_attention": {}, "sliding_attention": {"rope_theta": 0}}, "rope_theta must be a positive number"),
    ],
)
def test_wrong_rotations_by_layer_type_are_refused(rope, message):
    types = ["sliding_attention", "full_attention", "full_attention"]
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        blockformer.BlockformerDecoderConfig(**THREE_LAYERS, layer_types=types, sliding_window=4, rope_parameters=rope)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (None, "rope_type must be one of default, linear, .*, not 'None'"),
        ({}, "rope_type must be one of default, linear, .*, not 'None'"),
        (5, "rope_parameters must be a dict, not 5"),
        ({"type": "linear", "factor": 2.0, "rope_theta": 500.0}, "rope_type must be one of .*, not 'None'"),
        ({"rope_type": "linear", "factor": 2.0}, "rope_parameters of type 'linear' need 'rope_theta': add it"),
        ({"rope_type": "linear", "rope_theta": 500.0}, "rope_parameters of type 'linear' need 'factor': add it"),
        (
            {"sliding_attention": {"rope_type": "default", "rope_theta": 500.0}},
            "rope_type must be one of .*, not 'None'",
        ),
    ],
)
def test_rotary_parameters_that_were_set_by_hand_must_be_whole(rope, message):
    """Defaults are filled in when a config is made; later, one of them would be another base than before."""
    types = ["sliding_attention", "full_attention", "full_attention"]
    config = blockformer.BlockformerDecoderConfig(**THREE_LAYERS, layer_types=types, sliding_window=4)
    config.rope_parameters = rope
    with pytest.raises(ValueError, match=message):
        blockformer.BlockformerDecoderModel(config)


def test_rotations_by_layer_type_have_defaults_and_leave_the_callers_dicts_alone():
    rope = {"full_attention": {"rope_type": "yarn", "factor": 2.0}}
    config = blockformer.BlockformerDecoderConfig(**THREE_LAYERS, rope_parameters=rope, rope_theta=500.0)
    assert rope == {"full_attention": {"rope_type": "yarn", "factor": 2.0}}
    settled = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 2.0, "original_max_position_embeddings": 64}
    assert config.rope_parameters == {"full_attention": settled}


def test_rotations_of_a_type_that_no_layer_has_are_left_out():
    rope = {"full_attention": {}, "sliding_attention": {"rope_theta": 500.0}}
    config = blockformer.BlockformerDecoderConfig(**THREE_LAYERS, rope_parameters=rope)
    assert config.rope_parameters == {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    with pytest.raises(ValueError, match="one dict for each of 'full_attention', not"):
        blockformer.BlockformerDecoderConfig(**THREE_LAYERS, rope_parameters={**rope, "sliding": {}})


@pytest.mark.parametrize("gone", ["full_attention", "sliding_attention"])
def test_a_model_without_its_layers_of_one_type_loads_again(tmp_path, gone):
    rope = {"full_attention": {"rope_theta": 500.0}, "sliding_attention": {}}
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = {"layer_types": types, "sliding_window": 4, "rope_parameters": rope, "initializer_range": 0.4}
    ours = BlockformerDecoderForCausalLM(BlockformerDecoderConfig(**THREE_LAYERS, **sizes)).eval()
    left = [layer for layer, layer_type in enumerate(types) if layer_type != gone]
    ours.model.layers = torch.nn.ModuleList(ours.model.layers[layer] for layer in left)
    ours.config.num_hidden_layers, ours.config.layer_types = len(left), [types[layer] for layer in left]
    ours.save_pretrained(tmp_path)
    again, ids = BlockformerDecoderForCausalLM.from_pretrained(tmp_path), token_ids(2, 20, vocab=97)
    assert list(again.config.rope_parameters) == ours.config.layer_types[:1]
    assert again.config.sliding_window == (None if gone == "sliding_attention" else 4)
    assert_close(again(ids).logits, ours(ids, use_cache=False).logits)
