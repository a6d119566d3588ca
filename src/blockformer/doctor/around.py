"""The files around the weights against them: tokenizer, chat template, generation settings."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from blockformer.files.errors import ConversionError, shown
from blockformer.files.generation_settings import FILE
from blockformer.files.json_files import read_json
from blockformer.files.names import TOKENIZER_FILES
from blockformer.files.quiet import quiet
from blockformer.files.regular import LFS_POINTER, open_regular
from blockformer.files.tokenizer_bounds import MOST_BYTES, read_loosely

from .finding import ERROR, NOTE, WARNING, Finding, counted

IN_TEMPLATE = re.compile("<\\|[A-Za-z0-9_]{1,40}\\|>|<(?:start|end)_of_turn>|<[\uff5c|][^<>\\s]{1,40}[\uff5c|]>")
"""What a chat template writes that must be one token."""
MASKS = ("<mask>", "[MASK]")
"""Tokens that only training writes into a text."""
OF_ANOTHER = 0.5
"""The share of the embeddings' rows below which a tokenizer must be another model's."""
SPECIAL = ("bos", "eos", "pad")


def around_weights(folder: Path, entries: Mapping[str, Any], rows: int | None, longest: int | None) -> list[Finding]:
    """What the files next to the weights contradict.

    Args:
        folder: of the checkpoint.
        entries: of `config.json`.
        rows: of the embeddings; None if they are not known.
        longest: positions of the model; None for no bound.
    """
    if pointers := [name for name in TOKENIZER_FILES if _is_pointer(folder / name)]:
        said = f"{', '.join(pointers)}: a git-LFS pointer, not the file itself"
        return [Finding("pointer", ERROR, said, "run `git lfs pull` in its folder", names=tuple(pointers))]
    try:
        tokens, settings = tokens_in(folder), _object(folder / "tokenizer_config.json")
        generation = _object(folder / FILE)
    except ConversionError as error:
        return [Finding("json", ERROR, str(error), "mend or copy the file again")]
    findings = _of_generation(generation, rows, longest)
    if tokens:
        findings += _of_vocabulary(tokens, rows)
        findings += _of_special_tokens(tokens, settings, entries, generation)
        findings += _of_template(folder, tokens, settings)
    elif rows is not None and not any(folder.glob("*.model")) and not any(folder.glob("tokenizer*")):
        findings.append(Finding("tokenizer", NOTE, "the folder has no tokenizer", "copy its base model's tokenizer"))
    pad, eos = entries.get("pad_token_id"), entries.get("eos_token_id")
    if pad is not None and pad == eos:
        said = f"pad_token_id and eos_token_id are both {pad}: collators mask the end in training, and a classifier"
        findings.append(Finding("pad", NOTE, f"{said} that finds the last token by its id reads another one", ""))
    return findings


def _is_pointer(path: Path) -> bool:
    if not path.is_file():
        return False
    with open_regular(path) as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER


def tokens_in(folder: Path) -> dict[str, int]:
    """Token -> id, of a tokenizer whose files are text; {} for others.

    Raises:
        ConversionError: a file is damaged.
    """
    found: dict[str, int] = {}
    if (path := folder / "tokenizer.json").exists():
        entries = read_loosely(path)
        model = entries.get("model") if isinstance(entries, dict) else None
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(vocabulary, dict):
            found |= {str(token): each for token, each in vocabulary.items() if type(each) is int}
        elif isinstance(vocabulary, list):  # of a unigram model: [token, score]
            found |= {str(each[0]): place for place, each in enumerate(vocabulary) if isinstance(each, list) and each}
        added = entries.get("added_tokens") if isinstance(entries, dict) else None
        found |= _added(added)
        return found
    if (path := folder / "vocab.json").exists():
        found |= {str(token): each for token, each in read_json(path).items() if type(each) is int}
    elif (path := folder / "vocab.txt").exists():
        with open_regular(path) as file:
            text = file.read(MOST_BYTES).decode("utf-8", "replace")
        # Only at "\n": a token may be another character at which Python's splitlines would end a line.
        lines = text.removesuffix("\n").split("\n")
        found |= {line.removesuffix("\r"): place for place, line in enumerate(lines)}
    if found and (path := folder / "added_tokens.json").exists():
        found |= {str(token): each for token, each in read_json(path).items() if type(each) is int}
    return found


def _added(added: Any) -> dict[str, int]:
    entries = [each for each in added if isinstance(each, dict)] if isinstance(added, list) else []
    return {str(each.get("content")): each["id"] for each in entries if type(each.get("id")) is int}


def _object(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _of_vocabulary(tokens: Mapping[str, int], rows: int | None) -> list[Finding]:
    if rows is None:
        return []
    last = max(tokens.values())
    if last >= rows:
        beyond = [token for token, each in tokens.items() if each >= rows]
        said = f"the tokenizer has ids up to {last}, and the embeddings have {rows} rows"
        if {*beyond} <= {*MASKS}:
            said += f": the model was trained without {shown(beyond[0])}"
            return [Finding("tokenizer", WARNING, said, "keep it out of texts", names=tuple(beyond))]
        if len(beyond) > rows * (1 - OF_ANOTHER):
            fix = "it is another model's tokenizer: copy the right one"
        else:
            fix = "copy the tokenizer that the model was trained with, or resize_token_embeddings before training"
        named = f" ({counted(len(beyond), 'token')} beyond, such as {shown(beyond[0])})"
        return [Finding("tokenizer", ERROR, said + named, fix, names=tuple(beyond[:3]))]
    if last + 1 < OF_ANOTHER * rows:
        said = f"the tokenizer has {last + 1} ids, and the embeddings have {rows} rows"
        return [Finding("tokenizer", WARNING, said, "it looks like another model's tokenizer: copy the right one")]
    return []


def _of_special_tokens(
    tokens: Mapping[str, int], settings: Mapping[str, Any], entries: Mapping[str, Any], generation: Mapping[str, Any]
) -> list[Finding]:
    """Where the ids of special tokens in `config.json` and in the tokenizer are not the same."""
    findings = []
    by_id = {number: token for token, number in tokens.items()}
    for kind, (token, number) in special_tokens(tokens, settings).items():
        said = ids_in(entries.get(f"{kind}_token_id")) | ids_in(generation.get(f"{kind}_token_id"))
        if not said or number in said:
            continue
        theirs = ", ".join(f"{each} ({shown(by_id.get(each, 'no token'))})" for each in sorted(said))
        text = (
            f"the tokenizer's {kind} token is {shown(token)}, id {number}, and the config's {kind}_token_id is {theirs}"
        )
        severity = NOTE if kind == "pad" else WARNING
        fix = f'write "{kind}_token_id": {number}, if the model was trained with this tokenizer'
        findings.append(Finding("special-tokens", severity, text, fix))
    return findings


def _of_template(folder: Path, tokens: Mapping[str, int], settings: Mapping[str, Any]) -> list[Finding]:
    path = folder / "chat_template.jinja"
    text = path.read_text("utf-8", "replace") if path.is_file() else settings.get("chat_template")
    wanted = set(IN_TEMPLATE.findall(text)) if isinstance(text, str) else set()
    unknown = sorted(wanted - {*tokens})
    if not unknown:
        return []
    said = f"the chat template writes {', '.join(map(shown, unknown[:4]))}, and this tokenizer has no such tokens"
    fix = "it is another model's template: copy the one that belongs to the tokenizer, or add the tokens and train them"
    return [Finding("template", WARNING, said, fix, names=tuple(unknown[:4]))]


def _of_generation(generation: Mapping[str, Any], rows: int | None, longest: int | None) -> list[Finding]:
    findings = []
    for entry, value in generation.items():
        beyond = [each for each in ids_in(value) if rows is not None and each >= rows] if entry.endswith("_id") else []
        if beyond:
            said = f"{FILE}: {entry} is {beyond[0]}, and the embeddings have {rows} rows"
            findings.append(Finding("generation", ERROR, said, "write the id that the tokenizer has"))
    for entry in ("max_length", "max_new_tokens"):
        value = generation.get(entry)
        if longest is not None and type(value) is int and value > longest:
            said = f"{FILE}: {entry} is {value}, and the model has {longest} positions"
            findings.append(Finding("generation", WARNING, said, f"write at most {longest}"))
    if generation:
        with quiet(errors=True):
            try:
                GenerationConfig.from_dict(dict(generation)).validate(strict=True)
            except Exception as error:
                reason = " ".join(str(error).split())[:300]
                said = f"{FILE}: settings contradict each other: {reason}"
                findings.append(Finding("generation", WARNING, said, "remove those that are not meant"))
    return findings


def moved_tokens(folder: Path, other: Path, title: str) -> list[Finding]:
    """Where the tokenizer of a checkpoint and the tokenizer of its base differ."""
    try:
        ours, theirs = tokens_in(folder), tokens_in(other)
    except ConversionError:
        return []
    if not ours or not theirs:
        return []
    moved = [token for token, number in theirs.items() if token in ours and ours[token] != number]
    new = len({*ours} - {*theirs})
    if moved:
        first = f"{shown(moved[0])} is {ours[moved[0]]}, and {theirs[moved[0]]} there"
        said = f"{len(moved)} tokens have other ids than in {title}: {first}"
        return [
            Finding("tokenizer", ERROR, said, "the weights know the ids they were trained with: copy that tokenizer")
        ]
    return [Finding("tokenizer", NOTE, f"the tokenizer has {new} tokens more than that of {title}")] if new else []


def special_tokens_in(folder: Path) -> dict[str, tuple[str, int]]:
    """The tokenizer's special tokens with their ids, by their kinds: bos, eos, pad.

    Raises:
        ConversionError: a file is damaged.
    """
    return special_tokens(tokens_in(folder), _object(folder / "tokenizer_config.json"))


def special_tokens(tokens: Mapping[str, int], settings: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    """The same of a tokenizer with these tokens, by the entries of `tokenizer_config.json`."""
    found = {}
    for kind in SPECIAL:
        token = settings.get(f"{kind}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token in tokens:
            found[kind] = (token, tokens[token])
    return found


def ids_in(value: Any) -> set[int]:
    """The ids that an entry names: one, several, or none."""
    return {each for each in (value if isinstance(value, list) else [value]) if type(each) is int}
