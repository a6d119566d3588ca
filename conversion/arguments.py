"""Checks of arguments that need no file to be opened. The command line makes them before importing torch."""

import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from blockformer.files.atomic import check_target
from blockformer.files.containers import what_it_is
from blockformer.files.errors import ConversionError, shown
from blockformer.files.names import WEIGHT_FILES
from blockformer.files.new_repo import RepoOptions, check_flag
from blockformer.files.progress import Progress, silent
from blockformer.files.sentence_settings import POOLINGS
from blockformer.files.sources import GGUF, folder_of, weight_file

from .families.index import ARTICLES, NAMES
from .options import check_reading, nearest, refuse_given

FAMILIES = sorted(NAMES)
"""The names of the official families."""
VERIFICATIONS = ("auto", "quick", "full", "none")
LARGE = 500_000_000
"""Parameters above which the comparison is quick by default."""
DTYPES = ("float32", "bfloat16", "float16")
FLAGS = {
    "topology": "--as", "layers": "--layers", "kv_heads": "--kv-heads", "experts": "--experts", "tokens": "--tokens",
    "template": "--template", "pooling": "--pooling", "bidirectional": "--bidirectional", "prompts": "--prompt",
}  # fmt: skip
"""The arguments of a new shape or a repo for search, as the command line has them."""
USES = {"reranker": ("tokens", "template"), "embedder": ("pooling", "bidirectional", "prompts")}
"""What a decoder can be made into for search -> the options that only this use has."""
OF_USES = {name: [use for use, own in USES.items() if name in own] for names in USES.values() for name in names}
"""Option -> which of them has it."""
_SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def check_conversion(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    *,
    function: str = "convert",
    to_official: bool = False,
    family: str | None = None,
    config: str | PathLike[str] | None = None,
    into: str | PathLike[str] | None = None,
    dtype: Any = None,
    dequantize: Any = None,
    max_shard_size: int | str = "5GB",
    force: bool = False,
    strict_finite: bool = False,
    progress: Progress | None = None,
    sign: str | PathLike[str] | None = None,
    verify: bool | str = "auto",
    shape: Mapping[str, Any] | None = None,
    **reading: Any,
) -> RepoOptions:
    """Check the arguments of `convert`, `convert_reshaped`, `convert_for_search` or `export_folder`.

    Args:
        src, dst: the source and the folder to make.
        function: which of them.
        to_official, family, config, into, dtype, dequantize, max_shard_size, force, strict_finite, progress, sign,
            verify: as it has them.
        shape: the arguments of a new shape (`FLAGS`) that are given; None for a conversion that keeps it.
        reading: all its other options.

    Returns:
        How the repo is written.

    Raises:
        ConversionError: one is wrong, or they contradict each other.
    """
    check_reading(function, reading)
    options = RepoOptions(max_shard_size, force, strict_finite, sign, progress or silent)
    verification(verify)
    dtype_name(dtype if dequantize is None else dequantize)
    if dequantize is not None and (to_official or dtype is not None):
        other = "to_official=True" if to_official else "dtype (--dtype)"
        raise ConversionError(
            f"dequantize (--dequantize) cannot be combined with {other}: it writes plain weights of its own dtype in "
            "our layout; leave one of the two out"
        )
    if shape is not None and verification(verify) in ("full", "quick"):
        flags = ", ".join(FLAGS[each] for each in shape) or "convert_reshaped"
        raise ConversionError(
            f"{flags}: a new shape cannot be combined with verify={verify!r}; a new shape computes something else; "
            "leave verify out"
        )
    check_source(src, family, config, to_official, **reading)
    if into is not None:
        _check_into(into, to_official, family=family, dtype=dtype, max_shard_size=max_shard_size)
    check_target(dst, force, [path for path in (src, config, into) if path is not None and os.path.exists(path)])
    return options


def _check_into(into: str | PathLike[str], to_official: bool, **given: Any) -> None:
    """Check the composite checkpoint into which a text goes back, and that no option asks for what it decides."""
    if not to_official:
        raise ConversionError("into (--into) is for the official layout; add to_official=True, or leave it out")
    if not os.path.isdir(into):
        raise ConversionError(
            f"{into}: no such folder; into (--into) needs the whole checkpoint: hf download ID --local-dir FOLDER"
        )
    for name, value in given.items():
        if value != {"max_shard_size": "5GB"}.get(name):
            raise ConversionError(f"into (--into) keeps the {name} of {into}; leave {name} out")


def check_use(use: str, *, bidirectional: bool = False, **given: Any) -> None:
    """Check what a repo for search is to be, and its own options.

    Raises:
        ConversionError: one is wrong, missing, or another's.
    """
    if use not in USES:
        raise ConversionError(f"use must be one of {', '.join(USES)}, not {shown(use)}")
    check_flag("bidirectional", bidirectional)
    for name, value in {**given, "bidirectional": bidirectional or None}.items():
        if value is not None and name not in USES[use]:
            other = OF_USES[name][0]
            raise ConversionError(f"{name} is an option of --as {other}; leave it out of --as {use}")
    tokens, template, pooling, prompts = (given.get(each) for each in ("tokens", "template", "pooling", "prompts"))
    if use == "reranker":
        if isinstance(tokens, str) or not tokens or len(tokens) > 2 or not all(map(_is_word, tokens)):
            fix = 'use ("no", "yes"), or one token whose logit is the score (--tokens no,yes)'
            said = f"must be two tokens of the vocabulary or one, not {shown(tokens)}" if tokens else "are missing"
            raise ConversionError(f"tokens {said}; {fix}")
        if template is not None and not os.path.isfile(template):
            raise ConversionError(f"{template}: no such file; template (--template) names a chat template in Jinja")
    if pooling is not None and pooling not in POOLINGS:
        raise ConversionError(f"pooling must be one of {', '.join(POOLINGS)}, not {shown(pooling)}")
    if prompts is not None and not (isinstance(prompts, Mapping) and all(map(_is_word, [*prompts, *prompts.values()]))):
        raise ConversionError(f"prompts must map names to texts, such as query to 'query: ', not {shown(prompts)}")


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def verification(verify: bool | str) -> str:
    """How thoroughly to compare the models: one of `VERIFICATIONS`; True means "full", False "none".

    Raises:
        ConversionError: it is none of them.
    """
    name = {True: "full", False: "none"}.get(verify, verify) if isinstance(verify, bool) else verify
    if name not in VERIFICATIONS:
        raise ConversionError(f"verify must be one of {', '.join(VERIFICATIONS)}, not {shown(name)}")
    return name


def is_quick(verify: bool | str, parameters: int) -> bool:
    """Whether models of so many parameters are compared on few texts."""
    level = verification(verify)
    return level == "quick" or (level == "auto" and parameters > LARGE)


def dtype_name(dtype: Any) -> str | None:
    """The full name of a dtype given by name or as torch's own; None stays None.

    Raises:
        ConversionError: weights cannot be cast to it.
    """
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    name = _SHORT_DTYPES.get(name, name)
    if name not in DTYPES:
        raise ConversionError(f"dtype must be one of {', '.join(DTYPES)}, not {shown(name)}")
    return name


def check_family(name: str) -> None:
    """Check the name of a family.

    Raises:
        ConversionError: the family is unknown; the nearest is named.
    """
    known = [*FAMILIES, *ARTICLES]
    if name not in known:
        raise ConversionError(
            f"no family is called {shown(name)}.{nearest(name, known)} docs/supported.md lists them; without a name, "
            "the family is detected"
        )


def check_source(
    source: str | PathLike[str],
    family: str | None,
    config: str | PathLike[str] | None,
    to_official: bool,
    **reading: Any,
) -> None:
    """Check that a local source exists, and that family, settings and what is read (`Reading`) suit it.

    Raises:
        ConversionError: it does not, or they do not.
    """
    if family is not None:
        check_family(family)
    if family in ARTICLES:
        if to_official:
            raise ConversionError(
                f"the family '{family}' can be read but not written; leave out to_official=True, or name another family"
            )
        if config is None:
            raise ConversionError(
                f"the family '{family}' needs config (--config), a JSON file with its settings; see docs/articles.md"
            )
        if not isinstance(config, str | PathLike):
            raise ConversionError(f"config must name a JSON file, not {shown(config)}")
        refuse_given(reading, f"{source}: a weight file", but=("token", "cache_dir", "local_files_only"))
        weight_file(source, config)
        return
    names = ", ".join(ARTICLES)
    if config is not None:
        raise ConversionError(
            f"config (--config) is only for an article's weight file, with family (--family) {names}; leave it out: "
            "other sources have a config.json; from_official takes changes of its fields by name (use_cache=False)"
        )
    path = Path(source)
    if family is None and path.is_file() and path.suffix != GGUF and (what := what_it_is(path)):
        raise ConversionError(f"{path}: {what}")
    if family is None and path.suffix in WEIGHT_FILES and path.is_file():
        raise ConversionError(
            f"{path}: not a folder; name the folder that holds config.json too or, for an article's state dict, give "
            f"config (--config) and family (--family), one of {names}"
        )
    folder_of(source, reading.get("revision"))


def check_model(source: str | PathLike[str], **reading: Any) -> None:
    """Check the source of `inspect`: a folder, a Hub id, a config.json or a preset; and what is read of it.

    Raises:
        ConversionError: it is none of them, or has no such part.
    """
    path = Path(source)
    if path.suffix != ".json" or path.is_dir():
        folder_of(source, reading.get("revision"))
        return
    refuse_given(reading, f"{path}: only a config.json")
    if not path.exists():
        raise ConversionError(f"{path}: no such file; name a folder, a config.json or a preset")
