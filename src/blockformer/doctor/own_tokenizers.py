"""Tokenizers in the formats of training code, as `tokenizer.json`: nanochat's, llama2.c's and nanoGPT's of letters.

Each computes the same ids as the original, special tokens aside: the `tokenizers` package reads their text as one
token wherever it stands, and the originals only where they are asked to. Pickles are read with stand-ins, so nothing of
them is run.
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from blockformer.files.errors import CheckpointError, shown
from blockformer.files.names import VOCABULARIES
from blockformer.files.regular import open_regular
from blockformer.files.tokenizer_bounds import MOST_BYTES

from .stand_ins import StandIn, unpickled

BEGIN = "<|bos|>"
HEADER, PIECE = struct.Struct("<i"), struct.Struct("<fi")
SPECIAL = 3
"""Pieces at the beginning of llama2.c's file: unknown, begin, end; and then the 256 bytes."""


def write_own_tokenizer(source: Path, target: Path, rows: int | None) -> list[str]:
    """Write `tokenizer.json` of a tokenizer that lies in a format of its own code. Returns what is said of it.

    Args:
        source: the folder of the checkpoint.
        target: the folder that is written.
        rows: of the embeddings; None if they are not known.
    """
    if any((target / name).exists() for name in VOCABULARIES):
        return _of_ranks(target)
    for name, read in READERS.items():
        path = source / name
        if not path.is_file():
            continue
        try:
            made = read(path)
        except CheckpointError as error:
            return [f"no tokenizer written: {error}"]
        size = len(made)
        if rows is not None and size > rows:
            return [f"no tokenizer written: {name} has {size} tokens, and the embeddings have {rows} rows"]
        made.save_pretrained(target)
        return [f"tokenizer.json made from {name}, {size} tokens"]
    return []


def _of_ranks(folder: Path) -> list[str]:
    """The sentence on a list of ranks, which is only half a tokenizer: the pattern and special tokens are in code."""
    path = folder / "tokenizer.model"
    if not path.is_file() or (folder / "tokenizer.json").exists():
        return []
    with open_regular(path) as file:
        first = file.read(200).split(b"\n")[0].split(b" ")
    if len(first) != 2 or not first[1].isdigit():
        return []
    return [
        "tokenizer.model is a list of ranks for tiktoken, whose pattern and special tokens are only in code: use the "
        "tokenizer.json of its base model"
    ]


def _of_tiktoken(path: Path) -> PreTrainedTokenizerFast:
    """nanochat's `tokenizer.pkl`: an `Encoding` of tiktoken, with its pattern, ranks and special tokens."""
    state = getattr(_pickle(path), "state", {})
    ranks, special, pattern = (state.get(name) for name in ("mergeable_ranks", "special_tokens", "pat_str"))
    ranks = ranks if isinstance(ranks, dict) else {}
    special = special if isinstance(special, dict) else {}
    letters = bytes_to_unicode()
    is_whole = all(bytes([byte]) in ranks for byte in letters) and all(
        isinstance(token, bytes) and type(rank) is int for token, rank in ranks.items()
    )
    if not is_whole or not isinstance(pattern, str) or not all(type(each) is int for each in special.values()):
        raise CheckpointError(
            f"{path}: not an Encoding of tiktoken with its ranks; save it with pickle in its own code"
        )

    def text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocabulary = {text(token): rank for token, rank in ranks.items()}
    merges = [(text(left), text(right)) for left, right in merges_of(ranks)]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    _add_special(made, {str(token): number for token, number in special.items()}, path)
    named = {"bos_token": BEGIN} if BEGIN in special else {}
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False, **named)


def merges_of(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """All pairs that give a token, by its rank: tiktoken merges whatever gives the token of the lowest rank."""
    for token, rank in sorted(ranks.items(), key=lambda each: each[1]):
        pairs = ((token[:place], token[place:]) for place in range(1, len(token)))
        both = [pair for pair in pairs if all(ranks.get(part, rank) < rank for part in pair)]
        yield from sorted(both, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _add_special(made: Tokenizer, special: Mapping[str, int], path: Path) -> None:
    """Add special tokens, whose ids must come after all others."""
    for token, number in sorted(special.items(), key=lambda each: each[1]):
        if number != made.get_vocab_size():
            raise CheckpointError(f"{path}: {shown(token)} has the id {number}, and the next one is another")
        made.add_special_tokens([AddedToken(token, special=True, normalized=False)])


def _of_numbers(path: Path) -> PreTrainedTokenizerFast:
    """llama2.c's `tokenizer.bin`: sentencepiece's pieces with their scores, the space as a space."""
    pieces = list(_pieces(path))
    known = {text for text, _ in pieces}
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    if len(known) != len(pieces) or [text for text, _ in pieces[SPECIAL : SPECIAL + 256]] != byte_pieces:
        raise CheckpointError(f"{path}: not a tokenizer of llama2.c: its pieces are not unknown, begin, end, 256 bytes")
    special = ["<unk>", "<s>", "</s>"]
    texts = special + [text for text, _ in pieces[SPECIAL:]]
    vocabulary = {text: number for number, text in enumerate(texts)}
    score = {text: each[1] for text, each in zip(texts, pieces, strict=True)}
    merges = []
    for text in sorted(texts[SPECIAL + 256 :], key=lambda each: -score[each]):
        pairs = ((text[:place], text[place:]) for place in range(1, len(text)))
        merges += [pair for pair in pairs if all(part in vocabulary for part in pair)]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Prepend(" ")
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        clean_up_tokenization_spaces=False,
        **dict(zip(("unk_token", "bos_token", "eos_token"), special, strict=True)),
    )


def _pieces(path: Path) -> Iterator[tuple[str, float]]:
    """Text and score of each piece of llama2.c's file."""
    with open_regular(path) as file:
        data = file.read(MOST_BYTES)
    place = HEADER.size
    while place < len(data):
        if place + PIECE.size > len(data):
            raise CheckpointError(f"{path}: cut short; copy it again")
        score, length = PIECE.unpack_from(data, place)
        place += PIECE.size
        if length < 0 or place + length > len(data):
            raise CheckpointError(f"{path}: cut short, or not a tokenizer of llama2.c; copy it again")
        try:
            yield data[place : place + length].decode(), score
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path}: not a tokenizer of llama2.c: a piece is not a text") from error
        place += length


def _of_letters(path: Path) -> PreTrainedTokenizerFast:
    """nanoGPT's `meta.pkl`: an id for each letter; other letters are an error there, and here."""
    content = _pickle(path)
    ids = content.get("stoi") if isinstance(content, dict) else None
    if not isinstance(ids, dict) or not all(
        isinstance(each, str) and len(each) == 1 and type(number) is int for each, number in ids.items()
    ):
        raise CheckpointError(f"{path}: not the letters of nanoGPT: it has no stoi from letters to ids")
    made = Tokenizer(models.WordLevel(vocab=ids))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)


def _pickle(path: Path) -> StandIn | Any:
    with open_regular(path) as file:
        return unpickled(file, path.stat().st_size, str(path))


READERS: Mapping[str, Callable[[Path], PreTrainedTokenizerFast]] = {
    "tokenizer.pkl": _of_tiktoken,
    "tokenizer.bin": _of_numbers,
    "meta.pkl": _of_letters,
}
"""The file of a tokenizer -> what reads it."""
