"""The file of an experiment, read and checked as a whole before anything is trained."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import TrainingArguments

from ..model.axes import did_you_mean
from ..registering import register
from .experiment import BASE, Data, Experiment, LabError, Variant, listed
from .sizes import EQUAL
from .text import load_tokenizer

BUDGETS = ("tokens", "tokens_per_parameter", "flops", "minutes")
NAME = re.compile(r"[\w.+=-]+")
# Arguments that the lab sets itself: how long a run is, what is written where, what is random.
_OWN = frozenset(
    "output_dir seed data_seed max_steps num_train_epochs do_train do_eval do_predict eval_strategy eval_steps "
    "save_strategy save_steps save_total_limit logging_strategy logging_steps logging_first_step disable_tqdm "
    "resume_from_checkpoint load_best_model_at_end push_to_hub prediction_loss_only train_sampling_strategy".split()
)
# Types that a value of YAML has or has not; other ones are left to their library.
_PLAIN = {bool: "true or false", int: "an integer", float: "a number", str: "a name", type(None): "null"}
_TRAINING = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.05,
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "report_to": "none",
    "use_cpu": not torch.accelerator.is_available(),  # bf16 needs to be told
}


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key stands once, and 1e-3 is a number as in YAML 1.2."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if isinstance(key, str) and keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"'{key}' stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read_experiment(path: Path) -> Experiment:
    """Read and check an experiment's file.

    Raises:
        LabError: everything that is wrong, at once.
    """
    try:
        content = _Loader(path.read_text(encoding="utf-8")).get_single_data()
    except OSError as error:
        raise LabError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise LabError(f"{path}: not UTF-8 text (byte {error.start:,})") from error
    except yaml.YAMLError as error:
        said = " ".join(str(error).replace(' in "<unicode string>",', " in").split())
        raise LabError(f"{path}: not YAML: {said}") from error
    if not isinstance(content, dict):
        raise LabError(f"{path}: an experiment is a mapping with 'base', 'axes' and so on")
    reader = _Reader(content, path.resolve().parent)
    experiment = reader.experiment()
    if reader.problems:
        raise LabError(listed(str(path), reader.problems))
    return experiment


class _Reader:
    """Takes an experiment's parts out of a mapping, and notes what is wrong with each."""

    def __init__(self, content: dict[str, Any], folder: Path) -> None:
        self.content, self.folder = content, folder
        self.problems: list[str] = []

    def experiment(self) -> Experiment:
        known = "base axes configs equal data budget training seeds evaluations blocks".split()
        self._check_names("the experiment", self.content, known)
        blocks, data = self._blocks(), self._data()
        training = {**_TRAINING, **self._mapping("training")}
        self._check_training(training)
        equal = self.content.get("equal", "parameters")
        if equal not in EQUAL:
            self.problems.append(f"equal must be one of {', '.join(EQUAL)}, not {equal!r}")
        evaluations = self._number("evaluations", self.content.get("evaluations", 10), whole=True)
        plain = Experiment(
            base={"vocab_size": 4096, **self._mapping("base")},
            variants=(BASE,),
            equal=equal,
            data=data,
            budget=self._budget(),
            training=training,
            seeds=self._seeds(),
            evaluations=int(evaluations),
            blocks=blocks,
        )
        plain = self._with_tokenizer(plain)
        return dataclasses.replace(plain, variants=(BASE, *self._variants(plain)))

    def _check_names(self, where: str, found: dict, known: Any) -> None:
        for name in found:
            if name not in known:
                hint = did_you_mean(str(name), known)
                self.problems.append(f"{where} has no '{name}'.{hint or ' It has ' + ', '.join(sorted(known)) + '.'}")

    def _check_types(self, where: str, found: dict, types: dict[str, Any]) -> None:
        """Of values of plain types, which the libraries take as they come and fail on later, or never."""
        for name, value in found.items():
            kinds = [kind for kind in (typing.get_args(types.get(name)) or (types.get(name),)) if kind is not None]
            if name in types and all(kind in _PLAIN for kind in kinds):
                given = type(value)
                if given not in kinds and not (given is int and float in kinds):
                    words = " or ".join(_PLAIN[kind] for kind in kinds)
                    self.problems.append(f"{where}: {name} must be {words}, not {value!r}")

    def _mapping(self, name: str) -> dict[str, Any]:
        found = self.content.get(name) or {}
        if isinstance(found, dict):
            return found
        self.problems.append(f"{name} must be a mapping, not {found!r}")
        return {}

    def _number(self, name: str, value: Any, whole: bool = False, largest: float = float("inf")) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= largest
        if is_number and (not whole or value == int(value)):
            return value
        below = "" if largest == float("inf") else f" up to {largest:g}"
        self.problems.append(f"{name} must be a positive {'integer' if whole else 'number'}{below}, not {value!r}")
        return 1

    def _blocks(self) -> tuple[str, ...]:
        """The files of blocks, by paths from the experiment's folder on, registered."""
        found = self.content.get("blocks") or []
        found = found if isinstance(found, list) else [found]
        paths = []
        for each in found:
            if not isinstance(each, str):
                self.problems.append(f"blocks must be paths of Python files, not {each!r}")
                continue
            paths.append(str(self.folder / each))
            try:
                register(paths[-1])
            except (OSError, ValueError) as error:
                self.problems.append(f"blocks: {error}")
        return tuple(paths)

    def _data(self) -> Data:
        found = self._mapping("data")
        known = {each.name: each for each in dataclasses.fields(Data)}
        self._check_names("data", found, known)
        given = {name: value for name, value in found.items() if name in known}
        for name, largest in (("sequence_length", float("inf")), ("max_bytes", float("inf")), ("held_out_share", 0.5)):
            if name in given:
                number = self._number(f"data: {name}", given[name], name != "held_out_share", largest)
                given[name] = number if name == "held_out_share" else int(number)
        if given.get("sequence_length") == 1:
            self.problems.append("data: sequence_length must be at least 2: the first token is predicted by nothing")
        if not isinstance(given.get("tokenizer"), str | None):
            self.problems.append(f"data: tokenizer must be a folder or Hub id, not {given.pop('tokenizer')!r}")
        files = given.pop("files", None) or []
        files = files if isinstance(files, list) else [files]
        if wrong := [each for each in files if not isinstance(each, str)]:
            self.problems.append(f"data: files must be paths or patterns, not {wrong[0]!r}")
        if files and given.get("dataset"):
            self.problems.append("data: give files or a dataset, not both")
        paths = [path for each in files if isinstance(each, str) for path in self._paths(each)]
        dataset = given.get("dataset")
        given["dataset"] = dataset = {"path": dataset} if isinstance(dataset, str) else dataset
        if not isinstance(dataset, dict | None) or (dataset is not None and "path" not in dataset):
            self.problems.append("data: dataset must be a name, or a mapping with 'path', 'split', 'column' and so on")
            given["dataset"] = None
        return Data(files=tuple(paths), **given)

    def _paths(self, given: str) -> list[str]:
        """Files by a path or pattern, from the experiment's folder on."""
        found = sorted(str(path) for path in self.folder.glob(given)) if not Path(given).is_absolute() else [given]
        if not found or not Path(found[0]).exists():
            self.problems.append(f"data: no such file: {given}")
        return found

    def _budget(self) -> tuple[str, float]:
        found = self._mapping("budget")
        self._check_names("budget", found, BUDGETS)
        if len(found) != 1:
            self.problems.append(f"budget must name one of {', '.join(BUDGETS)}")
        for name, value in found.items():
            if name in BUDGETS:
                return name, self._number(f"budget: {name}", value)
        return "tokens", 1

    def _seeds(self) -> tuple[int, ...]:
        found = self.content.get("seeds", [0, 1, 2])
        found = found if isinstance(found, list) else [found]
        if found and all(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in found):
            return tuple(dict.fromkeys(found))
        self.problems.append(f"seeds must be a list of integers of 0 or more, not {found!r}")
        return (0,)

    def _check_training(self, given: dict[str, Any]) -> None:
        known = {each.name for each in dataclasses.fields(TrainingArguments)} - _OWN
        for name in sorted(_OWN & given.keys()):
            self.problems.append(f"training: {name} is set by the lab itself: drop it")
        self._check_names("training", {name: value for name, value in given.items() if name not in _OWN}, known)
        self._check_types("training", given, {each.name: each.type for each in dataclasses.fields(TrainingArguments)})
        if self.content.get("budget") and "minutes" in self._mapping("budget"):
            for name in ("lr_scheduler_type", "warmup_steps"):
                if name in self._mapping("training"):
                    self.problems.append(f"training: {name}: with a budget of minutes the rate follows the time used")
        if not self.problems:
            try:
                TrainingArguments(output_dir="unused", **given)
            except (ValueError, TypeError) as error:
                self.problems.append(f"training: {error}")

    def _with_tokenizer(self, plain: Experiment) -> Experiment:
        """With the vocabulary and the special tokens of the tokenizer, if one is named."""
        if plain.data.tokenizer is None:
            return plain
        if "vocab_size" in self._mapping("base"):
            self.problems.append("base: vocab_size comes from data: tokenizer; drop it")
        try:
            tokenizer = load_tokenizer(plain.data.tokenizer)
        except ValueError as error:
            self.problems.append(f"data: {error}")
            return plain
        end = tokenizer.eos_token_id
        tokens = {
            "eos_token_id": end,
            "pad_token_id": end if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        }
        return dataclasses.replace(plain, base={**plain.base, "vocab_size": len(tokenizer)}, tokens=tokens)

    def _variants(self, plain: Experiment) -> list[Variant]:
        """Each value of each axis, then each named config; a value that is the base's own is the base."""
        try:
            base = plain.config({}).to_dict()
        except (ValueError, TypeError) as error:
            self.problems.append(f"base: {error}")
            return []
        found = []
        for axis, values in self._mapping("axes").items():
            for value in values if isinstance(values, list) else [values]:
                word = value if isinstance(value, str) else json.dumps(value)
                found.append(Variant(f"{axis}={word}", axis, {axis: value}))
        for name, settings in self._mapping("configs").items():
            if not isinstance(settings, dict):
                self.problems.append(f"configs: {name} must be a mapping of settings, not {settings!r}")
                continue
            found.append(Variant(str(name), str(name), settings))
        kept: list[Variant] = []
        for variant in found:
            problem = None
            if not NAME.fullmatch(variant.name):
                problem = "its name is not made of letters, digits, . + = - and _: give it a name under 'configs'"
            elif variant.name in ("base", *(other.name for other in kept)):
                problem = "stands twice"
            elif plain.data.tokenizer is not None and "vocab_size" in variant.settings:
                problem = "vocab_size comes from data: tokenizer"
            else:
                try:
                    if plain.config(variant.settings).to_dict() != base:
                        kept.append(variant)
                except (ValueError, TypeError) as error:
                    problem = str(error)
            if problem:
                self.problems.append(f"{variant.name}: {problem}")
        return kept
