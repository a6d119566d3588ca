"""The tokenizer next to a model: which class it is, whether it can be read here, whether a copy agrees."""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from .errors import ConversionError, is_failure, shown
from .json_files import read_json
from .names import OF_BYTES, SENTENCEPIECE_FILES, TEKKEN, VOCABULARIES
from .quiet import quiet
from .tokenizer_bounds import check_bounds

LOCAL = {"trust_remote_code": False, "local_files_only": True}
MADE = "tokenizer.json"
"""The file that the tokenizers library reads by itself, without sentencepiece."""
USUAL = "TokenizersBackend"
"""The class of the tokenizers library, as transformers 5 calls it; older tools know it as PreTrainedTokenizerFast."""
OF_MISTRAL = "MistralCommonBackend"
"""The class that needs mistral-common."""
TEXTS = (
    "Hello world!",
    "  def f(x):\n\treturn x ** 2  # twice\n",
    "naïve café — 你好, мир 🙂 1234567890",
    "",
    "Machine translation is the task of translating text from one language into another.  It is old.",
)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has the files of a tokenizer, or names one that needs no vocabulary."""
    settings = [folder / name for name in ("tokenizer_config.json", "config.json")]
    return any((folder / name).exists() for name in VOCABULARIES) or any(
        read_json(path, infinite=True).get("tokenizer_class") in OF_BYTES for path in settings if path.is_file()
    )


def check_readable(folder: Path) -> None:
    """Check that a folder's tokenizer is within bounds, and that the packages are here which it needs.

    Without sentencepiece, transformers loads some of these tokenizers in such a way that every word is unknown.

    Raises:
        ConversionError: it is too large, or sentencepiece is needed and missing.
    """
    check_bounds(folder)
    files = [name for name in SENTENCEPIECE_FILES if (folder / name).exists()]
    if not files or (folder / MADE).exists():
        return
    missing = [name for name in ("sentencepiece", "google.protobuf") if not _is_installed(name)]
    if missing:
        raise ConversionError(
            f"{folder / files[0]}: this tokenizer can be read only with sentencepiece, which is not installed here, so "
            "a copy of it could not be checked; run `pip install sentencepiece protobuf` and try again"
        )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def read(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that `AutoTokenizer` picks for a folder.

    Where mistral-common is installed, it picks that one's for Mistral's models. Of those that have a `tokenizer.json`
    we take the one that it picks elsewhere, so that nobody needs mistral-common.
    """
    found = AutoTokenizer.from_pretrained(folder, **LOCAL)
    if type(found).__name__ != OF_MISTRAL or not (folder / MADE).exists():
        return found
    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def load(folder: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder; None if there is none, or it cannot be loaded."""
    if not has_tokenizer(folder):
        return None
    try:
        with quiet():
            return read(folder)
    except BaseException as error:
        if is_failure(error):
            return None
        raise


def class_name(tokenizer: PreTrainedTokenizerBase) -> str:
    """The name of a tokenizer's class, by one that older tools know."""
    kind = type(tokenizer).__name__
    return "PreTrainedTokenizerFast" if kind == USUAL else kind


def make_fast(tokenizer: PreTrainedTokenizerBase, folder: Path, target: Path) -> bool:
    """Write `tokenizer.json` for a tokenizer that has only a SentencePiece file, so that nobody needs sentencepiece.

    Args:
        tokenizer: the source's.
        folder: the source.
        target: a folder with all other files of the tokenizer, and a `config.json`.

    Returns:
        Whether one was written: not where the source has one, or where the class is one in Python, or where it would
        be read otherwise, since only the SentencePiece file shows which tokens are special.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    wanted = any((folder / name).exists() for name in SENTENCEPIECE_FILES) and not (folder / MADE).exists()
    if not wanted or backend is None:
        return False
    made = target / MADE
    made.write_text(backend.to_str(pretty=True) + "\n", encoding="utf-8")
    copied = load(target)
    with quiet():
        is_same = copied is not None and not differences(tokenizer, copied)
    if not is_same:
        made.unlink()
    return is_same


def compare_tokenizers(original: PreTrainedTokenizerBase | None, target: Path) -> str | None:
    """Compare the tokenizer of a written folder with the source's.

    Args:
        original: the source's; None if it cannot be loaded.
        target: the folder that was written.

    Returns:
        A sentence for the report; None without a tokenizer.

    Raises:
        ConversionError: they give different ids, or only one of them can be loaded.
    """
    if not has_tokenizer(target):
        return None
    copied = load(target)
    if original is None and copied is None:
        return "tokenizers not compared: the source's cannot be loaded here"
    if original is None or copied is None:
        which = "the copied tokenizer" if copied is None else "the source's tokenizer, unlike its copy,"
        raise ConversionError(f"{target}: {which} cannot be loaded; fix the source's tokenizer, or remove its files")
    with quiet():
        unlike = differences(original, copied)
    if unlike:
        kind, other = type(original).__name__, type(copied).__name__
        what = f"AutoTokenizer loads it as {other}, and the source as {kind}; use verify=False, then load it with "
        what += f"{kind}.from_pretrained"
        if kind == other:
            what = "the source's files say more than a copy of them; let transformers write them anew first, with "
            what += "AutoTokenizer.from_pretrained(SOURCE).save_pretrained(SOURCE)"
        raise ConversionError(f"the copied tokenizer differs from the source's in {', '.join(unlike)}: {what}")
    return "tokenizers give the same ids"


def differences(original: PreTrainedTokenizerBase, copied: PreTrainedTokenizerBase) -> list[str]:
    """What two tokenizers do not do alike: ids of texts, pairs, padded batches and targets, tokens, chat template."""
    special = dict.fromkeys(str(token) for each in (original, copied) for token in each.all_special_tokens[:20])
    texts = [*TEXTS, f"a {' '.join(special)} b"]
    probes: dict[str, Callable[[Any], Any]] = {
        "ids of texts": lambda it: it(texts).data,
        "ids of pairs": lambda it: it(texts[0], texts[1]).data,
        "padded batches": lambda it: None if it.pad_token is None else it(texts, padding=True).data,
        "ids of target texts": lambda it: it(text_target=texts).data,
        "decoded text": lambda it: [it.decode(it(text).input_ids, skip_special_tokens=True) for text in texts],
        "special tokens": lambda it: {
            name: (str(token), it.convert_tokens_to_ids(str(token))) for name, token in it.special_tokens_map.items()
        },
        "the chat template": lambda it: it.chat_template,
        "lengths and sides": lambda it: (it.model_max_length, it.padding_side, it.truncation_side, len(it)),
    }
    return [name for name, probe in probes.items() if _outcome(probe, original) != _outcome(probe, copied)]


def _outcome(probe: Callable[[Any], Any], tokenizer: Any) -> Any:
    """What a probe gives; some tokenizers cannot do everything, and then the copy must not either."""
    try:
        return probe(tokenizer)
    except BaseException as error:
        if is_failure(error):
            return f"{type(error).__name__}"
        raise


def rewritten(settings: dict[str, Any], original: PreTrainedTokenizerBase | None) -> tuple[dict[str, Any], list[str]]:
    """`tokenizer_config.json` as our repo has it: without code to load, and with the class that really loads.

    `AutoTokenizer` looks at `model_type` before the entry, and ours is not the source's, so the class must be
    written down.

    Args:
        settings: the source's entries.
        original: the source's tokenizer; None if it cannot be loaded.

    Returns:
        The entries, and notes for the user.
    """
    wanted, notes = dict(settings), []
    if wanted.pop("auto_map", None) is not None:
        notes.append("tokenizer_config.json: auto_map is dropped, the tokenizer's own code is not copied")
    found = None if original is None else class_name(original)
    kind = wanted.get("tokenizer_class")
    if kind == USUAL or (found is not None and _stem(kind) != _stem(found)):
        wanted["tokenizer_class"] = found or "PreTrainedTokenizerFast"
    elif kind is not None and found is None:
        notes.append(f"tokenizer_config.json: tokenizer_class {shown(kind)} cannot be loaded here; it is left as it is")
    return wanted, notes


def usual_class(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The class that a source's tokenizer has where `tokenizer_config.json` names none; None for the usual one.

    `AutoTokenizer` finds it by `model_type`, so our repo must name it, also where a package is missing to load it.

    Args:
        folder: the source.
        config: its `config.json`.
    """
    if not has_tokenizer(folder):
        return None
    if (folder / TEKKEN).exists() and not (folder / MADE).exists():
        return OF_MISTRAL
    kind = config.get("tokenizer_class") or TOKENIZER_MAPPING_NAMES.get(str(config.get("model_type")))
    return None if kind == USUAL else kind


def _stem(kind: object) -> str:
    return str(kind).removesuffix("Fast")
