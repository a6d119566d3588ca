"""What the articles' state dicts have in common: a separate settings file, prefixes, buffers.

An article's model is a class that a reader has typed in. transformers has no such class, so there is no model to
compare with, no `model_type` and no way back: these families are read only, and only when named.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ..errors import ConversionError, listed, shown
from ..families.base import Family
from ..families.fields import Form, Head

PREFIXES = ("module.", "_orig_mod.")
"""What `DataParallel` and `torch.compile` put before every name."""
Kind = tuple[str, Callable[[Any], bool]]
"""How errors describe a kind of value, and its test."""


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


SIZE: Kind = ("a positive integer", lambda value: type(value) is int and 0 < value < 2**63)
SHARE: Kind = ("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
FLAG: Kind = ("true or false", lambda value: type(value) is bool)
POSITIVE: Kind = ("a number above 0", lambda value: _is_number(value) and value > 0)
TOKEN: Kind = ("a token, 0 or more", lambda value: type(value) is int and 0 <= value < 2**63)
TOKENS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), TOKEN)
TARGET_TOKENS = {**TOKENS, "decoder_start_token_id": TOKEN}
Check = Callable[[Tensor], str | None]
"""What is wrong with a buffer, or None."""


class ArticleFamily(Family[Head]):
    """The model of an article.

    Args:
        name: the family's name.
        model: name of the article's class.
        ours: name of our class.

    Attributes:
        must_have, may_have: what its settings file must and may hold: name -> kind.
        heads_of: its names for the width and the number of heads.
    """

    is_file = True
    must_have: Mapping[str, Kind]
    may_have: Mapping[str, Kind]
    heads_of: tuple[str, str]

    def __init__(self, name: str, model: str, ours: str):
        super().__init__(name, "", [Head(model, ours)])

    @abstractmethod
    def traits(self, names: Collection[str]) -> set[str]:
        """What the tensor names say of the model.

        Args:
            names: without their common prefix.

        Raises:
            ConversionError: they contradict each other, or are not understood.
        """

    @abstractmethod
    def checks(self, settings: Mapping[str, Any]) -> dict[str, Check]:
        """Ending of a buffer's name -> the check under which it may be left out."""

    @abstractmethod
    def our_settings(self, settings: Mapping[str, Any], traits: Collection[str]) -> dict[str, Any]:
        """Our settings for those of the article."""

    def settings(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """The checked entries of the settings file.

        Raises:
            ConversionError: lists every entry that is unknown, missing or of the wrong kind.
        """
        kinds = {**self.must_have, **self.may_have}
        lines = [f"{shown(name)} is not known" for name in entries if name not in kinds]
        lines += [
            f"{shown(name)} is missing: {kind[0]}" for name, kind in self.must_have.items() if name not in entries
        ]
        for name, (wanted, fits) in kinds.items():
            if name in entries and not fits(entries[name]):
                lines.append(f"{shown(name)} must be {wanted}, not {shown(entries[name])}")
        if not lines:
            width, heads = self.heads_of
            if entries[width] % entries[heads]:
                lines.append(f"{width} ({entries[width]}) is not a multiple of {heads} ({entries[heads]})")
        if lines:
            raise ConversionError(
                f"the config of '{self.name}' has {', '.join(self.must_have)} and may have {', '.join(self.may_have)}:"
                f"{listed(lines)}"
            )
        return dict(entries)

    def form(
        self,
        official: Mapping[str, Any],
        names: Collection[str] | None = None,
        read: Callable[[str], Tensor] | None = None,
    ) -> Form:
        """See `Family.form`. Buffers are checked here, where the settings are known.

        Raises:
            ConversionError: also for settings, names or buffers that do not fit the article.
        """
        settings = self.settings(official)
        prefix = common_prefix(names or ())
        own = {name.removeprefix(prefix): name for name in names or ()}
        checks = self.checks(settings)
        lines = []
        for name, stored in own.items():
            check = next((check for end, check in checks.items() if name.endswith(end)), None)
            if check is not None and read is not None and (fault := check(read(stored))):
                lines.append(f"{shown(stored)} {fault}")
        if lines:
            raise ConversionError(f"buffers that are not what '{self.name}' computes with:{listed(lines)}")
        return Form(self.heads[0].official, frozenset(self.traits(own) | {prefix} - {""}))

    def canonical(self, name: str, form: Form) -> str:
        """The name without the common prefix."""
        return name.removeprefix(_prefix_of(form))

    def stored(self, name: str, form: Form) -> str:
        """The name with the common prefix."""
        return _prefix_of(form) + name

    def config_from(self, official: Mapping[str, Any], form: Form | None = None) -> dict[str, Any]:
        """See `Family.config_from`."""
        traits = (form or self.form(official)).traits
        return {"architectures": [self.heads[0].ours], **self.our_settings(self.settings(official), traits)}

    def our_config(self, settings: Mapping[str, Any]) -> PretrainedConfig:
        """See `Family.our_config`."""
        try:
            return super().our_config(settings)
        except ConversionError as error:
            reason = str(error).removeprefix("config.json: ")
            raise ConversionError(f"the config of '{self.name}': {reason}") from error

    # What there is not: an official class, and a way back.

    def official_config(self, official: Mapping[str, Any]) -> PretrainedConfig:
        """An empty config: no class of transformers has these settings."""
        return PretrainedConfig()

    def official_class(self, form: Form) -> type[PreTrainedModel]:
        """The common base class: no class of transformers is this model."""
        return PreTrainedModel

    def not_runnable(self, config: PretrainedConfig) -> str | None:
        """See `Family.not_runnable`."""
        return f"there is none, {self.heads[0].official} is the code of an article"

    def unused(self, official: Mapping[str, Any]) -> list[str]:
        """Always empty: an unknown setting is an error."""
        return []

    def differences(self, config: PretrainedConfig) -> list[str]:
        """Never empty: the family is not written."""
        return [f"'{self.name}' is read and not written"]

    def config_to(self, config: PretrainedConfig) -> dict[str, Any]:
        """See `Family.config_to`."""
        raise ConversionError(f"the family '{self.name}' is read and not written; name another one")


def _prefix_of(form: Form) -> str:
    return next((trait for trait in form.traits if trait.endswith(".")), "")


def common_prefix(names: Collection[str]) -> str:
    """The prefix that wrappers of the model put before every name.

    Raises:
        ConversionError: only some names have it.
    """
    prefix = ""
    while True:
        heads = [prefix + head for head in PREFIXES if any(name.startswith(prefix + head) for name in names)]
        if not heads:
            return prefix
        others = [name for name in names if not name.startswith(heads[0])]
        if others:
            lines = listed(map(shown, others))
            raise ConversionError(f"some names begin with {shown(heads[0])} and these do not; rename them:{lines}")
        prefix = heads[0]


def one_of(groups: Collection[tuple[str, ...]], found: Collection[str], what: str) -> tuple[str, ...]:
    """The group equal to what was found.

    Raises:
        ConversionError: no group is; lists what was found and what is understood.
    """
    for group in groups:
        if set(group) == set(found):
            return group
    raise ConversionError(
        f"{what}: found {', '.join(map(shown, sorted(found)))}; understood is one of:"
        f"{listed(' '.join(group) for group in groups)}"
    )


def sinusoid(length: int, width: int) -> Check:
    """The check of a table [1, length, width] of interleaved sines and cosines (Vaswani et al., 2017, section 3.5)."""

    def check(table: Tensor) -> str | None:
        if tuple(table.shape) not in ((length, width), (1, length, width)):
            return f"is {list(table.shape)}, by the config it is [1, {length}, {width}]"
        even = torch.arange(0, width, 2, dtype=torch.float64)
        angles = torch.arange(length)[:, None] * 10000.0 ** (-even / width)
        exact = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, :width]
        rounding = torch.finfo(table.dtype).eps if table.is_floating_point() else 0.0
        # An angle that was computed in float32 is off by about 1e-7 of itself.
        near = (table.double().reshape(length, width) - exact).abs().max() <= 1e-5 + 1e-6 * length + rounding
        return None if near else "is not the table of sines and cosines, side by side, of the original Transformer"

    return check


def causal(length: int) -> Check:
    """The check of a causal mask [length, length]: 1 for what is hidden, or for what is seen, or -inf and 0."""

    def check(mask: Tensor) -> str | None:
        if tuple(mask.shape) not in [(1,) * more + (length, length) for more in range(3)]:
            return f"is {list(mask.shape)}, by the config it is [{length}, {length}]"
        mask = mask.reshape(length, length)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        forms = [later.to(mask.dtype), (~later).to(mask.dtype)]
        if mask.is_floating_point():
            forms.append(torch.zeros_like(mask).masked_fill(later, -torch.inf))
        if any(torch.equal(mask, form) for form in forms):
            return None
        return "is not a causal mask (ones above the diagonal, or on and below it)"

    return check
