"""What the articles' state dicts have in common: a separate settings file, prefixes, buffers.

An article's model is a class that a reader has typed in. transformers has no such class, so we have no model to
compare with, no `model_type` and no way back: these families are read only, and only when named.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from transformers import PretrainedConfig

from blockformer.files.errors import ConversionError, listed, shown

from ..families.base import Family
from ..families.encoder_decoder import same_bits
from ..families.head import Head
from ..families.names import Names
from ..families.oracle import Oracle
from ..families.original import FRESH as ORIGINAL_FRESH
from ..families.settings import Settings
from ..families.shared import GPT
from ..rules.table import Rule
from ..storage.spelling import Prefix, Spellings
from ..storage.variant import CheckpointVariant

STRUCTURE = {**GPT, "norm_eps": 1e-5, "final_norm": True}
BOTH_STACKS = {**STRUCTURE, "position_type": "sinusoidal", "hidden_act": "relu"}
FRESH = {**ORIGINAL_FRESH, "tie_word_embeddings": False, "initializer_range": 0.02, "attention_dropout": 0.1}
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
PROJECTIONS = (
    ("W_query", "W_key", "W_value"),
    ("W_q", "W_k", "W_v"),
    ("w_q", "w_k", "w_v"),
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("c_attns.0", "c_attns.1", "c_attns.2"),
)
OUTPUTS = ("out_proj", "o_proj", "W_o", "w_o", "proj", "c_proj", "output")
"""How attentions name the projections to queries, keys and values, and the one after them."""
OURS = ("q_proj", "k_proj", "v_proj", "o_proj")
GUESSED = "norm by its name"
"""The trait of a model whose norms' formula only their names tell."""
Check = Callable[[Tensor], str | None]
"""The fault of a buffer, or None."""


@dataclass(kw_only=True, eq=False)
class Article(Names[Head], ABC):
    """The model of an article: its settings file, and the names of its tensors.

    Attributes:
        must_have, may_have: what its settings file must and may hold: name -> kind.
        heads_of: its names for the width and the number of heads.
        embeddings: its matrices over the vocabulary -> ours, the embeddings first.
        shared: tensors that may be one: (setting of ours, the copy, what it is a copy of).
    """

    must_have: ClassVar[Mapping[str, Kind]]
    may_have: ClassVar[Mapping[str, Kind]]
    heads_of: ClassVar[tuple[str, str]]
    embeddings: ClassVar[Mapping[str, str]]
    shared: ClassVar[Sequence[tuple[str, str, str]]]

    @abstractmethod
    def traits(self, names: Collection[str], settings: Mapping[str, Any]) -> set[str]:
        """What the tensor names say of the model.

        Args:
            names: without their common prefix.
            settings: checked.

        Raises:
            ConversionError: they contradict each other, or are not understood.
        """

    @abstractmethod
    def checks(self, settings: Mapping[str, Any]) -> dict[str, Check]:
        """Ending of a buffer's name -> the check under which it may be left out."""

    @abstractmethod
    def our_settings(self, settings: Mapping[str, Any], traits: Collection[str]) -> dict[str, Any]:
        """Our settings for the article's."""

    def checked(self, entries: Mapping[str, Any]) -> dict[str, Any]:
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
                f"the config of '{self.family}' has {', '.join(self.must_have)} and may have "
                f"{', '.join(self.may_have)}:{listed(lines)}"
            )
        return dict(entries)

    def variant_of(
        self,
        official: Mapping[str, Any],
        names: Collection[str] | None = None,
        read: Callable[[str], Tensor] | None = None,
    ) -> CheckpointVariant:
        """See `Names.variant_of`. Buffers are checked here, where the settings are known.

        Raises:
            ConversionError: also for settings, names or buffers that do not fit the article.
        """
        settings = self.checked(official)
        prefix = common_prefix(names or ())
        own = {name.removeprefix(prefix): name for name in names or ()}
        checks = self.checks(settings)
        lines = []
        for name, stored in own.items():
            check = next((check for end, check in checks.items() if name.endswith(end)), None)
            if check is not None and read is not None and (fault := check(read(stored))):
                lines.append(f"{shown(stored)} {fault}")
        if lines:
            raise ConversionError(f"buffers that are not what '{self.family}' computes with:{listed(lines)}")
        traits = self.traits(own, settings) | self._shared(settings, own, read)
        return CheckpointVariant(self.heads[0].official, frozenset(traits), prefix=prefix)

    def _shared(self, settings: Mapping[str, Any], own: Mapping[str, str], read) -> set[str]:
        """Which tensors are one, by the settings or, where these are silent, by their bits; and which are left out."""
        traits = set()
        told_pairs = [pair for name, *pair in self.shared if settings.get(name)]
        given = {each for pair in told_pairs if own.keys() & pair for each in pair}
        for name, *pair in self.shared:
            told, absent = settings.get(name), [each for each in pair if each not in own and each not in given]
            if len(absent) == 1 and not told:
                other = next(each for each in pair if each in own)
                fix = f'where your model shares it with {shown(other)}, add "{name}": true to the settings'
                raise ConversionError(f"{shown(absent[0])} is missing; {fix}")
            if own.keys() >= set(pair) and read is not None:
                same = same_bits(read, own[pair[0]], own[pair[1]])
                if told and not same:
                    differ = f"{shown(pair[0])} and {shown(pair[1])} differ"
                    raise ConversionError(
                        f'{differ}, and the settings have "{name}": true; set it to false, or fix one'
                    )
                told = same if told is None else told
            traits |= {name} if told else set()
        return traits | {_absent(each) for each in self.embeddings if each not in own}

    def embedding_rules(self, variant: CheckpointVariant) -> tuple[list[Rule], list[str]]:
        """The rules of the matrices over the vocabulary, and the names of copies, which are left out."""
        first_of = {name: name for name in self.embeddings}
        for name, copy, first in self.shared:
            if name in variant.traits:
                first_of[copy] = first_of[first]
        rules, copies = [], []
        for first in dict.fromkeys(first_of.values()):
            same = [name for name in self.embeddings if first_of[name] == first]
            stored = [name for name in same if _absent(name) not in variant.traits] or [first]
            rules.append(Rule(stored[0], self.embeddings[first]))
            copies += stored[1:]
        return rules, copies

    def notes(self, variant: CheckpointVariant) -> list[str]:
        notes = [f"{copy} is {first} ({name})" for name, copy, first in self.shared if name in variant.traits]
        if GUESSED in variant.traits:
            notes.append('its norms divide by std + eps, the unbiased std; if yours do not, set "norm": "layer_norm"')
        return [*notes, *filter(None, [variant.note])]

    def spelled(self, variant: CheckpointVariant) -> Spellings:
        """See `Names.spelled`: all names have the common prefix."""
        return Spellings([Prefix(in_file=variant.prefix, in_class="", inner=("",))] if variant.prefix else [])


@dataclass(kw_only=True, eq=False)
class ArticleSettings(Settings):
    """The settings of an article's model, for which no class of transformers exists.

    Attributes:
        article: what its settings file says.
    """

    article: Article

    def read(self, official, variant, head):
        said = self.article.our_settings(self.article.checked(official), variant.traits)
        return {"architectures": [head.ours], **self.structure, **said}

    def official_config(self, official: Mapping[str, Any]) -> PretrainedConfig:
        """An empty config: no class of transformers has these settings."""
        return PretrainedConfig()

    def unused(self, official: Mapping[str, Any]) -> list[str]:
        """Always empty: an unknown setting is an error."""
        return []

    def our_config(self, settings: Mapping[str, Any]) -> PretrainedConfig:
        try:
            return super().our_config(settings)
        except ConversionError as error:
            reason = str(error).removeprefix("config.json: ")
            raise ConversionError(f"the config of '{self.family}': {reason}") from error


class ArticleFamily(Family):
    """The model of an article.

    Args:
        name: the family's name.
        model: name of the article's class.
        ours: name of our class.
        article: its settings file and its names.
        structure, fresh: see `Family`; with the sizes that the article names.
        extra_code: see `Family`.
    """

    is_file = True

    def __init__(
        self,
        name: str,
        model: str,
        ours: str,
        article: Article,
        *,
        structure: Mapping[str, Any],
        fresh: Mapping[str, Any],
        extra_code: Mapping[str, Path] | None = None,
    ):
        heads = [Head(model, ours)]
        article = replace(article, family=name, heads=heads)
        super().__init__(
            name,
            heads,
            config_class="PretrainedConfig",
            names=article,
            settings=ArticleSettings(article=article),
            structure=structure,
            fresh=fresh,
            oracle=Oracle(not_runnable=lambda family, config: f"{model} is an article's own code, which is never run"),
            pad_token_learns=True,
            extra_code=extra_code,
        )


def _absent(name: str) -> str:
    return f"without {name}"


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
        f"{what}: found {', '.join(map(shown, sorted(found)))}; expected one of:"
        f"{listed(' '.join(group) for group in groups)}"
    )


def token_ids(settings: Mapping[str, Any]) -> dict[str, int]:
    """The special tokens named in the settings."""
    return {name: settings[name] for name in TARGET_TOKENS if name in settings}


def target_ids(settings: Mapping[str, Any]) -> dict[str, int]:
    """The same for an encoder-decoder, whose decoder starts with `bos` unless another start token is named."""
    ids = token_ids(settings)
    return {"decoder_start_token_id": ids["bos_token_id"], **ids} if "bos_token_id" in ids else ids


def projections(modules: Collection[str], what: str) -> set[str]:
    """How an attention names its linear layers, as traits that `spelled` reads. Without any it is the first spelling.

    Raises:
        ConversionError: they are not understood; lists what was found and what is understood.
    """
    found = set(modules) or {*PROJECTIONS[0], OUTPUTS[0]}
    for names in PROJECTIONS:
        output = found - set(names)
        if set(names) < found and len(output) == 1 and output <= set(OUTPUTS):
            return {f"{ours} {theirs}" for ours, theirs in zip(OURS, (*names, *output), strict=True)}
    ways = [" ".join((*names, "and an output")) for names in PROJECTIONS]
    raise ConversionError(
        f"{what}: found {', '.join(map(shown, sorted(found)))}; expected one of these, and the output as one of "
        f"{' '.join(OUTPUTS)}:{listed(ways)}"
    )


def spelled(traits: Collection[str]) -> dict[str, str]:
    """What `projections` has found, as traits ("q_proj W_q") -> ours -> theirs."""
    return dict(trait.split(" ", 1) for trait in traits if trait.startswith(tuple(f"{name} " for name in OURS)))
