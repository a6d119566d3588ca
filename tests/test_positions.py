"""Positions against their formulas and against transformers."""

import math

import pytest
import torch
from pairs import assert_close, model, pair, token_ids
from test_configuration import ROPE_EXTRAS
from transformers.models.t5.modeling_t5 import T5Attention

from blockformer import BlockformerDecoderConfig, BlockformerDecoderModel
from blockformer.positions import rotate
from blockformer.relative_bias import RelativeBias
from blockformer.relative_keys import RelativeKeys
from blockformer.rotary import ROPE_TYPES, RotaryPositions
from blockformer.sinusoidal import SinusoidalPositions


def rope(rope_type):
    extras = dict(ROPE_EXTRAS[rope_type])
    if rope_type == "longrope":
        generator = torch.Generator().manual_seed(0)
        extras["short_factor"] = (1 + torch.rand(16, generator=generator)).tolist()
        extras["long_factor"] = (2 + torch.rand(16, generator=generator)).tolist()
    return {"rope_type": rope_type, "rope_theta": 10_000.0, **extras}


@pytest.mark.parametrize("position_type", ["sinusoidal", "sinusoidal_halves"])
def test_sinusoids_follow_the_formula(position_type):
    """In float32, yet as exact at a far position as at a near one."""
    config = BlockformerDecoderConfig(hidden_size=10, num_attention_heads=2, head_dim=6, position_type=position_type)
    positions = [0, 1, 511, 5000, 16383]
    encoding = SinusoidalPositions(config)(torch.tensor([positions]))[0]
    for row, position in enumerate(positions):
        angles = [position / 10000 ** (2 * pair_index / 10) for pair_index in range(5)]
        sines, cosines = [math.sin(angle) for angle in angles], [math.cos(angle) for angle in angles]
        pairs = zip(sines, cosines, strict=True)
        expected = (
            sines + cosines if config.position_type == "sinusoidal_halves" else [x for pair in pairs for x in pair]
        )
        torch.testing.assert_close(encoding[row], torch.tensor(expected), atol=2e-6, rtol=0)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_frequencies_stay_in_float32_when_the_model_is_cast(dtype):
    ours = model("qwen3")
    exact = ours.model.rotary_emb.inv_freq.clone()
    ours.to(dtype)
    assert ours.model.embed_tokens.weight.dtype == dtype
    assert torch.equal(ours.model.rotary_emb.inv_freq, exact)
    assert torch.equal(ours.float().model.rotary_emb.inv_freq, exact)


@pytest.mark.parametrize("position_type", ["rotary", "sinusoidal", "sinusoidal_halves", "sinusoidal_inclusive"])
def test_computed_positions_are_right_after_loading(position_type, tmp_path):
    ours = model("qwen3", cls=BlockformerDecoderModel, position_type=position_type, **_no_rope(position_type))
    ours.save_pretrained(tmp_path)
    loaded = BlockformerDecoderModel.from_pretrained(tmp_path)
    ids = token_ids(2, 30)
    assert torch.equal(loaded(ids).last_hidden_state, ours(ids).last_hidden_state)
    with torch.device("meta"):
        empty = BlockformerDecoderModel(ours.config)
    empty.to_empty(device="cpu").load_state_dict(ours.state_dict())
    assert torch.equal(empty.eval()(ids).last_hidden_state, ours(ids).last_hidden_state)


def _no_rope(position_type):
    return {} if position_type == "rotary" else {"rope_parameters": None}


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (16, 40), (6, 10)])
def test_relative_buckets_are_those_of_t5(bidirectional, buckets, distance):
    config = BlockformerDecoderConfig(
        position_type="relative_bias",
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=distance,
    )
    distances = torch.arange(-300, 301)
    theirs = T5Attention._relative_position_bucket(distances, bidirectional, buckets, distance)
    assert torch.equal(RelativeBias(config, bidirectional).bucket(distances), theirs)


def test_relative_bias_of_a_cached_step_is_the_last_row():
    bias = RelativeBias(BlockformerDecoderConfig(position_type="relative_bias"), bidirectional=False)
    whole = bias(torch.arange(9), 9)
    assert whole.shape == (1, 8, 9, 9)
    assert torch.equal(bias(torch.tensor([8]), 9), whole[:, :, 8:])


@pytest.mark.parametrize("and_keys", [False, True])
def test_relative_keys_follow_the_formula(and_keys):
    """score[t, s] = q_t . e[t - s], and with keys also + k_s . e[t - s]; grouped heads share their key's term."""
    config = BlockformerDecoderConfig(
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=5,
        position_type="relative_key_query" if and_keys else "relative_key",
    )
    relative = RelativeKeys(config)
    query, key = torch.randn(2, 4, 3, 6), torch.randn(2, 2, 8, 6)
    query_positions = torch.tensor([5, 6, 7])
    scores = relative(query, key, query_positions)
    for head in range(4):
        for t in range(3):
            for s in range(8):
                distance = max(-4, min(4, int(query_positions[t]) - s))
                vector = relative.embedding.weight[distance + 4]
                expected = query[:, head, t] @ vector
                if and_keys:
                    expected = expected + key[:, head // 2, s] @ vector
                assert_close(scores[:, head, t, s], expected)


def test_left_padding_shifts_no_position():
    """Positions count tokens, so a row gives the same states however it is padded, for absolute positions too."""
    for position_type in ("learned", "sinusoidal", "sinusoidal_halves", "rotary", "relative_bias", "relative_key"):
        settings = {} if position_type == "rotary" else {"rope_parameters": None}
        ours = model("qwen3", cls=BlockformerDecoderModel, position_type=position_type, **settings)
        ids = token_ids(1, 7)
        padded = torch.cat((torch.zeros(1, 5, dtype=torch.long), ids), dim=1)
        mask = torch.cat((torch.zeros(1, 5, dtype=torch.long), torch.ones_like(ids)), dim=1)
        assert_close(ours(padded, mask).last_hidden_state[:, 5:], ours(ids).last_hidden_state)
