"""The files beside the weights: tokenizer and generation settings. Only known files are copied, never code."""

import os
import shutil
from pathlib import Path

from transformers import AutoTokenizer

from ..errors import CheckpointError, ConversionError, shown
from ..quiet import quiet
from .checkpoint import Checkpoint, json_text, read_json
from .safetensors_io import LFS_POINTER, open_regular
from .sentence_modules import sentence_files
from .sources import TEXT_FILES

COPIED = tuple(name for name in TEXT_FILES if name not in ("config.json", "conversion.json", "tokenizer_config.json"))
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
LOCAL = {"trust_remote_code": False, "local_files_only": True}
PROBE_TEXTS = ("Hello world!", "  def f(x):\n\treturn x ** 2  # twice\n", "naïve café — 你好, мир 🙂 1234567890")


def copy_side_files(checkpoint: Checkpoint, target: Path) -> list[str]:
    """Copy the files of the tokenizer, generation settings and sentence-transformers.

    `tokenizer_config.json` is copied without `auto_map`, and names the tokenizer class that really loads.

    Args:
        checkpoint: the source.
        target: an existing folder.

    Returns:
        Notes for the user.
    """
    notes: list[str] = []
    of_sentences, problem = sentence_files(checkpoint, target)
    notes += [problem] if problem else []
    for name in (*COPIED, *of_sentences):
        if os.path.lexists(checkpoint.folder / name):
            (target / name).parent.mkdir(exist_ok=True)
            with open_regular(checkpoint.member(name)) as source, open(target / name, "xb") as copy:
                if source.read(len(LFS_POINTER)) == LFS_POINTER:
                    path = checkpoint.folder / name
                    raise CheckpointError(f"{path}: a git-LFS pointer, not the file itself; run `git lfs pull` there")
                source.seek(0)
                shutil.copyfileobj(source, copy)
    if os.path.lexists(checkpoint.folder / "generation_config.json"):
        read_json(checkpoint.folder / "generation_config.json")
    name, settings = "tokenizer_config.json", {}
    if os.path.lexists(checkpoint.folder / name):
        settings = read_json(checkpoint.member(name))
    wanted = dict(settings)
    if wanted.pop("auto_map", None) is not None:
        notes.append(f"{name}: auto_map is dropped, the tokenizer's own code is not copied")
    found = _class_of_tokenizer(checkpoint.folder) if has_tokenizer(checkpoint.folder) else None
    kind = wanted.get("tokenizer_class")
    if kind == "TokenizersBackend" or (found is not None and _stem(kind) != _stem(found)):
        wanted["tokenizer_class"] = found or "PreTrainedTokenizerFast"
    elif kind is not None and found is None:
        notes.append(f"{name}: tokenizer_class {shown(kind)} cannot be loaded here; it is copied as it is")
    if wanted == settings and settings:
        shutil.copyfile(checkpoint.folder / name, target / name)
    elif wanted:
        (target / name).write_text(json_text(wanted), encoding="utf-8")
    return notes


def _class_of_tokenizer(folder: Path) -> str | None:
    """The tokenizer class that `AutoTokenizer` picks for a folder, by a name older tools know; None if it fails.

    It may differ from the one in `tokenizer_config.json`: some values of `model_type` override that. Ours does not, so
    the class must be written down.
    """
    try:
        with quiet():
            kind = type(AutoTokenizer.from_pretrained(folder, **LOCAL)).__name__
    except Exception:
        return None
    return "PreTrainedTokenizerFast" if kind == "TokenizersBackend" else kind


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has the files of a tokenizer."""
    return any((folder / name).exists() for name in ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model"))


def _stem(kind: object) -> str:
    return str(kind).removesuffix("Fast")


def refuse_adapters(folder: Path) -> None:
    """Refuse the folder of a PEFT adapter, whose weights are not a whole model.

    Raises:
        ConversionError: naming the file.
    """
    for name in ADAPTERS:
        if os.path.lexists(folder / name):
            raise ConversionError(f"{folder / name}: an adapter; merge it into its model (merge_and_unload) first")


def compare_tokenizers(source: Path, target: Path, to_official: bool) -> str | None:
    """Whether both folders' tokenizers give the same ids; None where there is no tokenizer, else what was found.

    Raises:
        ConversionError: they do not, or the copied one cannot be loaded. (On the way to an official layout that is only
            told: there the library may override the class that the files name.)
    """
    if not has_tokenizer(source):
        return None
    with quiet():
        try:
            original = AutoTokenizer.from_pretrained(source, **LOCAL)
        except Exception as error:
            return f"tokenizers not compared: the source's cannot be loaded here ({type(error).__name__})"
        try:
            copied = AutoTokenizer.from_pretrained(target, **LOCAL)
        except Exception as error:
            raise ConversionError(f"{target}: the copied tokenizer cannot be loaded: {error}") from error
        same = copied(list(PROBE_TEXTS)).input_ids == original(list(PROBE_TEXTS)).input_ids
    if same:
        return "tokenizers give the same ids"
    kinds = f"AutoTokenizer takes {type(copied).__name__} for it, and {type(original).__name__} for the source"
    if not to_official:
        raise ConversionError(f"the copied tokenizer gives other ids than the source's: {kinds}")
    return f"the copied tokenizer gives other ids than the source's: {kinds}; name the class when you load it"
