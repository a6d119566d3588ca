"""The names of a checkpoint's files: weights, tokenizers, licences, notes."""

import fnmatch
import re
from collections.abc import Iterable
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
STATE_DICTS = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts save a model's state dict, next to the epoch and the optimizer's state."""
WRAPPERS = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
}
"""Parts of tensor names -> what puts them there."""
PARALLEL = "module"
"""The same, at the beginning of all names."""
PICKLED_SUFFIXES = (".bin", ".pt", ".pth")
WEIGHT_FILES = (*PICKLED_SUFFIXES, ".safetensors")


def is_side_file(name: str, size: int = 0) -> bool:
    """Whether a file next to the weights, by its name in the source and its size in bytes, is one that is read."""
    if name.startswith("additional_chat_templates/"):
        return name.endswith(".jinja") and name.count("/") == 1
    if "/" in name:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in SENTENCE_FILES) and name.count("/") == 1
    known = name in ("config.json", "conversion.json", *TOKENIZER_FILES, *SENTENCE_FILES, *HEADS)
    is_index = name.endswith(".index.json")
    is_note = name.endswith(NOTES) and not is_index and size <= LARGEST_NOTE
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


def of_a_wrapper(names: Iterable[str]) -> str | None:
    """What to do about tensors that were saved from something around a model, whose names no class reads; or None.

    Args:
        names: of the tensors; a key of a pickled file that holds all of them counts too.
    """
    known = list(names)
    for key in STATE_DICTS:
        if key in known:
            return (
                f"not a flat dict of names to plain tensors ({shown(key)}: is a dict of them, where no class looks); "
                f"save only them, as torch.save(torch.load(FILE, weights_only=True)[{key!r}], FILE) does"
            )
    found = {name: part for name in known for part in name.split(".")[:-1] if part in WRAPPERS}
    if not found and known and all(name.startswith(f"{PARALLEL}.") for name in known):
        found = dict.fromkeys(known, PARALLEL)
    if not found:
        return None
    first, part = next(iter(found.items()))
    source = WRAPPERS.get(part, "DistributedDataParallel or DeepSpeed")
    return (
        f"no tensor name matches: {shown(first)} and {len(found) - 1} others would without the prefix {part + '.'!r} "
        f"of {source}; save the model in it (unwrap_model of accelerate gives it), or take it out of the names"
    )
