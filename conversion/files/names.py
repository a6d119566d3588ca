"""The names of a checkpoint's files: weights, tokenizers, licences, notes."""

import fnmatch
import re
from pathlib import Path, PurePosixPath, PureWindowsPath

from ..errors import CheckpointError, listed, shown
from .json_files import read_json

MAX_NAME = 255
"""Longest file name in bytes on all common systems."""

SENTENCEPIECE_FILES = (
    "spiece.model",
    "spm.model",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "tokenizer.model",
    "source.spm",
    "target.spm",
)
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", *SENTENCEPIECE_FILES)
"""Files of which each shows that there is a tokenizer."""
TOKENIZER_FILES = (
    *VOCABULARIES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "bpe.codes",
    "dict.txt",
    "target_vocab.json",
    "unigram.json",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)
SENTENCE_FILES = (
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "[0-9]*_*/config.json",
    "[0-9]*_Dense/pytorch_model.bin",
    "[0-9]*_Dense/model.safetensors",
)
"""The files that `sentence-transformers` reads in addition to the model, as names and patterns of names."""
LEGAL = re.compile(r"(LICEN[CS]E|COPYING|NOTICE|USE_POLICY|USAGE_POLICY|ACCEPTABLE_USE)[\w.-]*", re.IGNORECASE)
"""Licences and what belongs to them; they travel with the weights."""
GENERATION = re.compile(r"generation_config(_for_\w+)?\.json")
NOTES = (".md", ".txt", ".json", ".cff", ".yaml", ".yml")
"""Endings of small texts next to a model: its card, what it was trained on, how it was evaluated."""
LARGEST_NOTE = 1 << 20
"""Bytes of the longest of these texts that is kept for the way back."""
HEADS = ("colbert_linear.pt", "sparse_linear.pt")
"""Further heads of BGE-M3, which FlagEmbedding reads."""
WEIGHTS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""Weights, the first found wins: one file, or the index of several."""
INDEX = re.compile(r".+\.index(\.[\w.-]+)?\.json")
"""The index of a model's weight files, or of a variant's."""
VARIANT = re.compile(r"(model|pytorch_model)\.(\w+\.index\.)?(?P<variant>[\w-]+)\.(?(2)json|(safetensors|bin))")
"""The single file of a variant of the weights, or its index."""
PICKLED_SUFFIXES = (".bin", ".pt", ".pth")
WEIGHT_FILES = (*PICKLED_SUFFIXES, ".safetensors")


def weights_of(variant: str | None = None, use_safetensors: bool | None = None) -> tuple[tuple[str, str], ...]:
    """The names of weights that are looked for, as `WEIGHTS` has them.

    Args:
        variant: stands before the ending, as transformers puts it: `model.fp16.safetensors`, and the index
            `model.safetensors.index.fp16.json`.
        use_safetensors: True and False leave one of the two formats.
    """
    pairs = [pair for pair in WEIGHTS if use_safetensors is None or pair[0].endswith(".safetensors") == use_safetensors]
    if variant:
        pairs = [(_with_variant(single, variant), _with_variant(index, variant)) for single, index in pairs]
    return tuple(pairs)


def _with_variant(name: str, variant: str) -> str:
    stem, _, ending = name.rpartition(".")
    return f"{stem}.{variant}.{ending}"


def roots_of(folder: Path) -> list[Path]:
    """The folders in which a folder's files may lie: itself and, for the Hub's cache, the store that its links lead to.

    There, `snapshots/<revision>/<name>` is a link to `blobs/<hash>`.
    """
    home = folder.resolve()
    snapshots = (part.parent for part in (home, *home.parents) if part.parent.name == "snapshots")
    return [home, *(each.parent / "blobs" for each in snapshots)][:2]


def is_side_file(name: str, size: int = 0) -> bool:
    """Whether a file next to the weights, by its name in the source and its size in bytes, is one that is read."""
    if name.startswith("additional_chat_templates/"):
        return name.endswith(".jinja") and name.count("/") == 1
    if "/" in name:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in SENTENCE_FILES) and name.count("/") == 1
    known = name in ("config.json", "conversion.json", *TOKENIZER_FILES, *SENTENCE_FILES, *HEADS)
    is_note = name.endswith(NOTES) and not INDEX.fullmatch(name) and size <= LARGEST_NOTE
    return known or is_note or LEGAL.fullmatch(name) is not None or GENERATION.fullmatch(name) is not None


def weight_map(path: Path) -> dict[str, str]:
    """The `weight_map` of an index: tensor name -> file name next to the index. `metadata` is optional."""
    places = read_json(path).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{path}: weight_map must be an object that maps tensor names to file names")
    bad = [f"{shown(file)} for {shown(name)}" for name, file in places.items() if not _plain_name(file)]
    if bad:
        raise CheckpointError(f"{path}: weight_map must name files in the same folder:{listed(bad)}")
    return places


def _plain_name(name: object) -> bool:
    """Whether this is a bare file name on every system."""
    if not isinstance(name, str) or not name.isprintable() or len(name.encode()) > MAX_NAME:
        return False
    return name not in ("", ".", "..") and PurePosixPath(name).name == name == PureWindowsPath(name).name
