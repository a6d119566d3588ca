"""Which token a classifier of a decoder or an encoder-decoder reads: the one that the official class finds."""

import copy

import pytest
import torch
import transformers
from pairs import assert_close

import blockformer

PAD, END = 3, 5
SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 40, "initializer_range": 0.3, "num_labels": 3, "bos_token_id": 0, "eos_token_id": END,
    "pad_token_id": PAD,
}  # fmt: skip
BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "init_std": 0.3, "decoder_start_token_id": END}
OFFICIAL = {
    "LlamaForSequenceClassification": {"num_key_value_heads": 2},
    "GPTNeoXForSequenceClassification": {},
    "OPTForSequenceClassification": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "BartForSequenceClassification": BART,
    "T5ForSequenceClassification": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    | {"decoder_start_token_id": PAD},
}
DECODERS = [name for name in OFFICIAL if name not in ("BartForSequenceClassification", "T5ForSequenceClassification")]


@pytest.fixture(scope="module")
def pairs_of(tmp_path_factory):
    """A function from an official class and its padding token to a small model of it and ours of the same weights."""
    made = {}

    def pair(name, pad=PAD):
        if (name, pad) not in made:
            torch.manual_seed(0)
            official = getattr(transformers, name)
            theirs = official(official.config_class(**{**SIZES, **OFFICIAL[name], "pad_token_id": pad})).eval()
            folder = tmp_path_factory.mktemp(name)
            theirs.save_pretrained(folder)
            made[name, pad] = blockformer.from_official(folder).eval(), theirs
        return copy.deepcopy(made[name, pad])

    return pair


# Tokens and mask; P is the padding token, E the end token, the others are letters.
BATCHES = {
    "a text that ends in the end token": ["abcdE 11111"],
    "padded on the right": ["abcdE 11111", "fgEPP 11100", "hiPPP 11000"],
    "padded on the left": ["abcdE 11111", "PPfgE 00111", "PPPhi 00011"],
    "the padding token inside": ["abPdE 11111", "fPPgP 11110"],
    "nothing but padding tokens": ["PPPPP 11111", "fghia 11111"],
    "masked tokens that are no padding tokens": ["abcdf 11100", "fghia 11111"],
    "no mask": ["abcdE", "fgEPP"],
}


def batch_of(rows, pad):
    numbers = {"P": PAD if pad is None else pad, "E": END}
    texts, *masks = zip(*(row.split() for row in rows), strict=True)
    ids = torch.tensor([[numbers.get(letter, 7 + 5 * (ord(letter) - 97)) for letter in text] for text in texts])
    mask = [[int(number) for number in row] for row in masks[0]] if masks else None
    return {"input_ids": ids} | ({"attention_mask": torch.tensor(mask)} if mask else {})


@pytest.mark.parametrize("pad", [PAD, END, None])
@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_reads_the_token_of_the_official_class(name, case, pad, pairs_of):
    ours, theirs = pairs_of(name, pad)
    batches = [batch_of(BATCHES[case], pad)]
    if pad is None:  # a row at a time
        batches = [{key: each[row : row + 1] for key, each in batches[0].items()} for row in range(len(BATCHES[case]))]
    for batch in batches:
        assert_close(ours(**batch).logits, theirs(**batch).logits)
        learning = ours.train()(**batch, labels=torch.zeros(len(batch["input_ids"]), dtype=torch.long))
        ours.eval()
        assert_close(learning.logits, theirs(**batch).logits)


@pytest.mark.parametrize("case", ["a text that ends in the end token", "padded on the right", "padded on the left"])
@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "GPTNeoXForSequenceClassification"])
def test_embeddings_end_with_their_last_place(name, case, pairs_of, caplog):
    ours, theirs = pairs_of(name)
    batch, logits = batch_of(BATCHES[case], PAD), []
    ids = batch.pop("input_ids")
    transformers.utils.logging.warning_once.cache_clear()
    transformers.utils.logging.enable_propagation()
    try:
        for model in (theirs, ours):
            caplog.clear()
            logits.append(model(inputs_embeds=model.get_input_embeddings()(ids), **batch).logits)
    finally:
        transformers.utils.logging.disable_propagation()
    assert_close(logits[1], logits[0])
    assert ("Pad embeddings on the left" in caplog.text) == (case == "padded on the right")


def test_rows_without_a_padding_token_end_where_the_mask_says(pairs_of):
    """The official classes refuse them."""
    ours, theirs = pairs_of("LlamaForSequenceClassification", None)
    batch = batch_of(["abcdE 11111", "fgEab 11100"], None)
    with pytest.raises(ValueError, match="batch sizes > 1"):
        theirs(**batch)
    alone = [ours(batch["input_ids"][:1]).logits, ours(batch["input_ids"][1:, :3]).logits]
    assert_close(ours(**batch).logits, torch.cat(alone))
    with pytest.raises(ValueError, match="pass attention_mask or set pad_token_id"):
        ours(batch["input_ids"])


ENDS = {
    "one end token": ["abcdE 11111", "fgEPP 11100"],
    "two": ["aEcdE 11111", "fEEPP 11100"],
    "an end token inside": ["aEcdf 11111", "fgEha 11111"],
    "padded with it, as many everywhere": ["abcEE 11110", "fgEhE 11110"],
    "one row that is padded with it": ["abEEE 11100"],
}


@pytest.mark.parametrize("pad", [PAD, END])
@pytest.mark.parametrize("case", ENDS)
@pytest.mark.parametrize("name", [name for name in OFFICIAL if name not in DECODERS])
def test_an_encoder_decoder_reads_the_end_token_of_the_official_class(name, case, pad, pairs_of):
    ours, theirs = pairs_of(name, pad)
    batch = batch_of(ENDS[case], PAD)
    assert_close(ours(**batch).logits, theirs(**batch).logits)


@pytest.mark.parametrize("name", [name for name in OFFICIAL if name not in DECODERS])
def test_rows_that_the_official_class_refuses_end_before_their_padding(name, pairs_of):
    ours, theirs = pairs_of(name, END)
    batch = batch_of(["abcdE 11111", "fgEEE 11100"], END)
    with pytest.raises((ValueError, RuntimeError), match="same number of <eos>"):
        theirs(**batch)
    alone = [ours(batch["input_ids"][:1]).logits, ours(batch["input_ids"][1:, :3]).logits]
    assert_close(ours(**batch).logits, torch.cat(alone))


@pytest.mark.parametrize("prepared", [False, True], ids=["plain", "prepared"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_hook_on_the_head_sees_every_token(pairs_of, name, prepared):
    ours, theirs = pairs_of(name)
    ours = ours.prepare_for_inference() if prepared else ours
    ids = torch.tensor([[11, 12, 13, 14, 15], [21, 22, 23, PAD, PAD]])
    mask, seen = (ids != PAD).long(), []
    for model in (ours, theirs):
        model.score.register_forward_hook(lambda module, inputs, output: seen.append(output))
        with torch.no_grad():
            model(ids, attention_mask=mask)
    assert_close(*(logits[mask.bool()] for logits in seen))
