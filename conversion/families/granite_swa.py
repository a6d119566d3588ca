"""Granite Swash (IBM, 2026), with and without experts: Granite with windows, attention sinks and a theta by layer."""

from typing import Any

from blockformer.files.errors import ConversionError, shown

from ..values import NotExpressible, Rope
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import all_but
from .granite import FRESH, SETTINGS
from .granitemoe import FIELDS, sparse_rules
from .shared import LLAMA, sinks
from .with_experts import FINE, ExpertNames


class RopeByLayer(Rope):
    """One set of rotary parameters, and a list with each layer's theta: 0 where it does not rotate."""

    def read(self, official):
        rope, thetas = super().read(official)["rope_parameters"], official.config.layer_rope_theta
        by_type: dict[str, Any] = {}
        for kind, theta in zip(official.config.layer_types, thetas, strict=True):
            if theta and by_type.setdefault(kind, theta) != theta:
                raise ConversionError(
                    f"config.json: layer_rope_theta is {shown(thetas)}; Blockformer has one theta for all layers "
                    f"of a type ({kind}), so run this model with transformers"
                )
        if len(set(by_type.values())) > 1:
            rope = {kind: {**rope, "rope_theta": theta} for kind, theta in sorted(by_type.items())}
        elif by_type:
            rope = {**rope, "rope_theta": next(iter(by_type.values()))}
        return {"rope_parameters": rope, "rope_layers": None if all(thetas) else [bool(theta) for theta in thetas]}

    def write(self, config, head):
        given = config.rope_parameters or {}
        by_type = {kind: given.get(kind, given) for kind in config.layer_types}
        first, *others = by_type.values()
        if any({**each, "rope_theta": first.get("rope_theta")} != first for each in others):
            raise NotExpressible("rope_parameters", "the same for all layer types, except rope_theta", given)
        rotates = config.rope_layers or [True] * config.num_hidden_layers
        thetas = [
            by_type[kind].get("rope_theta", 0) * one for kind, one in zip(config.layer_types, rotates, strict=True)
        ]
        return {"rope_parameters": dict(first), "layer_rope_theta": thetas}


STRUCTURE = {**LLAMA, "attention_sinks": True}
SWA: dict[str, Any] = {
    **SETTINGS,
    "rope": RopeByLayer(),
}
GRANITE_SWA = Family(
    "granite_swa",
    "GraniteSWAForCausalLM GraniteSWAModel",
    structure=STRUCTURE,
    fresh={**FRESH, **all_but(4, 128), "tie_word_embeddings": True, "norm_eps": 1e-5},
    names=DecoderNames(more_rules=sinks),
    settings=DecoderSettings(**SWA),
)
GRANITEMOE_SWA = Family(
    "granitemoe_swa",
    "GraniteMoeSWAForCausalLM GraniteMoeSWAModel",
    structure=STRUCTURE,
    fresh={**FRESH, **FINE, **all_but(4, 128), "tie_word_embeddings": True},
    names=ExpertNames(published=None, sparse_rules=sparse_rules, more_rules=sinks),
    settings=DecoderSettings(**{**SWA, "fields": FIELDS}),
)
