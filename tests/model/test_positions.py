"""Positions: computed ones are exact after a cast and after loading, and padding has its official ones."""

import pytest
import torch
import transformers
from pairs import assert_close, model, pair, token_ids

import blockformer
from blockformer import BlockformerDecoderConfig, BlockformerDecoderModel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_frequencies_stay_in_float32_when_the_model_is_cast(dtype):
    ours = model("qwen3")
    exact = ours.model.rotary_emb.inv_freq.clone()
    ours.to(dtype)
    assert ours.model.embed_tokens.weight.dtype == dtype
    assert torch.equal(ours.model.rotary_emb.inv_freq, exact)
    assert torch.equal(ours.float().model.rotary_emb.inv_freq, exact)


@pytest.mark.parametrize("change", ["to", "double", "share_memory"])
@torch.no_grad()
def test_frequencies_that_a_user_has_changed_stay_through_casts_and_moves(change):
    """Positions interpolated by hand, as one stretches a context; `to("cpu")` moves nothing."""
    ours, theirs = pair("llama")
    ids = token_ids(2, 12)
    before = ours(ids).logits
    for each in (ours, theirs):
        each.model.rotary_emb.inv_freq /= 4
        each.to("cpu") if change == "to" else getattr(each, change)()
    assert_close(ours(ids).logits, theirs(ids).logits)
    assert not torch.allclose(before, ours.float()(ids).logits, atol=1e-2)


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


SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 24, "initializer_range": 0.3, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "init_std": 0.3, "decoder_start_token_id": 2}
OFFICIAL = {
    "BertModel": {},
    "RobertaModel": {"type_vocab_size": 1},
    "MPNetModel": {},
    "EsmModel": {"position_embedding_type": "absolute", "mask_token_id": 4},
    "ModernBertModel": {"local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 3, "sep_token_id": 4},
    "Qwen3Model": {"num_key_value_heads": 2, "head_dim": 8},
    "GPT2Model": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 24},
    "OPTModel": {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3},
    "XGLMModel": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "init_std": 0.3},
    "BartModel": BART,
    "M2M100Model": BART,
}


@pytest.mark.parametrize("given", ["padded", "padded, no mask", "padding inside", "padding inside, no mask"])
@pytest.mark.parametrize("name", OFFICIAL)
@torch.no_grad()
def test_padding_has_the_positions_of_the_official_class(name, given, tmp_path):
    """So all states of a batch that is padded on the right are equal, and a text may hold the padding token."""
    official = getattr(transformers, name)
    theirs = official(official.config_class(**SIZES | OFFICIAL[name])).eval()
    for weight in theirs.parameters():
        weight += 0.1 * torch.randn_like(weight)
    theirs.save_pretrained(tmp_path)
    ours = blockformer.from_official(tmp_path).eval()
    ids = torch.randint(5, 61, (3, 12))
    mask = (torch.arange(12) < torch.tensor([12, 5, 9])[:, None]).long()
    if given.startswith("padded"):
        ids = ids.masked_fill(mask == 0, 1)
    else:
        ids[0, 4], ids[1, 6], mask = 1, 1, torch.ones_like(mask)
    inputs = {"input_ids": ids} if "no mask" in given else {"input_ids": ids, "attention_mask": mask}
    if ours.config.is_encoder_decoder:
        inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": inputs.get("attention_mask")}
    found, expected = ours(**inputs)[0], theirs(**inputs)[0]
    if name == "EsmModel":  # which makes the vectors of padding zero
        found, expected = found[mask.bool()], expected[mask.bool()]
    assert_close(found, expected)


def test_a_text_by_tokens_goes_on_from_a_cache(tmp_path):
    config = transformers.M2M100Config(**SIZES | BART)
    theirs = transformers.M2M100ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = blockformer.from_official(tmp_path).eval()
    ids = torch.randint(5, 61, (2, 9))
    start = torch.tensor([[2, 7, 1, 9], [2, 8, 9, 10]])  # the first text holds the padding token
    for beams in (1, 2):
        given = {"decoder_input_ids": start, "num_beams": beams, "max_new_tokens": 8, "min_new_tokens": 8}
        assert torch.equal(ours.generate(ids, **given), theirs.generate(ids, **given))


@pytest.mark.parametrize(
    "settings",
    [{"position_type": "rotary"}, {"position_type": "learned"}, {"position_type": "none", "position_offset": 2}],
)
@pytest.mark.parametrize("padding_position", ["before", "by_token"])
def test_a_position_before_the_first_needs_a_row_of_its_own(padding_position, settings):
    with pytest.raises(ValueError, match="needs learned or sinusoidal positions and position_offset of 1 or more"):
        BlockformerDecoderConfig(padding_position=padding_position, **settings)
