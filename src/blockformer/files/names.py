"""The names of a checkpoint's files: weights, tokenizers, licences, notes."""

import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from .errors import CheckpointError, listed, shown
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
TEKKEN = "tekken.json"
"""The vocabulary of Mistral's later models, which mistral-common reads."""
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "vocab-src.json", TEKKEN, *SENTENCEPIECE_FILES)
"""Files any of which shows that there is a tokenizer."""
OF_BYTES = ("ByT5Tokenizer",)
"""Classes of tokenizers that read bytes, and so have no such file."""
TOKENIZER_FILES = (
    *VOCABULARIES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "bpe.codes",
    "dict.txt",
    "target_vocab.json",
    "vocab-tgt.json",
    "unigram.json",
    "chat_template.jinja",
    "chat_template.json",
)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""The settings by which pictures and sound are read."""
MODULES = "modules.json"
"""The file that names the modules of a repo of sentence-transformers, and their folders."""
ROUTER = "router_config.json"
"""The settings of a Router, a module of other modules. They are named after folders next to it."""
SETTINGS = "config_sentence_transformers.json"
"""The settings of sentence-transformers itself."""
BODIES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""The settings of the model itself among the modules: the first that is there counts."""
SENTENCE_FILES = (MODULES, ROUTER, SETTINGS, *BODIES)
"""The files that `sentence-transformers` reads in addition to the model's."""
MODULE_PICKLE, MODULE_WEIGHTS = "pytorch_model.bin", "model.safetensors"
"""The weights of a module; if both files exist, the second is read."""
OUR_FOLDERS = ("conversion", "custom_generate")
"""Folders of a repo that only ours have."""
LEGAL = re.compile(r"(LICEN[CS]E|COPYING|NOTICE|USE_POLICY|USAGE_POLICY|ACCEPTABLE_USE)[\w.-]*", re.IGNORECASE)
"""Licences and what belongs to them; they travel with the weights."""
GENERATION = re.compile(r"generation_config(_for_\w+)?\.json|decision(\.json|_template\.jinja)")
"""The settings by which a model writes, or answers questions in the pipeline "decision" of transformers 5.24."""
VERSIONED_TOKENIZER = re.compile(r"tokenizer\.[\w.-]+\.json")
"""A `tokenizer.json` from some release of transformers on, which `fast_tokenizer_files` of its settings names."""
FURTHER_TEMPLATE = re.compile(r"additional_chat_templates/[^/]*\.jinja")
"""A chat template next to the usual one."""
FEW_BITS = ("hf_quant_config.json", "quantize_config.json")
"""Settings of weights in few bits, by ModelOpt and GPTQ. They do not go back next to plain weights."""
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
WEIGHT_NAMES = tuple(name for pair in WEIGHTS for name in pair)
INDEX = re.compile(r".+\.index(\.[\w.-]+)?\.json")
"""The index of a model's weight files, or of a variant's."""
VARIANT = re.compile(r"(model|pytorch_model)\.(\w+\.index\.)?(?P<variant>[\w-]+)\.(?(2)json|(safetensors|bin))")
"""The single file of a variant of the weights, or its index."""
CODE_FILES = (".py", ".sh", ".ipynb", ".js", ".ts", ".cu", ".cpp", ".c", ".h", ".so")
STATE_DICTS = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts save a model's state dict, next to the epoch and the optimizer's state."""
WRAPPERS = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
}
"""Parts of tensor names -> what puts them there."""
PARALLEL, OF_PARALLEL = "module", "DistributedDataParallel or DeepSpeed"
"""The same, at the beginning of all names."""
PEFT = "base_model.model."
"""What PEFT puts before all names."""
ADAPTED = (".base_layer.", ".modules_to_save.", ".original_module.")
"""Parts of names in a model that PEFT has adapted."""
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
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


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights that are read, or an index of them."""
    return any(os.path.lexists(folder / name) for name in WEIGHT_NAMES)


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
    if "/" in name:
        return FURTHER_TEMPLATE.fullmatch(name) is not None
    known = name in ("config.json", "conversion.json", *TOKENIZER_FILES, *SENTENCE_FILES, *HEADS)
    is_note = name.endswith(NOTES) and not INDEX.fullmatch(name) and size <= LARGEST_NOTE
    return known or is_note or any(kind.fullmatch(name) for kind in (GENERATION, LEGAL, VERSIONED_TOKENIZER))


NUMBERED = re.compile(r"[0-9]{1,2}_\w+")
"""The name of a module's folder. A repo may have several projections, of which `modules.json` names one."""


def module_folders(names: Iterable[str], modules: Any, router: Any = None) -> list[str]:
    """The folders of modules in a repo of sentence-transformers, without the repo itself.

    Args:
        names: its files.
        modules: the content of `modules.json`.
        router: the content of `router_config.json` next to it, if there is one.
    """
    named = [PurePosixPath(path).as_posix() for path in module_paths(modules, router) if is_inner(path)]
    tops = {name.partition("/")[0] for name in names if "/" in name}
    folders = dict.fromkeys([*named, *sorted(filter(NUMBERED.fullmatch, tops))])
    return [folder for folder in folders if folder != "."]


def module_paths(modules: Any, router: Any = None) -> list[Any]:
    """What `modules.json` and `router_config.json` have as the folders of modules, whatever it is."""
    paths = [each.get("path") for each in modules if isinstance(each, dict)] if isinstance(modules, list) else []
    kinds = router.get("types") if isinstance(router, dict) else None
    return [*paths, *(kinds if isinstance(kinds, dict) else ())]


def is_inner(path: Any) -> bool:
    """Whether this is the source or a folder in it, on every system, and none of git's or ours."""
    if not isinstance(path, str) or not (path.isprintable() and len(path.encode()) <= MAX_NAME):
        return False
    first, *_ = (*PurePosixPath(path).parts, "")
    leads_out = PureWindowsPath(path).anchor or "\\" in path or ".." in PurePosixPath(path).parts
    return not leads_out and not first.startswith(".") and first not in OUR_FOLDERS


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


def under_a_key(key: str) -> str:
    """What to do about a pickled file whose tensors lie under a key where they are not looked for."""
    return (
        f"not a flat dict of names to plain tensors ({shown(key)}: is a dict of them, where no class looks); "
        f"save only them, as torch.save(torch.load(FILE, weights_only=True)[{key!r}], FILE) does"
    )


def of_a_wrapper(names: Iterable[str]) -> str | None:
    """What to do about tensors that were saved from something around a model, whose names no class reads; or None.

    Args:
        names: of the tensors; a key of a pickled file that holds all of them counts too.
    """
    known = list(names)
    for key in STATE_DICTS:
        if key in known:
            return under_a_key(key)
    adapted = next((name for name in known if any(part in name for part in ADAPTED)), None)
    if adapted or (known and all(name.startswith(PEFT) for name in known)):
        first = adapted or known[0]
        return (
            f"no tensor name matches: {shown(first)} is a name in a model that PEFT has adapted; save the model that "
            "its merge_and_unload() returns"
        )
    found = {name: part for name in known for part in name.split(".")[:-1] if part in WRAPPERS}
    if not found and known and all(name.startswith(f"{PARALLEL}.") for name in known):
        found = dict.fromkeys(known, PARALLEL)
    if not found:
        return None
    first, part = next(iter(found.items()))
    source = WRAPPERS.get(part, OF_PARALLEL)
    return (
        f"no tensor name matches: {shown(first)} and {len(found) - 1} others would without the prefix {part + '.'!r} "
        f"of {source}; save the model in it (accelerate's unwrap_model returns it), or take it out of the names, as "
        "blockformer doctor FOLDER --mend NEW does"
    )
