"""Layers after a model's last one, which predict further tokens: published with it, and part of no model here."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

NUMBER = re.compile("0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class LayersBeyond:
    """Which official tensors belong to such layers. The official classes leave them out, too.

    Args:
        prefixes: what their names begin with; `{layer}` stands for each number from `layers` on.
        layers: how many layers the model has.
    """

    prefixes: tuple[str, ...] = ()
    layers: int = 0

    def holds(self, name: str) -> bool:
        """Whether a tensor belongs to one."""
        return any(self._begins(name, prefix) for prefix in self.prefixes)

    def _begins(self, name: str, prefix: str) -> bool:
        before, placeholder, after = prefix.partition("{layer}")
        if not placeholder or not name.startswith(before):
            return name.startswith(prefix)
        number, separator, _ = name.removeprefix(before).partition(after)
        return bool(separator) and NUMBER.fullmatch(number) is not None and int(number) >= self.layers

    def among(self, names: Iterable[str]) -> list[str]:
        """The tensors, out of some, that belong to one."""
        return [name for name in names if self.holds(name)]
