"""What lies beside the weights: tokenizer files and generation settings. A closed list is taken, never any code."""

import json
import os
import shutil
from pathlib import Path

import transformers
from transformers import AutoTokenizer

from .checkpoint import Checkpoint, read_json
from .errors import ConversionError, shown
from .safetensors_io import open_regular
from .sources import TEXT_FILES
from .verify import quiet

COPIED = tuple(name for name in TEXT_FILES if name not in ("config.json", "conversion.json", "tokenizer_config.json"))
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
PROBE_TEXTS = ("Hello world!", "  def f(x):\n\treturn x ** 2  # twice\n", "naïve café — 你好, мир 🙂 1234567890")


def copy_side_files(checkpoint: Checkpoint, target: Path, to_official: bool) -> list[str]:
    """Copy tokenizer files and generation settings.

    `tokenizer_config.json` is copied without `auto_map`, and with a class that every tool knows: the official
    `model_type` by which a tool would find another one is not there in our layout.

    Args:
        checkpoint: the source.
        target: an existing folder.
        to_official: whether the target is in an official layout.

    Returns:
        What a user should know.
    """
    notes: list[str] = []
    for name in COPIED:
        if os.path.lexists(checkpoint.folder / name):
            with open_regular(checkpoint._member(name)) as source, open(target / name, "xb") as copy:
                shutil.copyfileobj(source, copy)
    if os.path.lexists(checkpoint.folder / "generation_config.json"):
        read_json(checkpoint.folder / "generation_config.json")
    fast = (target / "tokenizer.json").exists()
    name = "tokenizer_config.json"
    if os.path.lexists(checkpoint.folder / name):
        path = checkpoint._member(name)
        settings = read_json(path)
        wanted = dict(settings)
        if wanted.pop("auto_map", None) is not None:
            notes.append(f"{name}: auto_map is dropped, the tokenizer's own code is not copied")
        kind = wanted.get("tokenizer_class")
        unknown = kind is not None and not hasattr(transformers, str(kind))
        if kind == "TokenizersBackend" or (fast and (unknown or (kind is None and not to_official))):
            wanted["tokenizer_class"] = "PreTrainedTokenizerFast"
        if unknown and kind != "TokenizersBackend":
            notes.append(f"{name}: tokenizer_class {shown(kind)} is not known to transformers")
        if wanted == settings:
            shutil.copyfile(path, target / name)
        else:
            _write_json(target / name, wanted)
    elif fast and not to_official:
        _write_json(target / name, {"tokenizer_class": "PreTrainedTokenizerFast"})
    return notes


def _write_json(path: Path, entries: dict) -> None:
    path.write_text(json.dumps(entries, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def refuse_adapters(folder: Path) -> None:
    """Refuse a folder of a PEFT adapter: its weights are not the whole model.

    Raises:
        ConversionError: naming the file.
    """
    for name in ADAPTERS:
        if os.path.lexists(folder / name):
            raise ConversionError(f"{folder / name}: an adapter; merge it into its model (merge_and_unload) first")


def compare_tokenizers(source: Path, target: Path) -> str | None:
    """Whether both folders' tokenizers give the same ids; None where there is no tokenizer, else what was found.

    Raises:
        ConversionError: they do not.
    """
    if not any((source / name).exists() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")):
        return None
    options = {"trust_remote_code": False, "local_files_only": True}
    with quiet():
        try:
            original = AutoTokenizer.from_pretrained(source, **options)
        except Exception as error:
            return f"tokenizers not compared: the source's cannot be loaded here ({type(error).__name__})"
        try:
            ids = AutoTokenizer.from_pretrained(target, **options)(list(PROBE_TEXTS)).input_ids
        except Exception as error:
            raise ConversionError(f"{target}: the copied tokenizer cannot be loaded: {error}") from error
        if ids != original(list(PROBE_TEXTS)).input_ids:
            raise ConversionError("the copied tokenizer gives other ids than the source's; report this family of it")
    return "tokenizers give the same ids"
