"""Families as settings of the one core: `preset("qwen3", hidden_size=512)` gives a config.

The settings are part of a family's record, in its file. Presets know the config, not the other way round, so they
stay out of exported repos.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, overload

from ..conversion.families import index
from ..declared_fields import own_fields
from ..files.config_file import OURS
from ..model.axes import axes, did_you_mean
from ..model.configuration_blockformer import BlockformerConfig, unknown_fields
from ..model_classes import CONFIGS
from .dependent import outdated
from .sizes import SIZES

__all__ = ["PRESETS", "SIZES", "preset"]


@cache
def _load(name: str) -> tuple[type[BlockformerConfig], dict]:
    module = index.module_of(name)
    records = [getattr(module, "PRESETS", {}).get(name)]
    records += [each.preset for each in vars(module).values() if getattr(each, "name", None) == name]
    record = next(each for each in records if each is not None)
    return CONFIGS[f"{OURS}{record.topology}"], dict(record.settings)


class _Presets(Mapping[str, tuple[type[BlockformerConfig], dict]]):
    """Preset -> config class and settings, loaded with the family's file when first needed."""

    def __getitem__(self, name: str) -> tuple[type[BlockformerConfig], dict]:
        if name not in index.PRESETS:
            raise KeyError(name)
        return _load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(index.PRESETS)

    def __len__(self) -> int:
        return len(index.PRESETS)


PRESETS: Mapping[str, tuple[type[BlockformerConfig], dict]] = _Presets()


@overload
def preset() -> list[str]: ...
@overload
def preset(name: str, **overrides: Any) -> BlockformerConfig: ...
def preset(name: str | None = None, **overrides: Any) -> BlockformerConfig | list[str]:
    """The config of a family, or of one of its published sizes, with your own settings.

    Settings of the preset that do not fit yours are dropped: the rotary parameters with the rotary positions, say.

    Args:
        name: a key of `PRESETS` (a family with small sizes) or of `SIZES` (a checkpoint's own); None lists both.
        overrides: any field of the config.

    Returns:
        A new config; without a name, the sorted names of all presets.

    Raises:
        ValueError: no such preset (the near one is named); fields that the config does not have, all of them with what
            they may mean; or a value that it refuses.

    Examples:
        >>> preset("qwen3", hidden_size=512, num_key_value_heads=2).qk_norm
        True
        >>> preset("qwen3-0.6b", position_type="relative_bias").num_hidden_layers
        28
    """
    if name is None:
        return sorted([*PRESETS, *SIZES])
    if name not in PRESETS and name not in SIZES:
        raise ValueError(
            f"no preset is called '{name}'.{did_you_mean(name, preset())} preset() lists all names, and "
            "from_official loads a checkpoint."
        )
    family, sizes = SIZES.get(name, (name, {}))
    config_class, fields = PRESETS[family]
    declared = axes(config_class)
    defaults = {field: each.default for field, each in declared.items()}
    known = {**defaults, **fields, **sizes, **overrides}
    for field, value in overrides.items():  # before other settings are computed of them
        if field in declared:
            declared[field].check(field, value)
    own = own_fields(known)
    _check_names(config_class, [name for name in overrides if name not in own])
    settings = {**fields, **sizes, **overrides}
    gone = outdated(settings, overrides, defaults)
    known |= {field: defaults[field] for field in gone}
    there = {*declared, *own_fields(known), *overrides}  # a block that goes takes its own fields with it
    given = [name for name in settings if name not in gone and name in there]
    return config_class(**{key: value(known) if callable(value := known[key]) else value for key in given})


def _check_names(config_class: type[BlockformerConfig], names: Iterable[str]) -> None:
    """Refuse fields that a config does not have, all at once; for an official name the error gives ours."""
    unknown = unknown_fields(config_class, names)
    if not unknown:
        return
    from ..conversion.families.registry import official_names  # lists the classes of transformers, which takes time

    ours = official_names(config_class)

    def told(name: str) -> str:
        others = [each.__name__ for each in CONFIGS.values() if name in axes(each)]
        hint = f" It is a field of {' and '.join(others)}." if others else did_you_mean(name, axes(config_class))
        hint = f" It is called '{ours[name]}' here." if name in ours else hint
        return f"{config_class.__name__} has no field '{name}'.{hint}"

    raise ValueError(" ".join(map(told, unknown)))
