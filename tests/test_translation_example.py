"""The translation task: its rules against a parser of their own, and its training, briefly."""

import importlib.util
import random
import re
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    """An example as a module, under its own name: one imports the other."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


phrases = load("phrases")


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


@pytest.mark.slow
def test_a_translator_is_trained_saved_and_reloaded(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    example = load("train_translation")
    command = ["--preset", "t5-v1.1", "--steps", "12", "--pairs", "600", "--held-out", "40"]
    example.main([*command, "--output", str(tmp_path / "repo")])
    output = capsys.readouterr().out
    assert "of 40 held-out phrases translated exactly" in output
    assert "three hundred and five" in output
    assert (tmp_path / "repo/modeling_encoder_decoder.py").exists()
    assert (tmp_path / "repo/tokenizer.json").exists()
