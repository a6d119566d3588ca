"""Layers that predict further tokens: where official checkpoints hold them, and whether one holds them whole.

The official classes leave them out. A checkpoint that lacks some of their tensors, or holds them in another form, is
converted without them, and what it holds is kept for the way back.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PretrainedConfig

from ..rules.patterns import tuple_of
from ..rules.table import Rule, module_rules

FURTHER = "further layers"
"""A trait: the checkpoint holds these layers whole."""
FIELD = "num_nextn_predict_layers"
"""Our field of how many there are."""
PROJECTIONS = (".eh_proj.weight", "mtp.fc.weight", "mtp_linear_proj.0.weight")
"""How the name ends that shows the first of them."""
TYPES = ("layer_types", "mlp_layer_types")
"""Official entries of the types of layers; of these layers with `mtp_` before."""


def _moved(names: str | tuple[str, ...], before: str, after: str) -> str | tuple[str, ...]:
    moved = tuple(after + name.removeprefix(before) for name in tuple_of(names))
    return moved[0] if isinstance(names, str) else moved


@dataclass(frozen=True)
class FurtherLayers:
    """Where a family's checkpoints hold layers that predict further, and the value of our field.

    Attributes:
        layer: what the official names of the decoder layer's tensors begin with; `{number}` counts the model's own too.
        modules: the official names of the other modules -> ours.
        entry: the official entry of how many there are, if any.
        most: how many there may be in this form.
        like: which of the model's layers they are like, "first" or "last", unless the config says their types.
        final_norm: our field of the same name.
        writes_types: whether configs say their types.
    """

    layer: str
    modules: Mapping[str, str]
    entry: str | None = None
    most: int | None = None
    like: str = "last"
    final_norm: str = "own"
    writes_types: bool = False

    def places(self, config: PretrainedConfig, count: int) -> list[str]:
        """What the names of each layer's tensors begin with, for a config of either layout."""
        return [self.layer.format(number=config.num_hidden_layers + k) for k in range(count)]

    def count(self, official: PretrainedConfig, root: str, names: Collection[str]) -> int:
        """How many of them a checkpoint holds whole: with a tensor for each one of the layer that they are like."""
        count, kind = self.told(official), self.like_of(official)
        like = f"{root}layers.{0 if kind == 'first' else official.num_hidden_layers - 1}."
        parts = {name.removeprefix(like) for name in names if name.startswith(like)}
        wanted = {place + part for place in self.places(official, count) for part in parts}
        numbers = range(official.num_hidden_layers, official.num_hidden_layers + count)
        wanted |= {f"{name.format(number=number)}.weight" for name in self.modules for number in numbers}
        beyond = self.places(official, count + 1)[-1] if self.most is None else f"{self.layer[:-2]}{self.most}."
        biases = {f"{name.format(number=number)}.bias" for name in self.modules for number in numbers}
        has_more = any(name.startswith(beyond) or name in biases for name in names)
        return count if count and kind and parts and wanted <= {*names} and not has_more else 0

    def like_of(self, official: PretrainedConfig) -> str | None:
        """Which of the model's layers they are like, first or last; None: an official config says other types."""
        for like in dict.fromkeys((self.like, "first", "last")):
            place, told = 0 if like == "first" else -1, {own: getattr(official, f"mtp_{own}", None) for own in TYPES}
            if all({*types} == {getattr(official, own)[place]} for own, types in told.items() if types):
                return like
        return None

    def told(self, config: PretrainedConfig) -> int:
        """How many an official config speaks of."""
        return self.most or getattr(config, self.entry or "", 0) or 0

    def rules(self, of_a_layer: Iterable[Rule], theirs: str, ours: str, config: PretrainedConfig) -> list[Rule]:
        """The rules of their tensors.

        Args:
            of_a_layer: the rules of the model's own layers.
            theirs, ours: what the names in these begin with, official and ours.
            config: ours.
        """
        rules = []
        for k, place in enumerate(self.places(config, getattr(config, FIELD))):
            number, own = config.num_hidden_layers + k, f"mtp.{k}."
            rules += module_rules({name.format(number=number): own + mine for name, mine in self.modules.items()})
            for rule in of_a_layer:
                target = _moved(rule.target, ours, f"{own}decoder.layers.0.")
                rules.append(Rule(_moved(rule.source, theirs, place), target, rule.op, rule.dtypes, rule.target_dtype))
        return rules

    def read(self, official) -> dict[str, Any]:
        if FURTHER not in official.variant.traits:
            return {}
        like = self.like_of(official.config)
        return {FIELD: self.told(official.config), "nextn_layer": like, "nextn_final_norm": self.final_norm}

    def write(self, config: PretrainedConfig, head: Any) -> dict[str, Any]:
        count, place = getattr(config, FIELD), 0 if config.nextn_layer == "first" else -1
        if self.entry is None or (self.most and not count):
            return {}
        kinds = {own: getattr(config, own)[place] for own in TYPES if self.writes_types and getattr(config, own)}
        return {self.entry: count, **{f"mtp_{own}": [kind] for own, kind in kinds.items()}}


_DEEPSEEK = "model.layers.{number}."


def _with_norm(name: str) -> dict[str, str]:
    names = {"enorm": "embedding_norm", "hnorm": "state_norm", "eh_proj": "projection", name: "decoder.norm"}
    return {_DEEPSEEK + theirs: ours for theirs, ours in names.items()}


LIKE_DEEPSEEK = FurtherLayers(_DEEPSEEK, _with_norm("shared_head.norm"), entry="num_nextn_predict_layers")
"""As DeepSeek-V3's checkpoints hold them: after the model's last layer, with copies of the embeddings and the head."""
_QWEN = {
    "mtp.pre_fc_norm_embedding": "embedding_norm",
    "mtp.pre_fc_norm_hidden": "state_norm",
    "mtp.fc": "projection",
    "mtp.norm": "decoder.norm",
}
LIKE_QWEN = FurtherLayers("mtp.layers.0.", _QWEN, most=1)
"""As Qwen3-Next's hold the only one."""
LIKE_QWEN_3_5 = FurtherLayers("mtp.layers.0.", _QWEN, "mtp_num_hidden_layers", most=1)
"""The same with an entry in the config."""
LIKE_MELLUM = FurtherLayers("mtp.layers.0.", _QWEN, "num_nextn_predict_layers", most=1, writes_types=True)
"""The same with another entry, and types in the config: by default it has a window and experts (Mellum 2)."""
LIKE_EXAONE = replace(LIKE_MELLUM, like="first", writes_types=False)
"""The same, like the first layer: dense, and with a window (K-EXAONE)."""
LIKE_HUNYUAN = replace(LIKE_DEEPSEEK, modules=_with_norm("final_layernorm"))
"""As DeepSeek-V3's, with another name of the norm (Hy3)."""
LIKE_ERNIE = FurtherLayers(
    "model.mtp_block.0.",
    {
        "model.mtp_emb_norm.0": "embedding_norm",
        "model.mtp_hidden_norm.0": "state_norm",
        "model.mtp_linear_proj.0": "projection",
    },
    entry="num_nextn_predict_layers",
    most=1,
    like="first",
    final_norm="shared",
)
"""As ERNIE 4.5's hold the only one, which is as dense as the first layer and whose states go through the final norm."""
