"""`blockformer demo --quick` with less text, fewer steps and less to search in: all that it does, in seconds."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from blockformer.demo import search, steps


def shorten(patch: pytest.MonkeyPatch) -> None:
    fewer = dataclasses.replace(steps.QUICK, corpus_bytes=300_000, max_steps=15, docstrings=12)
    patch.setattr(steps, "QUICK", fewer)
    some = search.docstrings(Path(asyncio.__file__).parent)
    patch.setattr(search, "docstrings", lambda: some)
