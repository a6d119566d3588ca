"""Text and its split, tokenizer, scores."""

import math

import pytest
import torch

from blockformer.data import corpus


@pytest.fixture
def sources(tmp_path):
    """A folder with 40 source files, a test folder, a copy and a file that is not UTF-8."""
    for number in range(40):
        (tmp_path / f"module_{number}.py").write_text(f"# file {number}\n" + f"value_{number} = {number}\n" * 600)
    (tmp_path / "copy.py").write_text((tmp_path / "module_3.py").read_text())
    (tmp_path / "latin.py").write_bytes("# é\n".encode("latin-1"))
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_a.py").write_text("left_out = 1\n")
    return tmp_path


def test_split_has_no_file_and_no_content_twice(sources):
    text = corpus.gather(sources, held_out_share=0.1)
    names = [file.name for file in text.train + text.held_out]
    texts = [file.text for file in text.train + text.held_out]
    assert len(set(names)) == len(names) == len(set(texts)) == 40
    assert not any("left_out" in each for each in texts)
    assert 0.1 <= text.held_out_bytes / (text.held_out_bytes + text.train_bytes) < 0.2


def test_same_text_every_time_and_below_the_cap(sources):
    first = corpus.gather(sources, max_bytes=250_000)
    assert first == corpus.gather(sources, max_bytes=250_000)
    assert first.train_bytes + first.held_out_bytes <= 250_000
    assert {file.name for file in first.train} < {file.name for file in corpus.gather(sources).train}


def test_a_python_without_sources_is_said_so(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(corpus.CorpusError, match=r"only 6 bytes.*install Python with its sources"):
        corpus.gather(tmp_path)
    with pytest.raises(corpus.CorpusError, match=r"only 0 bytes.*allow more than 5\."):
        corpus.gather(tmp_path, max_bytes=5)


def test_the_standard_library_is_enough():
    text = corpus.gather(max_bytes=400_000)
    assert text.held_out
    assert text.train_bytes > 200_000


def test_tokenizer_gives_any_text_back(sources):
    tokenizer = corpus.train_tokenizer((file.text for file in corpus.gather(sources).train), 300, 64)
    for text in ("value_7 = 7\n\tx", "nothing like it: é 漢字 \U0001f600", ""):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer) <= 300
    assert (tokenizer.eos_token, tokenizer.pad_token) == (corpus.END_OF_TEXT, corpus.PAD)


def test_encode_puts_every_file_between_two_ends(tiny_tokenizer):
    end = tiny_tokenizer.eos_token_id
    files = [corpus.SourceFile("a", "x = 1\n"), corpus.SourceFile("b", "y = 2\n")]
    ids = corpus.encode(files, tiny_tokenizer)
    assert [index for index, token in enumerate(ids.tolist()) if token == end] == [
        0,
        1 + len(tiny_tokenizer("x = 1\n").input_ids),
        len(ids) - 1,
    ]


class Uniform(torch.nn.Module):
    """A language model without an opinion, but for the one token that it never expects."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(vocab_size))

    def forward(self, input_ids):
        class Output:
            logits = self.logits.expand(*input_ids.shape, -1)

        return Output()


@pytest.mark.parametrize("tokens", [2, 8, 9, 10, 33, 100])
def test_model_score_counts_every_token_once(tokens):
    score = corpus.model_score(Uniform(16), torch.randint(0, 16, (tokens,)), num_bytes=3 * tokens, length=8, batch=2)
    assert score.loss == pytest.approx(math.log(16), rel=1e-6)
    assert score.perplexity == pytest.approx(16, rel=1e-5)
    assert score.bits_per_byte == pytest.approx(4 * (tokens - 1) / (3 * tokens), rel=1e-6)


def test_unigram_score_by_hand():
    train, held_out = torch.tensor([0, 0, 1]), torch.tensor([2, 0, 1, 2])
    expected = -(math.log(3 / 6) + math.log(2 / 6) + math.log(1 / 6))
    score = corpus.unigram_score(train, held_out, num_bytes=8, vocab_size=3)
    assert score.loss == pytest.approx(expected / 3)
    assert score.bits_per_byte == pytest.approx(expected / math.log(2) / 8)
