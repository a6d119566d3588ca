"""Vectors that layers take without a table of tokens, and a projection after the last norm."""

import pytest
import torch
from pairs import SIZES, assert_close, token_ids

import blockformer
from blockformer.publishing.repo_code import left_out

INPUTS = {"hidden_size_per_layer_input": 6, "token_input_table": False}


def config(**settings):
    return blockformer.BlockformerDecoderConfig(**{**SIZES, **settings})


def model(kind=blockformer.BlockformerDecoderModel, **settings):
    torch.manual_seed(0)
    return kind(config(**settings)).eval()


def test_without_a_table_the_vectors_are_the_projection_of_the_first_input():
    ours = model(**INPUTS, embedding_scale=2.0)
    assert ours.token_inputs.embed_tokens is None
    ids = token_ids(2, 9)
    states = 2.0 * ours.embed_tokens(ids)
    found = ours.token_inputs(None, states)
    projected = (states @ ours.token_inputs.projection.weight.T / 8).unflatten(-1, (3, 6))
    assert_close(found, projected * (projected.square().mean(-1, keepdim=True) + 1e-6).rsqrt())


def test_without_a_table_embeddings_do_as_well_as_tokens():
    ours, ids = model(**INPUTS), token_ids(2, 9)
    expected = ours(ids).last_hidden_state
    assert_close(ours(inputs_embeds=ours.embed_tokens(ids)).last_hidden_state, expected)
    ours.resize_token_embeddings(ours.config.vocab_size + 8)
    assert_close(ours(ids).last_hidden_state, expected)
    other = model(hidden_size_per_layer_input=6)
    with pytest.raises(ValueError, match="give input_ids in place of inputs_embeds"):
        other(inputs_embeds=other.embed_tokens(ids))


@pytest.mark.parametrize("size", [40, 64, 96])
def test_states_end_in_a_projection(size):
    ours, ids = model(final_projection_size=size), token_ids(2, 9)
    plain = model()
    missing, unexpected = plain.load_state_dict(ours.state_dict(), strict=False)
    assert (missing, unexpected) == ([], ["final_projection.weight"])
    assert_close(ours(ids).last_hidden_state, plain(ids).last_hidden_state @ ours.final_projection.weight.T)
    assert ours.config.output_size == size


@pytest.mark.parametrize("task", ["CausalLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"])
def test_heads_read_the_projected_states(task):
    ours = model(getattr(blockformer, f"BlockformerDecoderFor{task}"), final_projection_size=40)
    head = next(each for each in ("lm_head", "score", "qa_outputs") if hasattr(ours, each))
    assert getattr(ours, head).in_features == 40
    assert ours(token_ids(1, 9))[0].isfinite().all()


def test_a_writer_writes_the_same_prepared():
    ours, ids = model(blockformer.BlockformerDecoderForCausalLM, **INPUTS, final_projection_size=40), token_ids(2, 9)
    settings = {"max_new_tokens": 6, "do_sample": False}
    expected = ours.generate(ids, **settings)
    assert torch.equal(ours.prepare_for_inference().generate(ids, **settings), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"token_input_table": False}, "needs hidden_size_per_layer_input"),
        ({"final_projection_size": 40, "tie_word_embeddings": True}, "is not supported with tie_word_embeddings"),
        ({"final_projection_size": 40, "token_embedding_size": 20}, "is not supported with token_embedding_size"),
        ({"final_projection_size": 40, "num_nextn_predict_layers": 1}, "is not supported with num_nextn_predict_layer"),
        ({"final_projection_size": 0}, "must be a positive integer"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)


def test_only_a_repo_that_needs_them_has_their_code():
    assert "token_inputs" not in left_out(config(final_projection_size=40))
    assert "token_inputs" in left_out(config())
