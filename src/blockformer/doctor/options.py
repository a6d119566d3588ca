"""What a user says about a checkpoint that its tensors do not show."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from blockformer.conversion.arguments import check_family, dtype_name
from blockformer.files.errors import ConversionError, shown

from .fused import GATE_UP, QKV


@dataclass(frozen=True)
class Options:
    """The choices that only the user can make; see `blockformer.doctor.diagnose`.

    Attributes:
        family: the official family.
        renames: `OLD=NEW`, parts of names.
        dropped: names that are left out, or patterns of them with `*`.
        settings: entries of `config.json`.
        qkv, gate_up: how joined matrices lie; see `fused.py`.
        lora_scale: with which an adapter among the weights is merged.
        dtype: of what is written.
        names: the path of a file of names, for weights of unknown code; see `name_map.py`.
        key: the keys that lead to the model in a pickled file, with dots between them.
        tiktoken: what a list of ranks lacks: whose it is, or a file with pattern and special tokens; see
            `rank_lists.py`.
        check: the path of a file of logits that the mended model must compute; see `checking.py`.

    Raises:
        ConversionError: one has a value that it cannot have.
    """

    family: str | None = None
    renames: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    qkv: str | None = None
    gate_up: str | None = None
    lora_scale: float | None = None
    dtype: str | None = None
    names: str | None = None
    tiktoken: str | None = None
    check: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        for name, value, known in (("--qkv", self.qkv, QKV), ("--gate-up", self.gate_up, GATE_UP)):
            if value is not None and value not in known:
                raise ConversionError(f"{name} must be one of {', '.join(known)}, not {shown(value)}")
        if self.family is not None:
            check_family(self.family)
        object.__setattr__(self, "dtype", dtype_name(self.dtype))


def settings_from(texts: Iterable[str]) -> dict[str, Any]:
    """`NAME=JSON` texts as entries of a config; a value that is not JSON is a text.

    Raises:
        ConversionError: one has no name or no value.
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ConversionError(f"--set must be like NAME=VALUE, not {shown(text)}")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
