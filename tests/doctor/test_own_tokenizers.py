"""Tokenizers in the formats of training code: the same ids as the originals, by programs that encode as they do."""

import itertools
import pickle
import re
import struct
from collections import Counter

import pytest
import torch
from transformers import AutoTokenizer

from blockformer.doctor import mend

from .test_own_code import NANO, llama2_c, nano_gpt, write_numbers

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


def test_a_list_of_ranks_is_no_tokenizer(tmp_path):
    run = saved(tmp_path / "run")
    (run / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    assert "tokenizer.model is a list of ranks for tiktoken" in " ".join(mend(run, tmp_path / "out").changes)
