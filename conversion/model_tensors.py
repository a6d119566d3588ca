"""The tensors of a model by their names and shapes, without building it, and which of them may stand for others."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, initialization

from blockformer.files.errors import ConversionError, reason_of

from .rules.groups import Group, targets_of
from .rules.table import Rule, RuleTable
from .rules.ties import check_tied
from .storage import awq


def expected_tensors(
    model_class: type[PreTrainedModel], config: PretrainedConfig
) -> tuple[dict[str, tuple[int, ...]], dict[str, str], int]:
    """The tensors of a model, without building it: tensor name -> shape, tied name -> source, parameter count."""
    config = copy.deepcopy(config)
    try:
        with torch.device("meta"), initialization.no_init_weights():
            model = model_class(config)
        model.tie_weights()
    except Exception as error:  # what the config let through
        raise ConversionError(f"config.json: {model_class.__name__} refuses it: {reason_of(error)}") from error
    tied = dict(model.all_tied_weights_keys)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return shapes, tied, model.num_parameters()


def unread_pooler(model_class: type[PreTrainedModel], config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of a pooler that the head does not read. The repo keeps it, since `AutoModel` reads it."""
    if getattr(model_class, "reads_pooler", True) or config.pooler_act is None:
        return {}
    width = config.hidden_size
    return {"model.pooler.dense.weight": (width, width), "model.pooler.dense.bias": (width,)}


def by_sources(names: Iterable[str], tied: Mapping[str, str]) -> dict[str, str]:
    """A model's names of its weights -> the names in a file: of tied ones, either may be there, as transformers reads.

    Args:
        names: in the file.
        tied: name -> source, of the model.
    """
    known = {*names}
    found: dict[str, str] = {}
    for name in names:
        source = tied.get(name, name)
        found[name if source in known or source in found else source] = name
    return found


def without_copies(
    names: Mapping[str, str], tied: Mapping[str, str], table: RuleTable, read: Callable[[str], Iterable[Tensor]]
) -> dict[str, str]:
    """A model's names of its weights without tied ones next to their source that a table has no place for.

    Args:
        names: name -> the one in the file, of `by_sources`.
        tied: name -> source, of the model.
        table: turns them into the other layout.
        read: the name in the file -> elements in order, in parts.

    Raises:
        ConversionError: one that is left out is not equal to its source.
    """
    copies = {name: tied[name] for name in names if tied.get(name) in names and not table.makes(name)}
    check_tied(read, [(names[name], names[source]) for name, source in copies.items()])
    return {name: own for name, own in names.items() if name not in copies}


def with_sources(groups: Iterable[Group], names: Mapping[str, str]) -> list[Group]:
    """The same groups, reading tensors by the names that a file has; other names stay."""
    return [replace(group, sources=tuple(names.get(name, name) for name in group.sources)) for group in groups]


def stored_pairs(tied: Mapping[str, str], groups: list[Group]) -> list[tuple[str, str]]:
    """Tied pairs whose two names are both written."""
    written = targets_of(groups)
    return [(name, source) for name, source in tied.items() if name in written and source in written]


def identity_rules(names: Iterable[str]) -> RuleTable:
    """Identity rules for our own tensor names."""
    patterns = {".".join("{layer}" if part.isdigit() else part for part in name.split(".")) for name in names}
    rules = []
    for pattern in sorted(patterns):
        low = awq.PARTS.get(pattern.rpartition(".")[2])
        rules.append(Rule(pattern, pattern, dtypes=None if low is None else (low,)))
    return RuleTable(rules)
