"""The encoder: what it has that a decoder does not. Parity with official encoders stands in tests/conversion."""

import copy
import math
import re

import peft
import pytest
import torch
from pairs import assert_close, assert_gradients_close, keep_padding, token_ids
from test_unpadding import both, masked
from transformers import AutoModelForMaskedLM, EncoderDecoderModel

import blockformer
from blockformer import (
    BlockformerDecoderForCausalLM,
    BlockformerEncoderConfig,
    BlockformerEncoderForMaskedLM,
    BlockformerEncoderForMultipleChoice,
    BlockformerEncoderForNextSentencePrediction,
    BlockformerEncoderForPreTraining,
    BlockformerEncoderForSequenceClassification,
    BlockformerEncoderModel,
)

VOCAB, MIXED = 97, ["full_attention", "sliding_attention"]
DRY_ENCODER = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "initializer_range": 0.25,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def encoder(cls=BlockformerEncoderModel, name="bert", **overrides):
    torch.manual_seed(0)
    return cls(blockformer.preset(name, **{**DRY_ENCODER, **overrides})).eval()


def ids(batch, length, seed=0):
    return token_ids(batch, length, seed, vocab=VOCAB)


@pytest.mark.portable
@pytest.mark.parametrize("position_type", ["relative_key", "relative_key_query"])
def test_relative_keys_in_a_whole_layer_follow_the_formula(position_type):
    """softmax((q k + q e[t - s] (+ k e[t - s])) / sqrt(D)) v, written out for one post-norm layer."""
    ours = encoder(position_type=position_type, num_hidden_layers=1, max_position_embeddings=6)
    tokens, layer = ids(2, 9), ours.layers[0]
    states = ours.embedding_norm(ours.embed_tokens(tokens) + ours.embed_token_types.weight[0])
    attention, size = layer.self_attn, 12

    def heads(linear):
        return linear(states).view(2, 9, 4, size).transpose(1, 2)

    query, key, value = heads(attention.q_proj), heads(attention.k_proj), heads(attention.v_proj)
    scores = query @ key.transpose(2, 3)
    for t in range(9):
        for s in range(9):
            vector = attention.relative_keys.embedding.weight[max(-5, min(5, t - s)) + 5]
            scores[:, :, t, s] += query[:, :, t] @ vector
            if position_type == "relative_key_query":
                scores[:, :, t, s] += key[:, :, s] @ vector
    context = (scores / math.sqrt(size)).softmax(-1) @ value
    context = context.transpose(1, 2).reshape(2, 9, 48)
    states = layer.self_attn_post_norm(states + attention.o_proj(context))
    inner = layer.mlp.down_proj(torch.nn.functional.gelu(layer.mlp.up_proj(states)))
    expected = layer.mlp_post_norm(states + inner)
    assert_close(ours(tokens).last_hidden_state, expected)


@pytest.mark.portable
@pytest.mark.parametrize("chunk", [1, 4, 7, 100])
@pytest.mark.parametrize("gated", [False, True])
def test_chunked_feed_forward(chunk, gated):
    settings = {"gated_mlp": gated, "initializer_range": 0.1}
    whole, chunked = encoder(**settings), encoder(**settings, chunk_size_feed_forward=chunk)
    tokens = ids(2, 13)
    assert_close(chunked(tokens).last_hidden_state, whole(tokens).last_hidden_state, tolerance=1e-6)


@pytest.mark.portable
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_head_mask_silences_a_head(backend):
    ours, head_mask = encoder(), torch.ones(2, 4)
    ours.set_attn_implementation(backend)
    head_mask[0, 1] = 0
    tokens, mask = ids(2, 9), masked([9, 5], 9)
    silenced = ours(tokens, mask, head_mask=head_mask).last_hidden_state
    assert not torch.allclose(silenced, ours(tokens, mask).last_hidden_state)
    with torch.no_grad():
        ours.layers[0].self_attn.v_proj.weight[12:24] = 0
        ours.layers[0].self_attn.v_proj.bias[12:24] = 0
    expected = ours(tokens, mask).last_hidden_state
    assert_close(silenced[mask.bool()], expected[mask.bool()])


@torch.no_grad()
@pytest.mark.parametrize(
    "stance", ["force_eager", pytest.param("default", id="compiled", marks=pytest.mark.exhaustive)]
)
def test_flex_attention_agrees(stance):
    with torch.compiler.set_stance(stance):
        flex_agrees()


def flex_agrees():
    ours, tokens = encoder(head_dim=16), ids(2, 9)  # torch 2.6 has it for powers of two only
    expected = ours(tokens).last_hidden_state
    ours.set_attn_implementation("flex_attention")
    head_mask = torch.ones(2, 4)
    head_mask[1, 3] = 0
    assert_close(ours(tokens).last_hidden_state, expected)
    silenced = ours(tokens, head_mask=head_mask).last_hidden_state
    ours.set_attn_implementation("sdpa")
    assert_close(silenced, ours(tokens, head_mask=head_mask).last_hidden_state)


def test_every_token_sees_the_whole_text():
    ours, tokens = encoder(), ids(1, 9)
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % VOCAB
    first = ours(tokens).last_hidden_state[0, 0]
    assert not torch.allclose(first, ours(changed).last_hidden_state[0, 0])


@pytest.mark.portable
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("position_type", ["learned", "rotary", "relative_bias", "relative_key"])
def test_padded_batches_equal_single_runs(position_type, side, monkeypatch):
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}} if position_type == "rotary" else {}
    ours = encoder(position_type=position_type, **rope)
    mask = masked([11, 3, 7], 11, side)
    tokens = ids(3, 11)
    packed, padded = both(ours, monkeypatch, tokens, mask)
    for row in range(3):
        real = mask[row].bool()
        single = ours(tokens[row : row + 1, real]).last_hidden_state[0]
        assert_close(packed.last_hidden_state[row, real], single)
        assert_close(padded.last_hidden_state[row, real], single)


@pytest.mark.portable
@pytest.mark.parametrize("is_padded", [True, False])
@pytest.mark.parametrize("position_type", ["learned", "relative_bias"])
def test_several_sequences_in_a_row_do_not_see_each_other(position_type, is_padded, monkeypatch):
    if is_padded:
        keep_padding(monkeypatch)
    ours = encoder(position_type=position_type).prepare_for_training()
    lengths = [4, 6, 1]
    sequences = [ids(1, length, seed) for seed, length in enumerate(lengths)]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    row = ours(torch.cat(sequences, dim=1), position_ids=positions).last_hidden_state
    for part, sequence in zip(row.split(lengths, dim=1), sequences, strict=True):
        assert_close(part, ours(sequence).last_hidden_state)


def test_training_on_a_padded_batch_gives_the_padded_gradients(monkeypatch):
    ours = encoder(BlockformerEncoderForMaskedLM).train()
    mask = masked([10, 2, 5], 10)
    tokens = ids(3, 10)
    labels = tokens.masked_fill(mask == 0, -100)
    losses = both(ours, monkeypatch, tokens, mask, labels=labels)
    names, parameters = zip(*ours.model.layers.named_parameters(), strict=True)
    gradients = [dict(zip(names, torch.autograd.grad(outputs.loss, parameters), strict=True)) for outputs in losses]
    assert_gradients_close(*gradients)


def unrolled(shared):
    """The same encoder with a layer for each pass, and where the weights of each pass stand in the shared one."""
    config = copy.deepcopy(shared.config)
    config.num_hidden_groups = None
    plain, passes = BlockformerEncoderModel(config).eval(), config.num_hidden_layers // len(shared.layers)
    names = {
        name: re.sub(r"^layers\.(\d+)", lambda place: f"layers.{int(place[1]) // passes}", name)
        for name in plain.state_dict()
    }
    plain.load_state_dict({name: shared.state_dict()[source] for name, source in names.items()})
    return plain, names


def test_layers_that_share_weights_are_passed_one_after_the_other(monkeypatch):
    settings = {"num_hidden_layers": 4, "num_hidden_groups": 2, "embedding_size": 24}
    shared = encoder(name="albert", **settings)
    plain, names = unrolled(shared)
    tokens, mask = ids(3, 11), masked([11, 3, 7], 11)
    for outputs in zip(both(shared, monkeypatch, tokens, mask), both(plain, monkeypatch, tokens, mask), strict=True):
        assert torch.equal(*[each.last_hidden_state for each in outputs])
    shared.set_attn_implementation("eager")
    plain.set_attn_implementation("eager")
    seen = [model(tokens, mask, output_hidden_states=True, output_attentions=True) for model in (shared, plain)]
    assert (len(seen[0].hidden_states), len(seen[0].attentions)) == (5, 4)
    for name in ("hidden_states", "attentions"):
        assert all(map(torch.equal, *[each[name] for each in seen]))

    gradients = []
    for model, checkpoints in ((shared, False), (shared, True), (plain, False)):
        model.gradient_checkpointing_enable() if checkpoints else model.gradient_checkpointing_disable()
        model.train().zero_grad()
        model(tokens, mask).last_hidden_state.square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters() if "pooler" not in name})
    sums: dict = {}
    for name, gradient in gradients.pop().items():
        sums[names[name]] = sums.get(names[name], 0) + gradient
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in sums)
    assert_gradients_close(gradients[0], sums)


def test_what_reads_each_layer_finds_shared_ones_once():
    shared = encoder(name="albert", num_hidden_layers=4, embedding_size=24)
    with pytest.raises(ValueError, match="head_mask must have 1 rows, one for each layer, not 4"):
        shared(ids(1, 5), head_mask=torch.ones(4, 4))
    silenced = shared(ids(1, 5), head_mask=torch.tensor([[1.0, 0.0, 1.0, 1.0]])).last_hidden_state
    prepared, before = copy.deepcopy(shared).to(torch.bfloat16).prepare_for_inference(), shared(ids(2, 9))[0]
    assert_close(prepared(ids(2, 9))[0].float(), before, tolerance=0.05)
    adapted = peft.get_peft_model(shared, peft.LoraConfig(init_lora_weights=False))
    found = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert found
    assert all(".layers.0." in name for name in found)
    merged, changed = copy.deepcopy(adapted).merge_and_unload(), adapted(ids(2, 9))[0]
    assert_close(merged(ids(2, 9))[0], changed)
    assert not torch.allclose(changed, before)
    with torch.no_grad():
        merged = adapted.unload()
        merged.layers[0].self_attn.v_proj.weight[12:24] = 0
        merged.layers[0].self_attn.v_proj.bias[12:24] = 0
    assert_close(merged(ids(1, 5)).last_hidden_state, silenced)


def test_token_types_choose_their_vector():
    ours, tokens = encoder(), ids(1, 6)
    types = torch.tensor([[0, 0, 0, 1, 1, 1]])
    base = ours(tokens).last_hidden_state
    assert torch.equal(ours(tokens, token_type_ids=torch.zeros_like(types)).last_hidden_state, base)
    assert not torch.allclose(ours(tokens, token_type_ids=types).last_hidden_state, base)
    with pytest.raises(ValueError, match="holds 2, and type_vocab_size is 2"):
        ours(tokens, token_type_ids=types * 2)
    with pytest.raises(ValueError, match=r"token_type_ids must be \[batch=1, length=6\]"):
        ours(tokens, token_type_ids=types[:, :4])
    without = encoder(name="distilbert")
    without(tokens, token_type_ids=torch.zeros_like(types))
    with pytest.raises(ValueError, match="and type_vocab_size is 0"):
        without(tokens, token_type_ids=types)


def test_what_an_encoder_config_refuses():
    with pytest.raises(ValueError, match="add_cross_attention=True needs a decoder"):
        BlockformerEncoderConfig(add_cross_attention=True)
    with pytest.raises(ValueError, match="is_decoder=True contradicts BlockformerEncoderConfig"):
        BlockformerEncoderConfig(is_decoder=True)
    for settings, message in (
        ({"num_hidden_layers": 4, "num_hidden_groups": 3}, r"num_hidden_layers \(4\) must be a multiple"),
        ({"num_hidden_groups": 0}, "num_hidden_groups must be a positive integer"),
        ({"num_hidden_groups": 1, "first_attention_norm": False}, "layers that share all settings"),
        ({"num_hidden_groups": 1, "layer_types": MIXED, "sliding_window": 4}, "layers that share all settings"),
    ):
        with pytest.raises(ValueError, match=message):
            BlockformerEncoderConfig(**{"num_hidden_layers": 2, **settings})


def test_the_position_offset_leaves_rows_of_the_table_alone():
    ours = encoder(name="roberta")
    assert ours.embed_positions.weight.shape[0] == 42
    tokens = ids(1, 40)
    before = ours(tokens).last_hidden_state
    with torch.no_grad():
        ours.embed_positions.weight[:2] = 1e3
    assert torch.equal(ours(tokens).last_hidden_state, before)
    with pytest.raises(ValueError, match="the table of learned positions has 40"):
        ours(ids(1, 41))


def test_masked_lm_head_is_tied_and_has_its_own_bias(tmp_path):
    ours = encoder(BlockformerEncoderForMaskedLM)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    with torch.no_grad():
        ours.lm_head.bias.normal_()
    ours.save_pretrained(tmp_path)
    again = AutoModelForMaskedLM.from_pretrained(tmp_path)
    tokens = ids(2, 7)
    assert torch.equal(again(tokens).logits, ours(tokens).logits)


@pytest.mark.portable
def test_pre_training_is_the_sum_of_its_two_tasks():
    ours = encoder(BlockformerEncoderForPreTraining)
    masked_lm, next_sentence = (
        encoder(cls) for cls in (BlockformerEncoderForMaskedLM, BlockformerEncoderForNextSentencePrediction)
    )
    for part in (masked_lm, next_sentence):
        part.load_state_dict({name: ours.state_dict()[name] for name in part.state_dict()})
    tokens, labels, order = ids(3, 8), ids(3, 8, seed=1), torch.tensor([0, 1, 0])
    outputs = ours(tokens, labels=labels, next_sentence_label=order)
    assert_close(outputs.loss, masked_lm(tokens, labels=labels).loss + next_sentence(tokens, labels=order).loss)
    assert outputs.prediction_logits.shape == (3, 8, VOCAB)
    assert outputs.seq_relationship_logits.shape == (3, 2)


@pytest.mark.portable
def test_multiple_choice_scores_each_choice_by_itself():
    ours = encoder(BlockformerEncoderForMultipleChoice)
    tokens = torch.stack([ids(3, 6, seed) for seed in (0, 1)])  # [2, 3, 6]
    outputs = ours(tokens, attention_mask=torch.ones_like(tokens), labels=torch.tensor([2, 0]))
    assert outputs.logits.shape == (2, 3)
    alone = ours(tokens[1:, 2:]).logits
    assert_close(outputs.logits[1:, 2:], alone)
    outputs.loss.backward()


@pytest.mark.portable
def test_without_a_pooler_the_first_token_is_the_summary():
    ours = encoder(BlockformerEncoderForSequenceClassification, pooler_act=None, num_labels=3)
    assert ours.model.pooler is None
    tokens = ids(2, 5)
    states = ours.model(tokens).last_hidden_state
    assert_close(ours(tokens).logits, ours.score(states[:, 0]))
    assert encoder(pooler_act=None)(tokens).pooler_output is None


@pytest.mark.versions
def test_two_halves_of_an_encoder_decoder_model():
    """Of transformers' `EncoderDecoderModel`: cross keys are projected once, and the text is that without a cache."""
    source = encoder(pooler_act=None)
    target = encoder(BlockformerDecoderForCausalLM, "bert-decoder", add_cross_attention=True)
    both_halves = EncoderDecoderModel(encoder=source, decoder=target).eval()
    both_halves.config.decoder_start_token_id, both_halves.config.pad_token_id = 3, 0
    both_halves.generation_config.update(decoder_start_token_id=3, pad_token_id=0, eos_token_id=None, bos_token_id=3)
    tokens, mask = ids(2, 9), masked([9, 6], 9)
    projections = []
    for layer in target.model.layers:
        layer.cross_attn.k_proj.register_forward_hook(lambda *_: projections.append(1))
    arguments = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    cached = both_halves.generate(tokens, use_cache=True, **arguments)
    assert len(projections) == 2
    assert torch.equal(cached, both_halves.generate(tokens, use_cache=False, **arguments))
    assert both_halves(tokens, mask, labels=ids(2, 5, seed=1)).loss.isfinite()
