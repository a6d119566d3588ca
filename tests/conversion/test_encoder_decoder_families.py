"""Encoder-decoders after BART, a row of settings each: official checkpoint in, the same numbers and text, and back.

`make test` takes the first row of each family, `make exhaustive` all, and all heads.
"""

import pytest
import torch
import transformers
from packaging.version import Version
from pairs import assert_close

import blockformer
from blockformer.conversion.families.registry import FAMILIES

from .oracles import official_model
from .outputs import assert_same_outputs
from .rows import Row, assert_there_and_back, model_of, parameters

LIKE_BART = {
    "vocab_size": 131,
    "d_model": 32,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 64,
    "init_std": 0.3,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
GEMMA = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "sliding_window": 5,
    "initializer_range": 0.4, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 8.0,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
NARROW, WIDE = ({"decoder_ffn_dim": width} for width in (40, 72))
DEEPER = {**GEMMA, "query_pre_attn_scalar": 16, "final_logit_softcapping": None, "num_hidden_layers": 3}
FULL = {**GEMMA, "layer_types": ["full_attention"] * 2, "attn_logit_softcapping": None}
# A head of its own is drawn smaller by the root of the vocabulary.
UNTIED = {"tie_word_embeddings": False, "initializer_range": 5.0}
ROWS = [
    Row("t5gemma", {"encoder": GEMMA, "decoder": {**GEMMA, "num_hidden_layers": 3}}),
    Row("t5gemma", {"encoder": {**DEEPER, "num_hidden_layers": 2}, "decoder": DEEPER, **UNTIED}, shards=True),
    Row("t5gemma", {"encoder": FULL, "decoder": FULL}),
    Row("mvp"),
    Row("mvp", {"scale_embedding": True, "decoder_layers": 1, **NARROW}, shards=True),
    Row("plbart"),
    Row("plbart", {"scale_embedding": False, "decoder_layers": 1, **NARROW}, shards=True),
    Row("blenderbot", {"pad_token_id": 0, "bos_token_id": 1, **WIDE}),
    Row("blenderbot", {"scale_embedding": True, "encoder_layers": 1, "activation_function": "relu"}, shards=True),
    Row("pegasus", NARROW),
    Row("pegasus", {"scale_embedding": True, "pad_token_id": 0, "decoder_layers": 3, **WIDE}, shards=True),
    Row("m2m_100", WIDE),
    Row("fsmt", {"src_vocab_size": 131, "tgt_vocab_size": 140, **WIDE}),
    Row("fsmt", {"src_vocab_size": 131, "tgt_vocab_size": 131, "scale_embedding": False}, True),
    Row("m2m_100", {"scale_embedding": False, "pad_token_id": 3, "decoder_layers": 1}, shards=True),
]
FIRST = {row.family: row for row in reversed(ROWS)}


def batch(config):
    """Two sources, the second padded on the right, and what the decoder reads of them."""
    generator = torch.Generator().manual_seed(3)
    ids, target = (torch.randint(5, LIKE_BART["vocab_size"], (2, length), generator=generator) for length in (14, 9))
    mask = torch.ones_like(ids)
    ids[1, 9:], mask[1, 9:] = config.pad_token_id, 0
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": target}


@torch.no_grad()
def assert_same_model(ours, theirs):
    """Logits, those of a padded row like those of it alone, and text in two ways."""
    inputs = batch(ours.config)
    assert_same_outputs(ours, theirs, inputs, spread=0.3)
    alone = ours(inputs["input_ids"][1:, :9], decoder_input_ids=inputs["decoder_input_ids"][1:])
    assert_close(ours(**inputs).logits[1:], alone.logits)
    if theirs.config.model_type == "t5gemma" and Version(transformers.__version__) < Version("5.10"):
        pytest.skip("transformers 5.5.0's eager T5Gemma cannot search with beams")
    source = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    for way in ({}, {"num_beams": 3}):
        settings = {"max_new_tokens": 6, "do_sample": False, "decoder_start_token_id": 2, **way}
        assert torch.equal(*(model.generate(**source, **settings) for model in (ours, theirs)))


@pytest.mark.versions
@pytest.mark.parametrize("row", parameters(ROWS))
def test_there_and_back_with_the_same_numbers_and_text(tmp_path, row):
    theirs = model_of(row, LIKE_BART)
    if hasattr(theirs, "final_logits_bias"):
        theirs.final_logits_bias.normal_()
    computed = ["embed_positions.weight"] if row.family in ("pegasus", "fsmt") else []
    dst = assert_there_and_back(tmp_path, row, theirs, computed)
    theirs = FAMILIES[row.family].oracle.prepared(theirs)
    assert_same_model(blockformer.BlockformerEncoderDecoderForConditionalGeneration.from_pretrained(dst), theirs)


HEADS = [
    pytest.param(row, head, marks=pytest.mark.exhaustive)
    for name, row in FIRST.items()
    for family in (name, f"{name}-decoder") if family in FAMILIES
    for head in FAMILIES[family].heads if not head.official.endswith("ForConditionalGeneration")
]  # fmt: skip


@pytest.mark.versions
@pytest.mark.parametrize(("row", "head"), HEADS, ids=lambda value: getattr(value, "official", ""))
@torch.no_grad()
def test_the_other_heads(tmp_path, row, head):
    is_decoder = head.ours.startswith("BlockformerDecoder")
    theirs = model_of(row, LIKE_BART, head, **({"is_decoder": True} if is_decoder else {}))
    theirs.save_pretrained(tmp_path)
    ours = blockformer.from_official(tmp_path)
    assert type(ours).__name__ == head.ours
    inputs = batch(theirs.config)
    if is_decoder:
        inputs = {"input_ids": inputs["decoder_input_ids"], "encoder_hidden_states": torch.randn(2, 7, 32)}
    elif head.official.endswith("Classification"):
        inputs.pop("decoder_input_ids")
        inputs["input_ids"][0, -1] = inputs["input_ids"][1, 8] = 2
    assert_same_outputs(ours, theirs, inputs, spread=0.05)


OF_ROWS = [(row, head) for name, row in FIRST.items() if name in FAMILIES for head in FAMILIES[name].heads]
OF_OTHERS = [
    (Row(name), head)
    for name in ("t5", "mt5", "umt5", "marian", "bart", "mbart")
    for head in FAMILIES[name].heads
    if head.ours.startswith("BlockformerEncoderDecoder")
]


def told(run):
    """What a call returns, or None for an error."""
    try:
        return run()
    except (ValueError, RuntimeError):
        return None


@pytest.mark.versions
@pytest.mark.parametrize(("row", "head"), OF_ROWS + OF_OTHERS, ids=lambda value: getattr(value, "official", ""))
@torch.no_grad()
def test_a_call_with_only_a_source_works_where_it_does_officially(tmp_path, row, head):
    """BART's decoder then reads the source; that of T5 only does below a classifier or for questions."""
    usual = row in [each for each, _ in OF_ROWS]
    theirs = model_of(row, LIKE_BART, head) if usual else official_model(row.family, head.official)
    theirs.save_pretrained(tmp_path)
    ours = blockformer.from_official(tmp_path)
    source = {"input_ids": torch.tensor([[5, 7, 9, theirs.config.get_text_config().eos_token_id]])}
    expected = told(lambda: theirs(**source))
    if expected is None:
        with pytest.raises(ValueError, match="exactly one of decoder_input_ids and decoder_inputs_embeds, or labels"):
            ours(**source)
    else:
        assert_same_outputs(ours, theirs, source, spread=0.0)
