"""Tokenizers in the formats of training code, as `tokenizer.json`: tiktoken's, llama2.c's and nanoGPT's of letters.

Each computes the same ids as the original, except for special tokens: the `tokenizers` package always reads their text
as one token, the originals only on request. Pickles are read with stand-ins, so nothing of
them is run.
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from blockformer.files.errors import CheckpointError, ConversionError
from blockformer.files.json_files import read_json
from blockformer.files.names import VOCABULARIES
from blockformer.files.regular import open_regular
from blockformer.files.tokenizer_bounds import MOST_BYTES

from .around import special_tokens
from .rank_lists import byte_tokenizer, fast_tokenizer, ranks_in, tokenizer_of_ranks
from .stand_ins import StandIn, unpickled

BEGIN = "<|bos|>"
ORIGINAL = "original"
"""Where the published repos of Llama 3 have the list of ranks."""
HEADER, PIECE = struct.Struct("<i"), struct.Struct("<fi")
SPECIAL = 3
"""Pieces at the beginning of llama2.c's file: unknown, begin, end; and then the 256 bytes."""


def write_own_tokenizer(
    source: Path, target: Path, rows: int | None, entries: Mapping[str, Any], tiktoken: str | None = None
) -> list[str]:
    """Write `tokenizer.json` of a tokenizer that lies in its own code's format. Returns a sentence for the report.

    Args:
        source: the folder of the checkpoint.
        target: the folder that is written.
        rows: of the embeddings; None if they are not known.
        entries: of `config.json`.
        tiktoken: what a list of ranks lacks; see `rank_lists.tokenizer_of_ranks`.

    Raises:
        ConversionError: `tiktoken` does not make a tokenizer.
    """
    ranks = ranks_in(source)
    has_another = any((target / name).exists() for name in VOCABULARIES if ranks is None or name != ranks.name)
    if tiktoken is not None and (ranks is None or has_another):
        said = "has a tokenizer" if has_another else "has no list of ranks (*.tiktoken or tokenizer.model)"
        raise ConversionError(f"--tiktoken makes a tokenizer of a list of ranks, and {source} {said}; leave it out")
    if ranks is not None and not has_another:
        said = _written(ranks, target, rows, lambda path: tokenizer_of_ranks(path, tiktoken, entries), tiktoken)
        if (target / "tokenizer.json").exists() and (target / ranks.name).exists():
            (target / ORIGINAL).mkdir()
            (target / ranks.name).rename(target / ORIGINAL / ranks.name)  # libraries take it for sentencepiece's
        return [said]
    if has_another:
        return []
    files = ((source / name, read) for name, read in READERS.items())
    return next(([_written(path, target, rows, read)] for path, read in files if path.is_file()), [])


def _written(
    path: Path,
    target: Path,
    rows: int | None,
    read: Callable[[Path], PreTrainedTokenizerFast],
    asked: str | None = None,
) -> str:
    """Write the tokenizer of a file, or say why not. If the user named it (`asked`), not writing it is an error."""
    try:
        made = read(path)
        if rows is not None and len(made) > rows:
            raise CheckpointError(f"{path.name} has {len(made)} tokens, and the embeddings have {rows} rows")
    except ConversionError as error:
        if asked is not None:
            raise
        return f"no tokenizer written: {error}"
    if (there := target / "tokenizer_config.json").exists():
        _keep(read_json(there), made)
    made.save_pretrained(target)
    return f"tokenizer.json made from {path.name}, {len(made)} tokens"


def _keep(settings: Mapping[str, Any], made: PreTrainedTokenizerFast) -> None:
    """Keep the chat template and the special tokens of the settings that lie there."""
    if isinstance(settings.get("chat_template"), str):
        made.chat_template = settings["chat_template"]
    for kind, (token, _) in special_tokens(made.get_vocab(), settings).items():
        setattr(made, f"{kind}_token", token)


def _of_tiktoken(path: Path) -> PreTrainedTokenizerFast:
    """nanochat's `tokenizer.pkl`: an `Encoding` of tiktoken, with its pattern, ranks and special tokens."""
    state = getattr(_pickle(path), "state", {})
    ranks, special, pattern = (state.get(name) for name in ("mergeable_ranks", "special_tokens", "pat_str"))
    ranks = ranks if isinstance(ranks, dict) else {}
    special = special if isinstance(special, dict) else {}
    is_whole = all(bytes([byte]) in ranks for byte in range(256)) and all(
        isinstance(token, bytes) and type(rank) is int for token, rank in ranks.items()
    )
    if not is_whole or not isinstance(pattern, str) or not all(type(each) is int for each in special.values()):
        raise CheckpointError(
            f"{path}: not an Encoding of tiktoken with its ranks; save it with pickle in its own code"
        )
    made = byte_tokenizer(ranks, pattern, {str(token): number for token, number in special.items()}, path)
    return fast_tokenizer(made, bos_token=BEGIN if BEGIN in special else None)


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
    return fast_tokenizer(made, **dict(zip(("unk_token", "bos_token", "eos_token"), special, strict=True)))


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
    return fast_tokenizer(made)


def _pickle(path: Path) -> StandIn | Any:
    with open_regular(path) as file:
        return unpickled(file, path.stat().st_size, str(path))


READERS: Mapping[str, Callable[[Path], PreTrainedTokenizerFast]] = {
    "tokenizer.pkl": _of_tiktoken,
    "tokenizer.bin": _of_numbers,
    "meta.pkl": _of_letters,
}
"""The file of a tokenizer -> what reads it."""
