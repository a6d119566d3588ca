"""What earlier releases of a family's code wrote in a `config.json`, as today's official class reads it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Formerly = Mapping[str, str] | Callable[[Mapping[str, Any]], Any]
"""Earlier value of an official field -> today's, or what makes today's of all entries."""


@dataclass(frozen=True)
class Former:
    """Earlier names of settings.

    Attributes:
        fields: earlier name of an official field -> today's, perhaps with earlier values -> today's, or with a function
            that makes today's value of all entries.
        types: earlier `model_type` -> what its config meant by entries that it leaves out.
    """

    fields: Mapping[str, str | tuple[str, Formerly]] = field(default_factory=dict)
    types: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def names(self) -> dict[str, str]:
        """Earlier name -> today's."""
        return {name: today if isinstance(today, str) else today[0] for name, today in self.fields.items()}

    def with_defaults(self, official: Mapping[str, Any], model_type: str) -> Mapping[str, Any]:
        """The entries under `model_type`, with the defaults that an earlier type had for what they leave out."""
        left_out = self.types.get(str(official.get("model_type")))
        return official if left_out is None else {**left_out, **official, "model_type": model_type}

    def renamed(self, official: Mapping[str, Any]) -> dict[str, Any]:
        """The entries under an earlier name, under today's."""
        entries: dict[str, Any] = {}
        for name, known in self.fields.items():
            if name in official:
                today, values = (known, {}) if isinstance(known, str) else known
                value = official[name]
                if callable(values):
                    value = values(official)
                elif isinstance(value, str):
                    value = values.get(value, value)
                entries[today] = value
        return entries
