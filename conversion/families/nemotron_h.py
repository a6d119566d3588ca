"""Nemotron-H and Nemotron Nano 2 (NVIDIA, 2025): selective state spaces, some attention, and squared ReLU, in turn.

Each official layer is one residual step: attention, a state space, or a feed-forward network. One of the first two and
the network after it, if there is one, are a layer of ours.
"""

import itertools
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from blockformer.files.errors import ConversionError

from ..rules.table import Rule, module_rules
from ..storage.spelling import Prefix
from ..values import NotExpressible
from .bamba import SCAN, scan_rules, twice_the_width
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import few_full
from .shared import LLAMA, fields_without

FULL = "full_attention"
MIXERS = {"M": SCAN, "*": FULL}
"""Letter of an official layer with attention, in `hybrid_override_pattern` -> ours."""
LETTERS = {"linear_attention": "M", "mamba": "M", FULL: "*", "attention": "*", "mlp": "-", "moe": "E"}
ATTENTIONS = {f"mixer.{name}_proj": f"self_attn.{name}_proj" for name in "qkvo"}
NETWORK = {f"mixer.{name}_proj": f"mlp.{name}_proj" for name in ("up", "down")}
SIZES = {
    "mamba_num_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "ssm_state_size": "mamba_d_state",
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
    "mamba_hidden_act": "mamba_hidden_act",
    "time_step_min": "mamba_step_min",
}
"""Official field of a state space -> ours."""
NO_EXPERTS = (
    "its experts have no gate, and no experts here are like that; run the model with transformers, or convert one of "
    "the family without experts"
)


class Turns:
    """Which layers there are."""

    def read(self, official):
        """See `Value.read`."""
        letters = [LETTERS.get(kind, "?") for kind in official.config.layer_types]
        if "E" in letters:
            raise ConversionError(f"config.json: some layers are experts (E in hybrid_override_pattern): {NO_EXPERTS}")
        kinds, networks = [], []
        for letter in letters:
            if letter in MIXERS:
                kinds.append(MIXERS[letter])
                networks.append(False)
            elif letter == "-" and networks and not networks[-1]:
                networks[-1] = True
            else:
                pattern = "".join(letters)
                fix = "here a feed-forward network follows attention or a state space"
                raise ConversionError(
                    f"config.json: the layers are {pattern} (M state space, * attention, - network): {fix}"
                )
        sizes = {ours: getattr(official.config, theirs) for theirs, ours in SIZES.items()} if SCAN in kinds else {}
        if not all(networks):
            sizes["mlp_layers"] = networks
        layers = {"layer_types": kinds, "num_hidden_layers": len(kinds), "sliding_window": None}
        return {**layers, **sizes}

    def write(self, config, head):
        """See `Value.write`."""
        letters = {kind: letter for letter, kind in MIXERS.items()}
        if strange := sorted(set(config.layer_types) - set(letters)):
            raise NotExpressible("layer_types", f"{SCAN} and {FULL}", strange[0])
        pairs = zip(config.layer_types, networks_of(config), strict=True)
        pattern = "".join(letters[kind] + "-" * has_network for kind, has_network in pairs)
        sizes = {theirs: getattr(config, ours) for theirs, ours in SIZES.items()} if SCAN in config.layer_types else {}
        return {"hybrid_override_pattern": pattern, **sizes}


def networks_of(config: PretrainedConfig) -> list[bool]:
    """Whether each of our layers has a feed-forward network."""
    return config.mlp_layers or [True] * config.num_hidden_layers


@dataclass(kw_only=True, eq=False)
class TurnsNames(DecoderNames):
    """The names of a decoder whose official layers are one or two to each of ours."""

    def stack_rules(self, config: PretrainedConfig) -> list[Rule]:
        """See `DecoderNames.stack_rules`."""
        rules, place = super().stack_rules(config), 0
        for layer, (kind, has_network) in enumerate(zip(config.layer_types, networks_of(config), strict=True)):
            ours = f"layers.{layer}."
            mixer = scan_rules(config, "mixer") if kind == SCAN else module_rules(ATTENTIONS)
            parts = [[*mixer, *module_rules({"norm": "self_attn_pre_norm"})]]
            parts += [module_rules({**NETWORK, "norm": "mlp_pre_norm"})] * has_network
            for part in parts:
                rules += [rule.under(f"layers.{place}.", ours) for rule in part]
                place += 1
        return rules


IN_TURNS = few_full(4, SCAN)


def some_networks(settings: dict) -> list[Any]:
    """The networks of a fresh model: a state space before attention is without one."""
    kinds = [*IN_TURNS(settings), None]
    return [kind == FULL or after != FULL for kind, after in itertools.pairwise(kinds)]


FAMILY = Family(
    "nemotron_h",
    "NemotronHConfig",
    "NemotronHForCausalLM NemotronHModel",
    structure={**LLAMA, "position_type": "none", "gated_mlp": False, "hidden_act": "relu2"},
    fresh={
        "rope_parameters": None,
        "layer_types": IN_TURNS,
        "mlp_layers": some_networks,
        "mamba_n_heads": twice_the_width,
        "mamba_step_min": 0.001,
        "norm_eps": 1e-5,
    },
    names=TurnsNames(
        layer={},
        outer={"embeddings": "embed_tokens", "norm_f": "norm"},
        spellings=[Prefix("backbone.", "model.", ())],
        outside=["mtp.*"],
    ),
    settings=DecoderSettings(
        usual=fields_without("num_hidden_layers"),
        rope=None,
        window=Turns(),
        reads_whole=False,
    ),
)
