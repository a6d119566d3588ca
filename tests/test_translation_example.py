"""The translation task: its rules against a parser of their own, its training, briefly, and its picture."""

import argparse
import builtins
import random
import re

import pytest
import torch
from example_files import load, load_forking
from pairs import assert_close
from transformers import DataCollatorForSeq2Seq

import blockformer
from blockformer.demo import cross_attention as picture
from blockformer.demo import phrases

example = load("train_translation")


def value_of(text):
    """A Chinese number, read by another rule than the one that wrote it."""
    total = section = digit = 0
    for character in text:
        if character in phrases.DIGITS:
            digit = phrases.DIGITS.index(character)
        elif character == "万":
            total, section, digit = (section + digit) * 10_000, 0, 0
        else:
            section += (digit or 1) * {"十": 10, "百": 100, "千": 1000}[character]
            digit = 0
    return total + section + digit


def english_value(text):
    """An English number, read word by word."""
    words = {word: number for number, word in enumerate(phrases.ONES)}
    words |= {word: 10 * number for number, word in enumerate(phrases.TENS) if number > 1}
    total = part = 0
    for word in re.split(r"[ -]", text):
        if word in words:
            part += words[word]
        elif word == "hundred":
            part *= 100
        elif word != "and":
            total += part * {"thousand": 1000, "million": 1_000_000}[word]
            part = 0
    return total + part


def test_numbers_are_read_back_as_they_were_written():
    state = random.Random(0)
    some = {*range(2000), *(10**n + d for n in range(3, 7) for d in (-1, 0, 1, 5, 10)), phrases.LARGEST}
    for number in some | {state.randrange(phrases.LARGEST) for _ in range(5000)}:
        assert value_of(phrases.chinese_number(number)) == number
        assert english_value(phrases.english_number(number)) == number


@pytest.mark.parametrize(
    ("number", "english", "chinese"),
    [
        (0, "zero", "零"),
        (10, "ten", "十"),
        (16, "sixteen", "十六"),
        (110, "one hundred and ten", "一百一十"),
        (305, "three hundred and five", "三百零五"),
        (1010, "one thousand and ten", "一千零一十"),
        (10_005, "ten thousand and five", "一万零五"),
        (99_000, "ninety-nine thousand", "九万九千"),
        (100_010, "one hundred thousand and ten", "十万零一十"),
        (1_000_010, "one million and ten", "一百万零一十"),
    ],
)
def test_known_numbers(number, english, chinese):
    assert phrases.english_number(number) == english
    assert phrases.chinese_number(number) == chinese


def test_no_answer_is_both_trained_on_and_held_out():
    train, held_out = phrases.pairs(3000), phrases.pairs(500, seed=1, held_out=True)
    assert (len(train), len(held_out)) == (3000, 500)
    assert not {target for _, target in train} & {target for _, target in held_out}
    assert phrases.pairs(100) == train[:100]
    assert any("年" in target for _, target in held_out)
    assert all(phrases.ordinal(day) == text for day, text in ((1, "1st"), (2, "2nd"), (11, "11th"), (23, "23rd")))


@pytest.fixture(scope="module")
def entries():
    return phrases.pairs(64)


@pytest.fixture(scope="module")
def tokenizer(entries):
    return example.make_tokenizer(text for pair in entries for text in pair)


@pytest.fixture(scope="module")
def untrained(tokenizer):
    """A model with random weights that are large enough for every word to look elsewhere."""
    torch.manual_seed(0)
    config = example.make_config("transformer-base", tokenizer, initializer_range=0.3)
    return blockformer.BlockformerEncoderDecoderForConditionalGeneration(config).eval()


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("qk_norm=true", "qk_norm", True),
        ("head_dim=12", "head_dim", 12),
        ("embedding_scale=null", "embedding_scale", None),
        ("position_type=rotary", "position_type", "rotary"),
        ('rope_parameters={"rope_theta": 500.0}', "rope_parameters", {"rope_theta": 500.0}),
        ("hidden_act=a=b", "hidden_act", "a=b"),
    ],
)
def test_values_of_the_command_line_are_json_or_words(text, field, value):
    assert example.field_and_value(text) == (field, value)


@pytest.mark.parametrize("text", ["qk_norm", "=true"])
def test_a_setting_without_field_or_value_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not FIELD=VALUE"):
        example.field_and_value(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "qk_nrm=true"], "no field 'qk_nrm'. Did you mean 'qk_norm'?"),
        (["--set", "qk_norm=true", "num_key_value_heads=3"], "not a multiple of num_key_value_heads"),
        (["--preset", "qwen3"], "invalid choice: 'qwen3'"),
    ],
)
def test_what_the_config_refuses_is_said_before_any_training(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(example, "train", None)
    with pytest.raises(SystemExit, match="2"):
        example.main(["--output", str(tmp_path / "repo"), "--pairs", "50", "--held-out", "5", *arguments])
    assert message in capsys.readouterr().err


USUALLY = ("transformer-base", "t5-v1.1", "mbart")


@pytest.mark.parametrize(
    "preset",
    [pytest.param(name, marks=[] if name in USUALLY else pytest.mark.exhaustive) for name in example.ENCODER_DECODERS],
)
def test_every_preset_trains_and_writes_with_the_tokens_of_this_tokenizer(preset, tokenizer, entries):
    torch.manual_seed(0)
    config = example.make_config(preset, tokenizer, hidden_size=32, intermediate_size=48, num_attention_heads=4)
    assert (config.vocab_size, config.bos_token_id) == (len(tokenizer), None)
    model = blockformer.BlockformerEncoderDecoderForConditionalGeneration(config)
    rows = example.Rows(entries, tokenizer)
    batch = DataCollatorForSeq2Seq(tokenizer, model)([rows[index] for index in range(len(rows))])
    first = batch["decoder_input_ids"][:, 0]
    assert (first == config.decoder_start_token_id).all(), "what is read first in training is read first in use"
    assert torch.equal(batch["decoder_input_ids"][:, 1:] == tokenizer.pad_token_id, batch["labels"][:, :-1] == -100)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(4):
        losses.append(model(**batch).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    model.eval()
    texts = [source for source, _ in entries[:5]]
    written = example.translate(model, tokenizer, texts)
    assert written == [example.translate(model, tokenizer, [text])[0] for text in texts]


@pytest.mark.parametrize(
    ("preset", "start"),
    [("transformer-base", "<pad>"), ("t5", "<pad>"), ("marian", "<pad>"), ("bart", "</s>"), ("mbart", "</s>")],
)
def test_the_decoder_starts_as_in_the_preset(preset, start, tokenizer):
    config = example.make_config(preset, tokenizer)
    assert config.decoder_start_token_id == tokenizer.convert_tokens_to_ids(start)
    assert config.decoder_starts_with_last_label == (preset == "mbart")


def test_the_attention_shown_is_that_of_the_step_that_wrote_each_token(untrained, tokenizer):
    """Against one step after the other, without a cache, and with other weights for other steps."""
    text = "March 5th, 2021"
    attention = picture.cross_attention(untrained, tokenizer, text, max_new_tokens=6)
    assert attention.read == ["march", "5", "th", ",", "2", "0", "2", "1", "end"]
    assert attention.weights.shape == (2, 4, len(attention.written), len(attention.read))
    assert_close(attention.weights.sum(-1), torch.ones(attention.weights.shape[:3]))
    assert untrained.config._attn_implementation == "sdpa"
    inputs = tokenizer(text, return_tensors="pt")
    written = untrained.generate(**inputs, max_new_tokens=6, do_sample=False)
    assert attention.written == [picture.label(tokenizer, token) for token in written[0, 1:]]
    untrained.set_attn_implementation("eager")
    try:
        for step in range(len(attention.written)):
            so_far = written[:, : step + 1]
            outputs = untrained(**inputs, decoder_input_ids=so_far, output_attentions=True, use_cache=False)
            assert outputs.logits[0, -1].argmax() == written[0, step + 1]
            for layer, weights in enumerate(outputs.cross_attentions):
                assert_close(attention.weights[layer, :, step], weights[0, :, -1])
                assert_close(attention.layer(layer)[step], weights[0, :, -1].mean(0))
    finally:
        untrained.set_attn_implementation("sdpa")


def hand_made(sharp):
    """Four characters against three words, two layers of two heads; layer `sharp` looks at one word a character."""
    weights = torch.full((2, 2, 4, 3), 1 / 3)
    weights[sharp] = torch.tensor([[0.9, 0.1, 0], [0.02, 0.96, 0.02], [0, 0.4, 0.6], [0, 0, 1]])
    return picture.CrossAttention(["three", "hundred", "end"], ["三", "百", "<", "end"], weights)


@pytest.mark.parametrize("sharp", [0, 1])
def test_the_picture_has_the_labels_the_shares_and_the_most_decided_layer(sharp, tmp_path):
    pytest.importorskip("matplotlib")
    files = picture.draw([hand_made(sharp)], tmp_path / "one.svg")
    svg = files[0].read_text(encoding="utf-8")
    assert files[0] == tmp_path / "one.svg"
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    for word in ("three", "hundred", "三", "百", "&lt;", "words read", "characters written, downwards"):
        assert texts.count(word) == 1, word
    assert texts.count("end") == 2
    assert [text for text in texts if text.isdigit()] == ["90", "10", "96", "40", "60", "100"]
    assert any(f"decoder layer {sharp + 1} of 2, mean of 2 heads" in text for text in texts)
    assert all(font in svg for font in picture.FONTS)
    again = picture.draw([hand_made(sharp)], tmp_path / "two.svg")[0]
    assert again.read_text(encoding="utf-8") == svg
    other = picture.draw([hand_made(sharp)], tmp_path / "other.svg", layer=1 - sharp)[0].read_text(encoding="utf-8")
    assert re.findall(r">(\d+)</text>", other) == ["33"] * 12


def test_rows_are_written_characters_from_top_to_bottom_and_columns_words_from_left_to_right(tmp_path):
    pytest.importorskip("matplotlib")
    svg = picture.draw([hand_made(0)], tmp_path / "one.svg")[0].read_text(encoding="utf-8")
    found = re.findall(r'<text[^>]*?(?:x="|translate\()([\d.]+)(?:" y="| )([\d.]+)[^>]*>([^<]*)</text>', svg)
    places = {text: (float(x), float(y)) for x, y, text in found}
    (first_x, first_y), (x, y), (last_x, last_y) = (places[share] for share in ("90", "96", "60"))
    assert first_x < x < last_x
    assert first_y < y < last_y
    near = picture.CELL * 72 / 4
    assert abs(first_y - places["三"][1]) < near
    assert abs(y - places["百"][1]) < near
    assert abs(first_x - places["three"][0]) < near
    assert abs(x - places["hundred"][0]) < near


def test_without_matplotlib_the_example_says_so_and_goes_on(untrained, tokenizer, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *arguments):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    message = picture.draw_or_say_why_not(untrained, tokenizer, ["ten"], tmp_path / "one.svg")
    assert message == picture.NO_MATPLOTLIB
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [[], ["--preset", "mbart", "--set", "qk_norm=true", "position_type=rotary", "num_key_value_heads=2"]],
    ids=["original", "mix"],
)
def test_a_translator_is_trained_saved_reloaded_and_drawn(more, tmp_path, fresh, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    load_forking("train_translation", fresh, tmp_path, monkeypatch)
    command = ["--steps", "12", "--pairs", "600", "--held-out", "40", *more]
    example.main([*command, "--output", str(tmp_path / "repo")])
    output = capsys.readouterr().out
    assert "of 40 held-out phrases translated exactly" in output
    assert "three hundred and five" in output
    for name in ("modeling_encoder_decoder.py", "tokenizer.json"):
        assert (tmp_path / "repo" / name).exists()
    svg = (tmp_path / "repo/cross-attention.svg").read_text(encoding="utf-8")
    assert ">thousand</text>" in svg
    config = blockformer.BlockformerEncoderDecoderConfig.from_pretrained(tmp_path / "repo")
    wanted = ("rotary", "pre", 2) if more else ("sinusoidal", "post", 4)
    assert (config.position_type, config.norm_placement, config.num_key_value_heads) == wanted

    command = [str(tmp_path / "repo"), "ten", "--output", str(tmp_path / "again.svg"), "--layer"]
    load("attention_picture").main([*command, "1"])
    assert "decoder layer 2 of 2" in (tmp_path / "again.svg").read_text(encoding="utf-8")
    with pytest.raises(SystemExit, match="2"):
        load("attention_picture").main([*command, "2"])
    assert "--layer must be 0 to 1, not 2" in capsys.readouterr().err


@pytest.mark.parametrize("example", ["attention_picture", "chat"])
def test_a_name_that_is_no_repo_is_one_line(example, tmp_path):
    more = ["ten"] if example == "attention_picture" else []
    with pytest.raises(SystemExit, match=r"nonesuch: no \w.*$"):
        load(example).main([str(tmp_path / "nonesuch"), *more])
