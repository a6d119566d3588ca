"""Tokenizers of tiktoken as `tokenizer.json`: from a list of ranks, and the pattern and special tokens that it lacks.

A list has a line for each token, its bytes in base64 and its rank. The code that reads it has the rest: that of Llama 3
and of Qwen is known here, and any other is said in a file. Text becomes the same ids as in tiktoken.
"""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from blockformer.files.errors import CheckpointError, ConversionError, shown
from blockformer.files.json_files import read_json
from blockformer.files.regular import open_regular
from blockformer.files.tokenizer_bounds import MOST_BYTES

KEYS = ("pat_str", "special_tokens", "bos_token", "eos_token")
"""Entries of a file that says what a list of ranks lacks, as tiktoken's `Encoding` calls them."""
LINE = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+")
PIECE = re.compile(r"\\[pP]\{[^}]*\}|\\.|\[(?:\\.|[^\]\\])*\]|\{\d+(?:,\d*)?\}\+|.", re.DOTALL)
"""Pieces of a pattern: an escape, a class, a possessive count, or a character."""


@dataclass(frozen=True)
class Kind:
    """What the code of a family has, and its list of ranks lacks.

    Attributes:
        pattern: cuts a text into the pieces that are merged.
        special: tokens after the ranks, in the order of their ids.
        eos: the end of a text.
        bos: what each text begins with; "" for nothing.
        shown: the tokens of `special` that a decoded text keeps.
        composes: whether a text is brought into Unicode's composed form first.
    """

    pattern: str
    special: tuple[str, ...]
    eos: str
    bos: str = ""
    shown: tuple[str, ...] = ()
    composes: bool = False


def _words(digits: str) -> str:
    short = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    return rf"{short}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _llama(*special: str) -> Kind:
    """256 tokens: these, where an empty name is reserved, and further reserved ones."""
    reserved = iter(range(256))
    names = (each or f"reserved_special_token_{next(reserved)}" for each in [*special, *[""] * (256 - len(special))])
    return Kind(_words(r"\p{N}{1,3}"), tuple(f"<|{each}|>" for each in names), "<|end_of_text|>", "<|begin_of_text|>")


def _qwen(*special: str, shown: tuple[str, ...] = ()) -> Kind:
    names = ("endoftext", "im_start", "im_end", *special)
    return Kind(_words(r"\p{N}"), (*(f"<|{each}|>" for each in names), *shown), "<|endoftext|>", "", shown, True)


_HEADER = ("start_header_id", "end_header_id")
_PLACES = tuple(f"{kind}_{side}" for kind in ("object_ref", "box", "quad", "vision") for side in ("start", "end"))
_PADS = ("vision_pad", "image_pad", "video_pad")
_CODE = tuple(f"<|{each}|>" for each in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep"))
_QWEN25 = ("<tool_call>", "</tool_call>", *_CODE)
_QWEN3 = (*_QWEN25, "<tool_response>", "</tool_response>", "<think>", "</think>")
KINDS: Mapping[str, Kind] = {
    "llama3": _llama("begin_of_text", "end_of_text", *[""] * 4, *_HEADER, "", "eot_id"),
    "llama3.1": _llama(
        *("begin_of_text", "end_of_text", "", "", "finetune_right_pad_id", ""),
        *(*_HEADER, "eom_id", "eot_id", "python_tag"),
    ),
    "qwen": _qwen(*(f"extra_{number}" for number in range(205))),
    "qwen2": _qwen(),
    "qwen2.5": _qwen(*_PLACES, *_PADS, shown=_QWEN25),
    "qwen3": _qwen(*_PLACES, *_PADS, shown=_QWEN3),
}
"""Whose list it is -> the rest."""
PUBLISHED = {"llama": 128000, "qwen3": 151643, "qwen3_moe": 151643, "qwen3_next": 151643}
"""`model_type` -> tokens in the published list: with so many, the config says whose list it is."""


def ranks_in(folder: Path) -> Path | None:
    """The list of ranks in a folder; None if there is none, or several are."""
    names = [*folder.glob("*.tiktoken"), *folder.glob("*.model")]
    found = [path for path in names if path.is_file() and _is_list(path)]
    return found[0] if len(found) == 1 else None


def _is_list(path: Path) -> bool:
    with open_regular(path) as file:
        return LINE.fullmatch(file.read(4096).split(b"\n")[0].rstrip(b"\r")) is not None


def kind_of(entries: Mapping[str, Any], count: int) -> str | None:
    """Whose list it is, by the config and the number of its tokens; None where they do not show it."""
    name = str(entries.get("model_type"))
    if PUBLISHED.get(name) != count:
        return None
    rope = entries.get("rope_parameters") or entries.get("rope_scaling")
    is_long = isinstance(rope, dict) and "llama3" in (rope.get("rope_type"), rope.get("type"))
    return ("llama3.1" if is_long else "llama3") if name == "llama" else "qwen3"


def tokenizer_of_ranks(path: Path, asked: str | None, entries: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer of a list of ranks.

    Args:
        path: of the list.
        asked: one of `KINDS`, or a JSON file with a pattern and special tokens; None: what the config shows.
        entries: of `config.json`, which may say how a text ends.

    Raises:
        ConversionError: the config does not show it, or the kind is unknown.
        CheckpointError: the list or the file is damaged.
    """
    ranks = read_ranks(path)
    name = kind_of(entries, len(ranks)) if asked is None else asked
    if name is None:
        raise ConversionError(
            f"{path.name} is a list of ranks for tiktoken, whose pattern and special tokens are only in code: take the "
            f"tokenizer.json of the model that it was made of, or say whose it is: --tiktoken {' or '.join(KINDS)}, or "
            "a JSON file with pat_str and special_tokens"
        )
    kind = KINDS.get(name)
    if kind is None:
        return _of_file(path, ranks, name)
    special = {token: len(ranks) + place for place, token in enumerate(kind.special)}
    made = byte_tokenizer(ranks, kind.pattern, special, path, kind.shown)
    if kind.composes:
        made.normalizer = normalizers.NFC()
    if kind.bos:
        first = [(kind.bos, special[kind.bos])]
        made.post_processor = processors.TemplateProcessing(
            single=f"{kind.bos} $A", pair=f"{kind.bos} $A {kind.bos}:1 $B:1", special_tokens=first
        )
    return fast_tokenizer(made, bos_token=kind.bos, eos_token=_end(entries, special) or kind.eos)


def _end(entries: Mapping[str, Any], special: Mapping[str, int]) -> str | None:
    """The token that the config ends a text with."""
    ids = entries.get("eos_token_id")
    first = ids[0] if isinstance(ids, list) and ids else ids
    return next((token for token, number in special.items() if number == first), None)


def _of_file(path: Path, ranks: Mapping[bytes, int], file: str) -> PreTrainedTokenizerFast:
    if not Path(file).is_file():
        raise ConversionError(f"--tiktoken must be one of {', '.join(KINDS)}, or a JSON file, not {shown(file)}")
    content = read_json(file)
    if unknown := [name for name in content if name not in KEYS]:
        raise ConversionError(f"{file}: unknown {shown(unknown[0])}; there are {', '.join(KEYS)}")
    pattern, special = content.get("pat_str"), content.get("special_tokens", {})
    is_said = isinstance(special, dict) and all(type(number) is int for number in special.values())
    if not isinstance(pattern, str) or not is_said:
        raise ConversionError(f"{file}: needs pat_str, a pattern, and special_tokens, an id for each")
    named = {name: content.get(name) for name in ("bos_token", "eos_token")}
    if strange := [each for each in named.values() if each is not None and each not in special]:
        raise ConversionError(f"{file}: {shown(strange[0])} is not one of its special_tokens")
    return fast_tokenizer(byte_tokenizer(ranks, pattern, special, path), **named)


def fast_tokenizer(made: Tokenizer, **named: str | None) -> PreTrainedTokenizerFast:
    """A tokenizer for transformers, with special tokens by name where there are some."""
    there = {name: token for name, token in named.items() if token}
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False, **there)


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token -> rank.

    Raises:
        CheckpointError: it is damaged: ranks are missing, or not all bytes are tokens.
    """
    with open_regular(path) as file:
        lines = file.read(MOST_BYTES).split()
    try:
        tokens = [base64.b64decode(token, validate=True) for token in lines[::2]]
        ranks = dict(zip(tokens, map(int, lines[1::2]), strict=True))
    except (binascii.Error, ValueError) as error:
        raise CheckpointError(f"{path}: a damaged list of ranks, or cut short; copy it again") from error
    if [*ranks.values()] != [*range(len(lines) // 2)] or not all(bytes([each]) in ranks for each in range(256)):
        raise CheckpointError(f"{path}: a list of ranks without some of them, or without some bytes; copy it again")
    return ranks


def byte_tokenizer(
    ranks: Mapping[bytes, int],
    pattern: str,
    special: Mapping[str, int],
    path: Path,
    kept: tuple[str, ...] = (),
) -> Tokenizer:
    """A tokenizer with the ids of tiktoken.

    Args:
        ranks: token -> rank.
        pattern: as tiktoken reads it.
        special: special token -> id; they come after all others.
        path: of the file, for errors.
        kept: special tokens that a decoded text keeps.

    Raises:
        CheckpointError: the ids of special tokens do not follow one another, or the pattern cannot be read.
    """
    letters = bytes_to_unicode()

    def text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocabulary = {text(token): rank for token, rank in ranks.items()}
    merges = [(text(left), text(right)) for left, right in merges_of(ranks)]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    try:
        cut = pre_tokenizers.Split(Regex(read_otherwise(pattern)), "isolated")
    except Exception as error:  # the library raises a plain Exception
        raise CheckpointError(f"{path}: the pattern cannot be read: {shown(str(error))}") from error
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    for token, number in sorted(special.items(), key=lambda each: each[1]):
        if number != made.get_vocab_size():
            raise CheckpointError(f"{path}: {shown(token)} has the id {number}, and the next one is another")
        add = made.add_tokens if token in kept else made.add_special_tokens
        add([AddedToken(token, normalized=False)])
    return made


def merges_of(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """All pairs that give a token, by its rank: tiktoken merges whatever gives the token of the lowest rank."""
    for token, rank in sorted(ranks.items(), key=lambda each: each[1]):
        pairs = ((token[:place], token[place:]) for place in range(1, len(token)))
        both = [pair for pair in pairs if all(ranks.get(part, rank) < rank for part in pair)]
        yield from sorted(both, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def read_otherwise(pattern: str) -> str:
    """A pattern of tiktoken's as the tokenizers library must read it.

    There `$` is the end of each line too, and a count with `+` repeats in place of being possessive.

    Raises:
        ValueError: a group has a possessive count.
    """
    pieces: list[str] = []
    for piece in PIECE.findall(pattern):
        if piece == "$":
            pieces.append(r"\z")
        elif piece.startswith("{") and piece.endswith("+"):
            if not pieces or pieces[-1] == ")":
                raise ValueError(f"a group with {piece}")
            pieces[-1] = f"(?>{pieces[-1]}{piece[:-1]})"
        else:
            pieces.append(piece)
    return "".join(pieces)
