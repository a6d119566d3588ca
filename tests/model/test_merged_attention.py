"""A decoder whose layers see their own tokens and the encoder's states at once, and what comes with it.

That it is transformers' is tested by the family that has it (`conversion/test_t5gemma2.py`).
"""

import pytest
import torch
from pairs import assert_close, assert_gradients_close
from transformers import StaticCache

import blockformer
from blockformer.model.merged_attention import MergedAttention, merged_mask

FULL, SLIDING = "full_attention", "sliding_attention"
SETTINGS = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": [SLIDING, FULL],
    "sliding_window": 4,
    "qk_norm": True,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "merged_attention": True,
    "centered_window": True,
    "embedding_scale": 3.0,
    "scales_in_embedding": True,
    "unscaled_token_id": 7,
    "tie_word_embeddings": True,
}
SCALED = ("embedding_scale", "scales_in_embedding", "unscaled_token_id")


def model_of(**changes):
    config = blockformer.BlockformerEncoderDecoderConfig(**SETTINGS | changes)
    torch.manual_seed(0)
    model = blockformer.BlockformerEncoderDecoderForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def texts(length=9):
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randint(1, 61, (2, size), generator=generator) for size in (12, length))
    source[0, 3] = target[1, 2] = 7
    mask = torch.ones_like(source)
    mask[1, 8:] = 0
    return {"input_ids": source, "attention_mask": mask, "decoder_input_ids": target}


@torch.no_grad()
def test_a_layer_is_one_softmax_over_both():
    attention = MergedAttention(model_of().config, 1, is_causal=True).eval()
    states, source = torch.randn(1, 5, 32), torch.randn(1, 3, 32)
    heads = {name: getattr(attention, f"{name}_proj") for name in "qkv"}
    both = torch.cat((states, source), dim=1)
    query = attention.q_norm(heads["q"](states).view(5, 4, 8)).transpose(0, 1)
    key = attention.k_norm(heads["k"](both).view(8, 2, 8)).transpose(0, 1).repeat_interleave(2, dim=0)
    value = heads["v"](both).view(8, 2, 8).transpose(0, 1).repeat_interleave(2, dim=0)
    visible = torch.cat((torch.ones(5, 5).tril(), torch.ones(5, 3)), dim=1).bool()
    weights = (query @ key.mT * 8**-0.5).masked_fill(~visible, -torch.inf).softmax(-1)
    wanted = attention.o_proj((weights @ value).transpose(0, 1).reshape(1, 5, 32))
    assert_close(attention(states, visible[None, None], source)[0], wanted)


@torch.no_grad()
def test_a_window_is_centered():
    for window in (4, 5):
        config = blockformer.BlockformerEncoderDecoderConfig(**SETTINGS | {"sliding_window": window})
        encoder = blockformer.BlockformerEncoderDecoderModel(config).encoder
        encoder.set_attn_implementation("eager")
        seen = encoder(torch.arange(1, 13)[None], output_attentions=True).attentions[0][0].sum(0) > 0
        steps = torch.arange(12)[None] - torch.arange(12)[:, None]
        assert torch.equal(seen, (steps >= -((window - 1) // 2)) & (steps <= window // 2))


@torch.no_grad()
def test_one_token_has_a_vector_of_its_own_which_both_sides_share(tmp_path):
    model = model_of()
    table = model.get_input_embeddings()
    ids = torch.tensor([[5, 7, 7, 9]])
    wanted = table.weight[ids] * 3.0
    wanted[0, 1:3] = table.unscaled
    assert torch.equal(table(ids), wanted)
    assert model.get_decoder().embed_tokens.unscaled is table.unscaled
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.get_decoder().embed_tokens.unscaled is again.get_input_embeddings().unscaled
    assert torch.equal(again(**texts()).logits, model(**texts()).logits)
    fresh = model_of(initializer_range=None, share_embeddings=False, tie_word_embeddings=False)
    assert fresh.get_decoder().embed_tokens.unscaled is not fresh.get_input_embeddings().unscaled


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_cache_and_padding_change_nothing(attention):
    model, inputs = model_of(), texts()
    model.set_attn_implementation(attention)
    whole = model(**inputs, use_cache=False).logits
    first = model(**{**inputs, "decoder_input_ids": inputs["decoder_input_ids"][:, :4]}, use_cache=True)
    kept = {"encoder_outputs": (first.encoder_last_hidden_state,), "past_key_values": first.past_key_values}
    logits = [first.logits]
    for part in (slice(4, 7), slice(7, 8), slice(8, 9)):
        given = {"decoder_input_ids": inputs["decoder_input_ids"][:, part], "attention_mask": inputs["attention_mask"]}
        logits.append(model(**given, **kept).logits)
    assert_close(torch.cat(logits, dim=1), whole)
    alone = model(input_ids=inputs["input_ids"][1:, :8], decoder_input_ids=inputs["decoder_input_ids"][1:]).logits
    assert_close(whole[1:], alone)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    padded = model(**inputs, decoder_attention_mask=mask).logits
    shorter = model(input_ids=inputs["input_ids"][:1], decoder_input_ids=inputs["decoder_input_ids"][:1, 3:]).logits
    assert_close(padded[:1, 3:], shorter)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}, {"prepared": True}])
def test_text_is_the_same_however_it_is_written(options):
    model, inputs = model_of(), texts()
    given = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    settings = {"max_new_tokens": 12, "do_sample": False, "num_beams": options.get("num_beams", 1)}
    wanted = model.generate(**given, **settings, use_cache=False)
    if options == {"prepared": True}:
        model.prepare_for_inference()
        options = {}
    assert torch.equal(model.generate(**given, **settings | options), wanted)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradients_are_the_same_with_checkpointing(use_reentrant):
    gradients = []
    for checkpoints in (False, True):
        model = model_of().train()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model(**texts(), labels=texts()["decoder_input_ids"]).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert_gradients_close(*gradients)


@torch.no_grad()
def test_the_probabilities_of_both_are_told_apart():
    model = model_of()
    model.set_attn_implementation("eager")
    outputs = model(**texts(), output_attentions=True)
    assert [each.shape for each in outputs.decoder_attentions] == [(2, 4, 9, 9)] * 2
    assert [each.shape for each in outputs.cross_attentions] == [(2, 4, 9, 12)] * 2
    for own, source in zip(outputs.decoder_attentions, outputs.cross_attentions, strict=True):
        assert_close(own.sum(-1) + source.sum(-1), torch.ones(2, 4, 9))


def test_masks_are_joined_in_every_form():
    hides = torch.tensor([[True, True, False]])[None, None]
    assert merged_mask(None, None, (1, 5, 3), "cpu") is None
    assert merged_mask(None, hides, (1, 2, 3), "cpu").tolist() == [[[[True, True, True, True, False]]]]
    both = merged_mask(None, None, (2, 2, 1), "cpu")
    assert both.tolist() == [[[[True, False, True], [True, True, True]]]]
    added = merged_mask(torch.zeros(2, 1, 2, 2), None, (2, 2, 1), "cpu")
    assert added.shape == (2, 1, 2, 3)
    assert not added.any()
    least = torch.finfo(torch.float32).min
    assert merged_mask(None, torch.zeros(1, 1, 1, 1), (2, 2, 1), "cpu").tolist() == [[[[0, least, 0], [0, 0, 0]]]]


REFUSED = [
    ({"position_type": "relative_bias", "sliding_window": None, "layer_types": None}, "position_type='relative_bias'"),
    ({"clip_qkv": 3.0}, "merged_attention is not supported with clip_qkv=3.0: leave one of the two out"),
    ({"sliding_window": None, "layer_types": None}, "centered_window needs sliding_window"),
    ({"unscaled_token_id": 61}, "unscaled_token_id must be a token from 1 to 60, not 61"),
    ({"unscaled_token_id": 0}, "unscaled_token_id must be a token from 1 to 60, not 0"),
    ({"scales_in_embedding": False}, "unscaled_token_id needs embedding_scale and scales_in_embedding"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_does_not_fit_together_is_refused(changes, message):
    settings = SETTINGS | changes
    if "centered" not in message and settings["sliding_window"] is None:
        settings |= {"centered_window": False}
    with pytest.raises(ValueError, match=message):
        blockformer.BlockformerEncoderDecoderConfig(**settings)


def test_what_it_cannot_follow_is_refused():
    model = model_of()
    with pytest.raises(ValueError, match="cross_attn_head_mask needs cross-attention, which merged_attention"):
        model(**texts(), cross_attn_head_mask=torch.ones(2, 4))
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2' does not support a centered_window of an encoder"):
        model(**texts())
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="'flex_attention' does not support a decoder with merged_attention"):
        MergedAttention(model.config, 0, is_causal=True)


@torch.no_grad()
def test_a_static_cache_of_its_own_tokens():
    model, inputs = model_of(), texts()
    wanted = model(**inputs, use_cache=False).logits
    cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=16)
    assert_close(model(**inputs, past_key_values=cache, use_cache=True).logits, wanted)


def test_no_step_is_compiled():
    with pytest.raises(ValueError, match="compile=True is not supported with merged_attention=True: prepare the model"):
        model_of().prepare_for_inference(compile=True)
