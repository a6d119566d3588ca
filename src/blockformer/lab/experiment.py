"""An experiment: what is compared, on what, for how long, and the runs that follow from it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from ..model.axes import axes
from ..model.configuration_decoder import BlockformerDecoderConfig
from ..presets import preset
from ..presets.dependent import outdated
from .sizes import measure, solve


class LabError(ValueError):
    """The experiment cannot be run; the message names everything that is wrong with it."""


@dataclass(frozen=True)
class Data:
    """What is read, and how it is cut.

    Attributes:
        files: text files and folders of them; without these and without `dataset`, the standard library's sources.
        dataset: the arguments of `datasets.load_dataset`, with the text's `column`.
        tokenizer: a folder or Hub id; None trains a byte-level BPE of the config's vocab_size on the training text.
        sequence_length: tokens of a row.
        max_bytes: of text, the held-out part included.
        held_out_share: the share of the bytes that is held out, by whole files.
    """

    files: tuple[str, ...] = ()
    dataset: dict[str, Any] | None = None
    tokenizer: str | None = None
    sequence_length: int = 256
    max_bytes: int = 8_000_000
    held_out_share: float = 0.04


@dataclass(frozen=True)
class Variant:
    """How a config differs from the base; `axis` is the field, or the name of a config with several changes."""

    name: str
    axis: str
    settings: dict[str, Any]


BASE = Variant("base", "", {})


@dataclass(frozen=True)
class Run:
    """One training run: a config of the experiment at one width with one seed."""

    variant: Variant
    seed: int
    width: int | None
    config: BlockformerDecoderConfig
    parameters: int
    flops_per_token: float

    @property
    def group(self) -> str:
        """The runs of one group differ only in their seeds."""
        return self.variant.name if self.width is None else f"{self.variant.name}-width{self.width}"

    @property
    def name(self) -> str:
        """The name of its files."""
        return f"{self.group}-seed{self.seed}"


@dataclass(frozen=True)
class Experiment:
    """What a file says, checked.

    Attributes:
        base: a preset's name under "preset" and settings of the config.
        variants: the base, then what is compared with it.
        equal: "parameters" or "flops" a token, for which the inner width is solved, or "nothing".
        budget: one of `experiment_file.BUDGETS`, and how much of it a run has.
        training: arguments of `TrainingArguments`.
        evaluations: points of a curve.
        blocks: the files of blocks of one's own, registered.
    """

    base: dict[str, Any]
    variants: tuple[Variant, ...]
    equal: str
    data: Data
    budget: tuple[str, float]
    training: dict[str, Any]
    seeds: tuple[int, ...]
    evaluations: int
    blocks: tuple[str, ...] = ()
    tokens: dict[str, Any] = field(default_factory=lambda: {"eos_token_id": 0, "pad_token_id": 1})

    def config(self, settings: dict[str, Any], width: int | None = None) -> BlockformerDecoderConfig:
        """The base with other settings. Settings of the base that make no sense with them are left out.

        At another width its inner width and its heads are in proportion.
        """
        given = {"max_position_embeddings": self.data.sequence_length, "bos_token_id": None, **self.tokens, **self.base}
        name = given.pop("preset", "qwen3")
        if width is not None:
            plain = preset(name, **given)
            heads = max(1, width // plain.head_dim)
            given |= {
                "hidden_size": width,
                "intermediate_size": max(1, round(plain.intermediate_size * width / plain.hidden_size)),
                "num_attention_heads": heads,
                "num_key_value_heads": max(1, heads * plain.num_key_value_heads // plain.num_attention_heads),
                "head_dim": plain.head_dim,
            }
        plain = preset(name, **given)
        defaults = {field: each.default for field, each in axes(type(plain)).items()}
        gone = outdated({**plain.to_dict(), **settings}, settings, defaults)
        kept = {field: value for field, value in given.items() if field not in gone}
        made = preset(name, **{**kept, **settings})
        if not isinstance(made, BlockformerDecoderConfig):
            raise ValueError(f"'{name}' is not a decoder, and the lab trains models that predict the next token.")
        return made

    def runs(self, widths: tuple[int, ...] = ()) -> list[Run]:
        """All runs: seed by seed, so that an unfinished experiment has some runs of every config.

        Raises:
            LabError: configs that are refused or cannot be made equal, all of them.
        """
        sized, problems = [], []
        length = self.data.sequence_length
        for width in dict.fromkeys(widths or (None,)):
            at = "" if width is None else f" at width {width}"
            try:
                if width is not None and width % (head := self.config({}).head_dim):
                    raise ValueError(f"a width must be a multiple of the base's head_dim, {head}.")
                base = self.config({}, width)
                target = measure(base, length)
            except ValueError as error:
                problems.append(f"base{at}: {error}")
                continue
            # A ladder's rung of the base's own width is the base itself.
            width = None if width == self.config({}).hidden_size else width
            for variant in self.variants:
                try:
                    config = self.config(variant.settings, width)
                    if variant is not BASE:
                        config = solve(config, self.equal, target, length, variant.settings)
                    sized.append((variant, width, config, measure(config, length)))
                except ValueError as error:
                    problems.append(f"{variant.name}{at}: {error}")
        if problems:
            raise LabError(listed("configs that cannot be compared", problems))
        return [
            Run(variant, seed, width, config, size.parameters, size.flops)
            for seed in self.seeds
            for variant, width, config, size in sized
        ]

    def steps(self, run: Run, tokens_per_step: int) -> int | None:
        """The optimizer steps of a run; None if minutes bound it."""
        kind, amount = self.budget
        tokens = {
            "tokens": amount,
            "tokens_per_parameter": amount * run.parameters,
            "flops": amount / run.flops_per_token,
        }
        return max(1, round(tokens[kind] / tokens_per_step)) if kind in tokens else None

    def common(self) -> dict[str, Any]:
        """What all rows of a folder share; variants and seeds may be added to later."""
        kept = ("base", "equal", "budget", "training", "evaluations")
        found = {name: value for name, value in dataclasses.asdict(self).items() if name in kept}
        found["data"] = {name: value for name, value in dataclasses.asdict(self.data).items() if name != "files"}
        return json.loads(json.dumps(found))


def listed(what: str, problems: list[str]) -> str:
    """One problem as it is, several as a list below what they are."""
    return problems[0] if len(problems) == 1 else "\n".join([f"{what}:", *(f"- {problem}" for problem in problems)])
