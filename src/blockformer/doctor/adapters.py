"""An adapter and the model that it was trained on, from two folders, as one checkpoint whose adapter is not merged."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from blockformer.files.errors import ConversionError, shown
from blockformer.files.names import PEFT

from .any_checkpoint import AnyCheckpoint
from .finding import ERROR, WARNING, Finding, counted

PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "target_parameters": (None, []),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None,),
    **dict.fromkeys(("use_bdlora", "arrow_config", "kasa_config", "monteclora_config"), (None, False)),
}
"""Entries of `adapter_config.json` -> the values with which merging is W + scale B A, and nothing else.

Other ways to begin (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) change W, which is not stored: PEFT does it again when it
loads the adapter. Weights of `modules_to_save` take the place of the base model's.
"""


class WithAdapter(AnyCheckpoint):
    """A base model's checkpoint, with an adapter's matrices among its tensors.

    Args:
        base: the whole model.
        adapter: the adapter.
    """

    def __init__(self, base: AnyCheckpoint, adapter: AnyCheckpoint):
        self.base, self.of_adapter = base, adapter
        self.folder, self.weights, self.around, self.file = adapter.folder, adapter.weights, None, None
        self._config_file, self.wrapper, self.adapter = None, None, None
        self.config, self.extras = dict(base.config), base.extras
        self.kind = f"{adapter.kind} and its base model"
        self.findings = [*base.findings, *(each for each in adapter.findings if each.kind != "adapter")]
        lora = {name.removeprefix(PEFT): info for name, info in adapter.tensors.items()}
        self.own = {name: info.name for name, info in lora.items()}
        if whole := sorted({*lora} & {*base.tensors}):
            said = f"the adapter has {counted(len(whole), 'weight')} in place of the base model's ({shown(whole[0])})"
            fix = "they are taken, as PEFT does with modules_to_save and resized embeddings"
            self.findings.append(Finding("whole-weights", WARNING, said, fix, True))
        self.tensors = {**base.tensors, **{name: replace(info, name=name) for name, info in lora.items()}}

    def untied(self, tied: Mapping[str, str]) -> list[Finding]:
        """Weights that `modules_to_save` replaces where the base ties others to them, which PEFT leaves as they were.

        Args:
            tied: name -> name of the tensor that it is tied to, in the base model.
        """
        settings = self.of_adapter.adapter or {}
        saved = settings.get("modules_to_save") or []
        split = [
            (name, source)
            for name, source in tied.items()
            if source in self.own and name not in self.own and source.split(".")[-2] in saved
        ]
        if not split or settings.get("ensure_weight_tying"):
            return []
        name, source = split[0]
        said = (
            f"the adapter has {shown(source)} (modules_to_save), and {shown(name)}, tied to it in the base model, stays"
        )
        fix = (
            "PEFT computes with both: use merge_and_unload() of PEFT, and save the head with tie_word_embeddings false"
        )
        return [Finding("unmerged", ERROR, said, fix, names=(source, name))]

    def member(self, name: str) -> Any:
        """See `Checkpoint.member`: a file that the adapter's folder lacks is the base model's."""
        place = self.of_adapter if (self.of_adapter.folder / name).exists() else self.base
        return place.member(name)

    def read(self, name: str) -> Tensor:
        return self.of_adapter.read(self.own[name]) if name in self.own else self.base.read(name)

    def parts(self, name: str) -> Iterator[Tensor]:
        return self.of_adapter.parts(self.own[name]) if name in self.own else self.base.parts(name)

    def check_unchanged(self) -> None:
        self.base.check_unchanged()
        self.of_adapter.check_unchanged()

    def close(self) -> None:
        self.base.close()
        self.of_adapter.close()


def scale_of(adapter: Mapping[str, Any], title: str) -> float:
    """The scale of an adapter: alpha / rank, or alpha / sqrt(rank) with rsLoRA.

    Args:
        adapter: the content of `adapter_config.json`.
        title: of the folder, for the error.

    Raises:
        ConversionError: it is of a kind that is not merged here, or its settings are missing.
    """
    odd = [name for name, values in PLAIN.items() if adapter.get(name) not in (*values, *([None] if adapter else []))]
    alpha, rank = adapter.get("lora_alpha"), adapter.get("r")
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) and each > 0 for each in (alpha, rank))
    if odd or not numbers:
        why = f"adapter_config.json has {', '.join(f'{name}={adapter.get(name)!r}' for name in odd)}"
        what = why if odd else "adapter_config.json lacks r or lora_alpha"
        raise ConversionError(f"{title}: {what}, which is not merged here; use merge_and_unload() of PEFT")
    return float(alpha) / (math.sqrt(rank) if adapter.get("use_rslora") else float(rank))  # type: ignore[arg-type]
