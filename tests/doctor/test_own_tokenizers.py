"""Tokenizers in the formats of training code: the same ids as the originals, by programs that encode as they do."""

import base64
import itertools
import json
import pickle
import re
import struct
from collections import Counter

import pytest
import torch
from transformers import AutoTokenizer

from blockformer.conversion import ConversionError
from blockformer.doctor import Options, mend
from blockformer.doctor.rank_lists import KINDS, PUBLISHED, kind_of

from ..conversion.oracles import official_folder
from .test_own_code import NANO, llama2_c, nano_gpt, write_numbers

LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
TEXT = "The cat sat on the mat, and the hat sat there too; 1234 aaaa aaa!\nÜber naïve 日本語 🙂  two  spaces\n\n it's"
PATTERN = r"'(?:[sdmt]|ll|ve|re)|[A-Za-zÀ-ÿ]+| ?[^\sA-Za-z0-9]+|\d{1,2}|\s+"


def trained_ranks(text, count):
    """Ranks of tokens: the 256 bytes, then the most frequent pairs, merged one after the other."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [[bytes([byte]) for byte in word.encode()] for word in re.findall(PATTERN, text)]
    for _ in range(count):
        pairs = Counter(pair for word in words for pair in itertools.pairwise(word))
        (left, right), _ = pairs.most_common(1)[0]
        ranks.setdefault(left + right, len(ranks))
        words = [merged(word, left + right) for word in words]
    return ranks


def merged(word, token):
    made, place = [], 0
    while place < len(word):
        pair = b"".join(word[place : place + 2])
        hit = pair == token and place + 1 < len(word)
        made.append(pair if hit else word[place])
        place += 2 if hit else 1
    return made


def by_ranks(ranks, text):
    """As tiktoken encodes: the pair whose token has the lowest rank is merged first, the left one of equals."""
    ids = []
    for word in re.findall(PATTERN, text):
        parts = [bytes([byte]) for byte in word.encode()]
        while len(parts) > 1:
            found = [(ranks.get(parts[i] + parts[i + 1], 1 << 30), i) for i in range(len(parts) - 1)]
            rank, place = min(found)
            if rank == 1 << 30:
                break
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        ids += [ranks[part] for part in parts]
    return ids


class Encoding:
    """Pickled as tiktoken's class of this name is, with its state."""

    def __init__(self, state):
        self.state = state

    def __getstate__(self):
        return self.state


def write_encoding(path, state):
    """A pickle of a class with the state of tiktoken's `Encoding`, which is read without tiktoken."""
    path.write_bytes(pickle.dumps(Encoding(state)))


def saved(folder, rows=NANO["vocab_size"]):
    """A run of nanoGPT with so many tokens."""
    folder.mkdir()
    weights = nano_gpt(True)
    table = torch.randn(rows, NANO["n_embd"])
    weights |= {"transformer.wte.weight": table, "lm_head.weight": table}
    torch.save({"model": weights, "model_args": {**NANO, "bias": True, "vocab_size": rows}}, folder / "ckpt.pt")
    return folder


def test_an_encoding_of_tiktoken(tmp_path):
    ranks = trained_ranks(TEXT, 40)
    special = {"<|bos|>": len(ranks), "<|user_start|>": len(ranks) + 1}
    state = {"name": "own", "pat_str": PATTERN, "mergeable_ranks": ranks, "special_tokens": special}
    run = saved(tmp_path / "run", len(ranks) + 2)
    write_encoding(run / "tokenizer.pkl", state)
    found = mend(run, tmp_path / "out")
    assert f"tokenizer.json made from tokenizer.pkl, {len(ranks) + 2} tokens" in found.changes
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in (TEXT, TEXT[::-1], "aaaaaaa" * 9, ""):
        assert tokenizer(text).input_ids == by_ranks(ranks, text)
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("<|bos|>a").input_ids == [len(ranks), ranks[b"a"]]
    assert tokenizer.bos_token == "<|bos|>"


def test_an_encoding_that_does_not_fit_is_not_written(tmp_path):
    ranks = trained_ranks(TEXT, 5)
    state = {"name": "own", "pat_str": PATTERN, "mergeable_ranks": ranks, "special_tokens": {}}
    run = saved(tmp_path / "run", 100)
    write_encoding(run / "tokenizer.pkl", state)
    said = f"no tokenizer written: tokenizer.pkl has {len(ranks)} tokens, and the embeddings have 100 rows"
    assert said in mend(run, tmp_path / "out").changes
    write_encoding(run / "tokenizer.pkl", {**state, "special_tokens": {"<|bos|>": 9}})
    assert "'<|bos|>' has the id 9" in " ".join(mend(run, tmp_path / "again").changes)
    write_encoding(run / "tokenizer.pkl", {**state, "mergeable_ranks": {b"a": 0}})
    assert "not an Encoding of tiktoken" in " ".join(mend(run, tmp_path / "third").changes)
    assert not (tmp_path / "third/tokenizer.json").exists()


def test_tiktoken_itself_gives_these_ids(tmp_path):
    tiktoken = pytest.importorskip("tiktoken")
    ranks = trained_ranks(TEXT, 40)
    pattern = (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    )
    original = tiktoken.Encoding("own", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|bos|>": len(ranks)})
    run = saved(tmp_path / "run", len(ranks) + 1)
    (run / "tokenizer.pkl").write_bytes(pickle.dumps(original))
    mend(run, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in (TEXT, TEXT[::-1], "aaaaaaa" * 9, __doc__):
        assert tokenizer(text).input_ids == original.encode(text)


PIECES = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{byte:02X}>" for byte in range(256))]
LEARNT = [" t", "he", " a", "at", " the", "aa", " m", " mat", " s", " sat", "aaa", " c", " cat", *" aceghimnorstT,.;1b"]


def write_pieces(path):
    """llama2.c's `tokenizer.bin`: the longest piece, then score, length and bytes of each; single letters come last."""
    pieces = [*((piece, 0.0) for piece in PIECES), *((piece, -1.0 - rank) for rank, piece in enumerate(LEARNT))]
    data = [struct.pack("<fi", score, len(piece.encode())) + piece.encode() for piece, score in pieces]
    path.write_bytes(struct.pack("<i", max(len(piece) for piece, _ in pieces)) + b"".join(data))
    return {piece: (number, score) for number, (piece, score) in enumerate(pieces)}


def by_scores(pieces, text):
    """As `run.c` encodes: a space first, letters or their bytes, then the pair with the best score, again and again."""
    ids = [pieces[" "][0]] if text else []
    for letter in text:
        ids += [pieces[letter][0]] if letter in pieces else [byte + 3 for byte in letter.encode()]
    texts = {number: piece for piece, (number, _) in pieces.items()}
    while True:
        pairs = [
            (pieces.get(texts[one] + texts[two]), place) for place, (one, two) in enumerate(itertools.pairwise(ids))
        ]
        pairs = [(-found[1], place, found[0]) for found, place in pairs if found is not None]
        if not pairs:
            return ids
        _, place, number = min(pairs)
        ids[place : place + 2] = [number]


def test_the_pieces_of_llama2_c(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    pieces = write_pieces(run / "tokenizer.bin")
    write_numbers(run / "model.bin", llama2_c(), True)
    said = "no tokenizer written: tokenizer.bin has 291 tokens, and the embeddings have 61 rows"
    assert said in mend(run, tmp_path / "small").changes
    weights = llama2_c()
    rows = torch.randn(len(pieces), 32)
    weights |= {"tok_embeddings.weight": rows, "output.weight": rows}
    args = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": len(pieces), "max_seq_len": 24}
    (run / "model.bin").unlink()
    torch.save({"model": weights, "model_args": args}, run / "ckpt.pt")
    mend(run, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("the cat sat at the mat", TEXT, " aaaa aaa  aa\u2581a", "日本 the", ""):
        assert tokenizer(text, add_special_tokens=False).input_ids == by_scores(pieces, text), text
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    (run / "tokenizer.bin").write_bytes((run / "tokenizer.bin").read_bytes()[:-1])
    assert "tokenizer.bin: cut short" in " ".join(mend(run, tmp_path / "cut").changes)


def test_the_letters_of_nano_gpt(tmp_path):
    letters = sorted({*TEXT})
    ids = {letter: number for number, letter in enumerate(letters)}
    run = saved(tmp_path / "run", len(letters))
    meta = {"vocab_size": len(letters), "stoi": ids, "itos": {number: letter for letter, number in ids.items()}}
    (run / "meta.pkl").write_bytes(pickle.dumps(meta))
    found = mend(run, tmp_path / "out")
    assert f"tokenizer.json made from meta.pkl, {len(letters)} tokens" in found.changes
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(TEXT).input_ids == [ids[letter] for letter in TEXT]
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
    (run / "meta.pkl").write_bytes(pickle.dumps({"stoi": {"ab": 1}}))
    assert "not the letters of nanoGPT" in " ".join(mend(run, tmp_path / "again").changes)


def write_ranks(path, ranks):
    """A list of ranks as tiktoken, Llama 3 and Qwen have them."""
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()))


def of_ranks(folder, rows, ranks, name="tokenizer.model"):
    run = saved(folder, rows)
    write_ranks(run / name, ranks)
    return run


def test_a_list_of_ranks_needs_a_pattern(tmp_path):
    ranks = trained_ranks(TEXT, 40)
    run = of_ranks(tmp_path / "run", len(ranks) + 2, ranks)
    said = " ".join(mend(run, tmp_path / "out").changes)
    assert "tokenizer.model is a list of ranks for tiktoken" in said
    assert "--tiktoken llama3 or llama3.1 or qwen or qwen2 or qwen2.5 or qwen3, or a JSON file" in said
    assert not (tmp_path / "out/tokenizer.json").exists()
    special = {"<|bos|>": len(ranks), "<|end|>": len(ranks) + 1}
    (run / "rest.json").write_text(
        json.dumps({"pat_str": PATTERN, "special_tokens": special, "bos_token": "<|bos|>", "eos_token": "<|end|>"})
    )
    (run / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}", "pad_token": "<|end|>"}))
    found = mend(run, tmp_path / "whole", options=Options(tiktoken=str(run / "rest.json")))
    assert f"tokenizer.json made from tokenizer.model, {len(ranks) + 2} tokens" in found.changes
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "whole")
    for text in (TEXT, TEXT[::-1], "aaaaaaa" * 9, ""):
        assert tokenizer(text).input_ids == by_ranks(ranks, text)
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("<|end|>a").input_ids == [len(ranks) + 1, ranks[b"a"]]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|bos|>", "<|end|>", "<|end|>")
    assert tokenizer.chat_template == "{{ messages }}"
    assert not (tmp_path / "whole/tokenizer.model").exists()  # it is read as sentencepiece's elsewhere
    assert (tmp_path / "whole/original/tokenizer.model").read_bytes() == (run / "tokenizer.model").read_bytes()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("llama4", "--tiktoken must be one of llama3, .*, or a JSON file, not 'llama4'"),
        ({"pattern": "a"}, "unknown 'pattern'; there are pat_str, special_tokens, bos_token, eos_token"),
        ({"special_tokens": {}}, "needs pat_str, a pattern, and special_tokens, an id for each"),
        ({"pat_str": "a", "special_tokens": {"<|a|>": "9"}}, "needs pat_str"),
        ({"pat_str": "a", "bos_token": "<|b|>"}, "'<|b|>' is not one of its special_tokens"),
        ({"pat_str": "a", "special_tokens": {"<|a|>": 9}}, "'<|a|>' has the id 9, and the next one is another"),
        ({"pat_str": "(a"}, "the pattern cannot be read"),
        ({"pat_str": "(a){1,2}+"}, r"the pattern cannot be read: 'a group with \{1,2\}\+'"),
        ("qwen", "tokenizer.model has 504 tokens, and the embeddings have 300 rows"),
    ],
)
def test_answers_that_make_no_tokenizer(tmp_path, asked, said):
    run = of_ranks(tmp_path / "run", 300, trained_ranks(TEXT, 40))
    if isinstance(asked, dict):
        (run / "rest.json").write_text(json.dumps(asked))
        asked = str(run / "rest.json")
    with pytest.raises(ConversionError, match=said.replace("|", r"\|")):
        mend(run, tmp_path / "out", options=Options(tiktoken=asked))
    assert not (tmp_path / "out").exists()


def test_an_answer_without_a_list_of_ranks(tmp_path):
    run = saved(tmp_path / "run")
    with pytest.raises(ConversionError, match=r"has no list of ranks \(\*.tiktoken or tokenizer.model\)"):
        mend(run, tmp_path / "out", options=Options(tiktoken="llama3"))
    (run / "vocab.txt").write_text("a\n")
    write_ranks(run / "own.tiktoken", trained_ranks(TEXT, 4))
    with pytest.raises(ConversionError, match="has a tokenizer; leave it out"):
        mend(run, tmp_path / "out", options=Options(tiktoken="llama3"))


@pytest.mark.parametrize("change", [lambda lines: lines[1:], lambda lines: [*lines, "YWE="], lambda lines: lines[:200]])
def test_a_damaged_list_of_ranks(tmp_path, change):
    run = of_ranks(tmp_path / "run", 700, trained_ranks(TEXT, 40))
    lines = (run / "tokenizer.model").read_text().splitlines()
    (run / "tokenizer.model").write_text("\n".join(change(lines)))
    with pytest.raises(ConversionError, match=r"tokenizer.model: a .*list of ranks.*copy it again"):
        mend(run, tmp_path / "out", options=Options(tiktoken="llama3"))


@pytest.mark.parametrize("kind", KINDS)
def test_known_lists_give_the_ids_of_tiktoken(tmp_path, kind):
    """The oracle is tiktoken where it is installed, and else a program that merges pieces as it does."""
    ranks = trained_ranks(TEXT, 40)
    run = of_ranks(tmp_path / "run", 700, ranks, "own.tiktoken")
    mend(run, tmp_path / "out", options=Options(tiktoken=kind))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    begin = [tokenizer.bos_token_id] if kind.startswith("llama") else []
    assert tokenizer("it's").input_ids[: len(begin)] == begin
    assert tokenizer.eos_token_id == len(ranks) + bool(begin)
    assert tokenizer("<|im_end|>").input_ids == [len(ranks) + 2] or begin
    tiktoken = pytest.importorskip("tiktoken")
    original = tiktoken.Encoding("own", pat_str=KINDS[kind].pattern, mergeable_ranks=ranks, special_tokens={})
    for text in (TEXT, TEXT[::-1], "aaaaaaa" * 9, "12345678 IT'LL\r\n\t x", " \n \n  y \n", __doc__):
        assert tokenizer(text).input_ids == begin + original.encode(text)


def test_a_pattern_of_todays_tiktoken_gives_its_ids(tmp_path):
    """Possessive counts and the end of a text are written otherwise for the tokenizers library."""
    tiktoken = pytest.importorskip("tiktoken")
    ranks = trained_ranks(TEXT, 40)
    pattern = (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
        r"|\s+(?!\S)|\s"
    )
    run = of_ranks(tmp_path / "run", 700, ranks)
    (run / "rest.json").write_text(json.dumps({"pat_str": pattern}))
    mend(run, tmp_path / "out", options=Options(tiktoken=str(run / "rest.json")))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    original = tiktoken.Encoding("own", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    for text in (TEXT, "12345678 1234", "a  \n  b  \n\n", "end   ", " \n \n  y \n"):
        assert tokenizer(text).input_ids == original.encode(text)


@pytest.mark.parametrize(("rope", "fourth"), [(None, "reserved_special_token_2"), ("llama3", "finetune_right_pad_id")])
def test_the_config_shows_the_list_of_llama(tmp_path, monkeypatch, rope, fourth):
    """With a list of the published length, which is shorter here."""
    ranks = trained_ranks(TEXT, 40)
    count = len(ranks)
    monkeypatch.setitem(PUBLISHED, "llama", count)
    more = {} if rope is None else {"rope_parameters": LLAMA31}
    official_folder(tmp_path / "run", "llama", vocab_size=count + 256, eos_token_id=[count + 1, count + 9], **more)
    write_ranks(tmp_path / "run/tokenizer.model", ranks)
    found = mend(tmp_path / "run", tmp_path / "out")
    assert f"tokenizer.json made from tokenizer.model, {count + 256} tokens" in found.changes
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer.convert_tokens_to_ids(["<|begin_of_text|>", "<|eot_id|>", f"<|{fourth}|>"])
    assert ids == [count, count + 9, count + 4]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin_of_text|>", "<|end_of_text|>")
    assert tokenizer("the").input_ids == [count, *by_ranks(ranks, "the")]


@pytest.mark.parametrize(
    ("entries", "count", "kind"),
    [
        ({"model_type": "llama"}, 128000, "llama3"),
        ({"model_type": "llama", "rope_scaling": {"type": "llama3"}}, 128000, "llama3.1"),
        ({"model_type": "llama"}, 32000, None),
        ({"model_type": "qwen3"}, 151643, "qwen3"),
        ({"model_type": "qwen2"}, 151643, None),  # Qwen2.5's have more special tokens
        ({}, 128000, None),
    ],
)
def test_lists_that_a_config_shows(entries, count, kind):
    assert kind_of(entries, count) == kind
