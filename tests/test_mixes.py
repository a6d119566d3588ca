"""Two mixes that no single family has, from training to a published repo: what holds for families holds for them."""

import copy
import inspect
import json

import pytest
import torch
from example_files import load
from fork_server import program
from pairs import assert_close
from sizes import TINY
from test_unpadding import both
from tokenizers import AddedToken
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
    pipeline,
)

import blockformer
from blockformer.conversion import ConversionError, convert
from blockformer.demo import phrases

masked_lm, translation = load("train_masked_lm"), load("train_translation")
TEXTS = ("import os, sys", "def bisect(a, x):\n    return 1", "x", 'heap = []  # "the smallest"')
PHRASES = ("three hundred and five", "31 December 1999", "ten", "March 5th, 2021")
MIX = {"qk_norm": True, "position_type": "rotary", "num_key_value_heads": 2}


def trained(model, rows, collator, folder, steps, learning_rate):
    """The model after some steps, and its loss on the rows before and after them."""
    batch = collator([rows[index] for index in range(len(rows))])
    losses = []
    for _ in range(2):
        model.eval()
        with torch.no_grad():
            losses.append(model(**batch).loss.item())
        if len(losses) == 1:
            settings = TrainingArguments(
                folder,
                max_steps=steps,
                per_device_train_batch_size=16,
                learning_rate=learning_rate,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                dataloader_pin_memory=False,
            )
            Trainer(model, settings, train_dataset=rows, data_collator=collator).train()
    return model.eval(), losses


@pytest.fixture(scope="module")
def encoder(tiny_tokenizer, tmp_path_factory):
    """The encoder's mix, its tokenizer, and its losses before and after training."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_special_tokens({"mask_token": AddedToken("<mask>", lstrip=True, special=True)})
    tokenizer.padding_side = "right"
    torch.manual_seed(0)
    config = blockformer.BlockformerEncoderConfig(
        **masked_lm.MIX,
        vocab_size=len(tokenizer),
        **TINY,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    ids = torch.tensor(tokenizer(inspect.getsource(phrases))["input_ids"])
    collator = DataCollatorForLanguageModeling(tokenizer, seed=0)
    model, losses = trained(
        blockformer.BlockformerEncoderForMaskedLM(config),
        masked_lm.Blocks(ids, 24),
        collator,
        tmp_path_factory.mktemp("encoder"),
        steps=30,
        learning_rate=1e-2,
    )
    return model, tokenizer, losses


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    """The encoder-decoder's mix, its tokenizer, and its losses before and after training."""
    entries = translation.pairs(200)
    tokenizer = translation.make_tokenizer(text for pair in entries for text in pair)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
    config = translation.make_config("transformer-base", tokenizer, **sizes, **MIX)
    model = blockformer.BlockformerEncoderDecoderForConditionalGeneration(config)
    rows, folder = translation.Rows(entries, tokenizer), tmp_path_factory.mktemp("translator")
    model, losses = trained(model, rows, DataCollatorForSeq2Seq(tokenizer, model), folder, steps=40, learning_rate=3e-3)
    return model, tokenizer, losses


def source_and_target(translator):
    """A padded batch of phrases, with decoder inputs that are padded too."""
    _, tokenizer, _ = translator
    batch = tokenizer(list(PHRASES), padding=True, return_tensors="pt")
    target = tokenizer(["三百零五", "1999年", "十", "2021年3月5日"], padding=True, return_tensors="pt")
    return {**batch, "decoder_input_ids": target["input_ids"], "decoder_attention_mask": target["attention_mask"]}


def published(fresh, model, tokenizer, batch, script, *arguments, folder):
    """What a script says of the exported model in a process without the package."""
    blockformer.export_model(model, folder / "repo", tokenizer=tokenizer)
    torch.save(dict(batch), folder / "batch.pt")
    return json.loads(fresh(script, folder / "repo", folder / "batch.pt", *arguments, folder=folder))


def test_the_mixes_have_what_they_are_named_for(encoder, translator):
    model = encoder[0].model
    assert type(model.norm).__name__ == "RMSNorm"
    assert model.rotary_emb is not None
    assert not model.layers[0].self_attn.is_causal
    assert model.layers[0].mlp.gate_proj.weight.shape == (48, 32)
    assert model.layers[0].self_attn.k_proj.weight.shape == (16, 32)
    for stack in (translator[0].model.encoder, translator[0].model.decoder):
        assert stack.rotary_emb is not None
        assert stack.layers[0].self_attn.q_norm.weight.shape == (8,)
        assert stack.layers[0].self_attn.k_proj.weight.shape == (16, 32)
    assert translator[0].model.decoder.layers[0].cross_attn.k_norm.weight.shape == (8,)


@pytest.mark.parametrize(("mix", "share"), [("encoder", 0.9), ("translator", 0.75)])
def test_training_lowers_the_loss(mix, share, request):
    before, after = request.getfixturevalue(mix)[2]
    assert after < share * before


@pytest.mark.parametrize("mix", ["encoder", "translator"])
def test_saved_and_loaded_is_the_same_bit_for_bit(mix, request, tmp_path):
    model, tokenizer, _ = request.getfixturevalue(mix)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items())
    saved, kept = again.config.to_dict(), model.config.to_dict()
    assert {name for name in kept if saved[name] != kept[name]} <= {"_name_or_path", "dtype", "transformers_version"}
    batch = tokenizer(list(PHRASES), padding=True, return_tensors="pt")
    target = {} if mix == "encoder" else {"decoder_input_ids": batch["input_ids"]}
    assert torch.equal(again(**batch, **target).logits, model(**batch, **target).logits)


def test_the_encoder_published_gives_the_same_logits_and_fills_masks(encoder, fresh, tmp_path):
    model, tokenizer, _ = encoder
    batch = tokenizer(list(TEXTS), padding=True, return_tensors="pt")
    text = "import <mask>"
    found = published(fresh, model, tokenizer, batch, program("remote_masked_lm"), text, folder=tmp_path)
    with torch.no_grad():
        real = batch["attention_mask"].bool()  # what padding has depends on whether it is skipped
        assert_close(torch.tensor(found["logits"])[real], model(**batch).logits[real])
    here = pipeline("fill-mask", model=model, tokenizer=tokenizer)(text)
    assert [one["token"] for one in found["filled"]] == [one["token"] for one in here]
    assert [one["sequence"] for one in found["filled"]] == [one["sequence"] for one in here]
    place = tokenizer(text)["input_ids"].index(tokenizer.mask_token_id)
    with torch.no_grad():
        chances = model(**tokenizer(text, return_tensors="pt")).logits[0, place].softmax(-1)
    assert here[0]["token"] == chances.argmax()
    assert here[0]["score"] == pytest.approx(chances.max().item(), rel=1e-5)


def test_the_translator_published_gives_the_same_logits_and_writes_the_same(translator, fresh, tmp_path):
    model, tokenizer, _ = translator
    batch = source_and_target(translator)
    found = published(
        fresh, model, tokenizer, batch, program("remote_translation"), json.dumps(PHRASES), folder=tmp_path
    )
    with torch.no_grad():
        assert_close(torch.tensor(found["logits"]), model(**batch).logits)
    inputs = tokenizer(list(PHRASES), padding=True, return_tensors="pt")
    for beams, written in zip((1, 3), found["written"], strict=True):
        here = model.generate(**inputs, max_new_tokens=12, do_sample=False, num_beams=beams)
        assert written == here.tolist()


def test_what_is_written_is_the_likeliest_token_after_the_whole_text_so_far(translator):
    """Greedy text against the definition: no cache, no padding, one row at a time."""
    model, tokenizer, _ = translator
    inputs = tokenizer(list(PHRASES), padding=True, return_tensors="pt")
    written = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert len(set(map(tuple, written.tolist()))) > 1
    for row, phrase in zip(written, PHRASES, strict=True):
        source, text = tokenizer(phrase, return_tensors="pt")["input_ids"], row[:1]
        while len(text) < len(row) and text[-1] != model.config.eos_token_id:
            logits = model(source, decoder_input_ids=text[None], use_cache=False).logits
            text = torch.cat((text, logits[0, -1:].argmax(-1)))
        assert torch.equal(text, row[: len(text)])
        assert (row[len(text) :] == model.config.pad_token_id).all()


def test_beams_with_a_cache_are_those_without(translator):
    model, tokenizer, _ = translator
    inputs = tokenizer(list(PHRASES), padding=True, return_tensors="pt")
    beams = {"max_new_tokens": 12, "do_sample": False, "num_beams": 4, "num_return_sequences": 2}
    cached, plain = (model.generate(**inputs, **beams, use_cache=use_cache) for use_cache in (True, False))
    assert torch.equal(cached, plain)
    assert not torch.equal(cached[0], cached[1])


def test_padding_skipped_is_the_padded_run(encoder, translator, monkeypatch):
    model, tokenizer, _ = encoder
    batch, seen = tokenizer(list(TEXTS), padding=True, return_tensors="pt"), []
    real = batch["attention_mask"].bool()
    model = copy.deepcopy(model).prepare_for_inference()
    run = model.model.run_layers
    monkeypatch.setattr(
        model.model, "run_layers", lambda states, *more: seen.append((*states.shape[:2],)) or run(states, *more)
    )
    skipped, padded = both(model, monkeypatch, **batch)
    assert_close(skipped.logits[real], padded.logits[real])
    assert seen == [(1, int(real.sum())), tuple(real.shape)]
    alone = [model(**tokenizer(text, return_tensors="pt")).logits[0] for text in TEXTS]
    assert_close(skipped.logits[real], torch.cat(alone))

    model, _, _ = translator
    batch = source_and_target(translator)
    real = batch["decoder_attention_mask"].bool()
    skipped, padded = both(model, monkeypatch, **batch)
    assert_close(skipped.logits[real], padded.logits[real])
    for row, logits in enumerate(skipped.logits):
        source = batch["input_ids"][row][batch["attention_mask"][row].bool()]
        target = batch["decoder_input_ids"][row][real[row]]
        assert_close(logits[real[row]], model(source[None], decoder_input_ids=target[None]).logits[0])


@pytest.mark.parametrize(
    ("mix", "family", "named"),
    [
        ("encoder", "bert", ("position_type", "norm_type", "norm_placement", "gated_mlp", "num_key_value_heads")),
        ("translator", "umt5", ("position_type", "qk_norm", "num_key_value_heads")),
    ],
)
def test_a_family_that_cannot_hold_them_says_why(mix, family, named, request, tmp_path):
    model, tokenizer, _ = request.getfixturevalue(mix)
    blockformer.export_model(model, tmp_path / "repo", tokenizer=tokenizer)
    if mix == "encoder":  # EuroBERT has the same blocks
        assert convert(tmp_path / "repo", tmp_path / "eurobert", to_official=True).family == "eurobert"
    else:
        with pytest.raises(ConversionError, match="no official family can express this config of Blockformer"):
            convert(tmp_path / "repo", tmp_path / "official", to_official=True)
    with pytest.raises(ConversionError, match=f"'{family}' cannot express this config") as caught:
        convert(tmp_path / "repo", tmp_path / "official", to_official=True, family=family)
    assert all(f"{name} must be" in str(caught.value) for name in named), str(caught.value)
    assert not (tmp_path / "official").exists()
