"""Text files of one's own: read, put in an order that is the same everywhere, and split."""

from __future__ import annotations

import codecs
import hashlib
from pathlib import Path

from .corpus import Corpus, SourceFile

HELD_OUT = 0.05
LEAST_BYTES, LEAST_HELD_OUT = 20_000, 4_000


class TextError(ValueError):
    """The text, or the prompt, cannot be used."""


def read(path: Path, max_bytes: int) -> str:
    """At most so many bytes of a plain text file.

    Raises:
        TextError: it is not UTF-8 text, or cannot be read.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes)
            whole = not file.read(1)
    except OSError as error:
        raise TextError(f"{path}: cannot be read: {error.strerror}") from error
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise TextError(f"{path}: UTF-16 text; save it as UTF-8, for example with `iconv -f UTF-16 -t UTF-8`")
    if b"\0" in data:
        raise TextError(f"{path}: a binary file, not plain text")
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=whole)
    except UnicodeDecodeError as error:
        raise TextError(f"{path}: not UTF-8 (byte {error.start:,}); convert it, for example with `iconv`") from error
    return text.replace("\r\n", "\n")


def collect(paths: list[Path], max_bytes: int) -> tuple[list[SourceFile], list[str]]:
    """Text files, and why others were left out.

    A file that is named must be text. A folder gives the text in it, except for hidden files. What has the same
    content as another file counts once.

    Args:
        paths: files and folders.
        max_bytes: after which no more is read; the last file is cut there.

    Raises:
        TextError: a path is not text.
    """
    entries = []
    for path in paths:
        if path.is_dir():
            below = (entry for entry in path.rglob("*") if entry.is_file())
            visible = (e for e in below if not any(part.startswith(".") for part in e.relative_to(path).parts))
            entries += [(entry.relative_to(path).as_posix(), entry, False) for entry in visible]
        elif path.is_file():
            entries.append((path.name, path, True))
        else:
            raise TextError(f"{path}: {'not a file or folder' if path.exists() else 'no such file or folder'}")
    # the order of a hash of the names: the same everywhere, and a cap takes no particular corner
    entries.sort(key=lambda entry: (hashlib.sha256(entry[0].encode()).hexdigest(), entry[1]))
    files, left_out, seen, room = [], [], set(), max_bytes
    for name, path, named in entries:
        if room <= 0:
            break
        try:
            text = read(path, room)
        except TextError as error:
            if named:
                raise
            left_out.append(str(error))
            continue
        if text.strip() and text not in seen:
            seen.add(text)
            files.append(SourceFile(name, text))
            room -= files[-1].num_bytes
    return files, left_out


def split(files: list[SourceFile], share: float = HELD_OUT) -> Corpus:
    """Hold out whole files, a share of all bytes; where each is too large for that, the end of the largest one.

    Raises:
        TextError: there is too little text.
    """
    total = sum(file.num_bytes for file in files)
    if total < LEAST_BYTES:
        raise TextError(f"only {total:,} bytes of text: use at least {LEAST_BYTES:,}, better a few million")
    wanted = max(share * total, LEAST_HELD_OUT)
    held_out, taken = [], 0
    for file in files:
        if taken < wanted and taken + file.num_bytes <= 2 * wanted:
            held_out.append(file)
            taken += file.num_bytes
    train = [file for file in files if file not in held_out]
    if taken < wanted / 2 or not train:
        largest = max(files, key=lambda file: file.num_bytes)
        data = largest.text.encode()
        cut = len(data) - int(wanted)
        cut = data.find(b"\n", cut) + 1 or cut  # at a line's end, if there is one
        start, end = (part.decode(errors="ignore") for part in (data[:cut], data[cut:]))
        held_out = [SourceFile(f"the end of {largest.name}", end)]
        train = [SourceFile(file.name, start) if file is largest else file for file in files]
    return Corpus(train=tuple(train), held_out=tuple(held_out))
