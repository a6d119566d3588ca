"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 (NVIDIA, 2025): selective state spaces, some attention, squared ReLU.

Each official layer is one residual step: attention, a state space, a feed-forward network or experts, which have no
gate. One of the first two and the network after it, if there is one, are a layer of ours.
"""

import itertools
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from blockformer.files.errors import ConversionError

from ..rules.table import Rule, module_rules
from ..storage.experts import OneByOne
from ..storage.spelling import Prefix
from ..values import NotExpressible, constants
from .bamba import SCAN, scan_rules, twice_the_width
from .base import Family
from .decoder import DecoderSettings
from .fresh import few_full
from .shared import LLAMA, fields_without
from .with_experts import FLOAT32_ROUTER, SELECTION_BIAS, ExpertNames, expert_groups

FULL = "full_attention"
MIXERS = {"M": SCAN, "*": FULL}
"""Letter of an official layer with attention, in `hybrid_override_pattern` -> ours."""
LETTERS = {"linear_attention": "M", "mamba": "M", FULL: "*", "attention": "*", "mlp": "-", "moe": "E"}
ATTENTIONS = {f"mixer.{name}_proj": f"self_attn.{name}_proj" for name in "qkvo"}
NETWORK = {f"mixer.{name}_proj": f"mlp.{name}_proj" for name in ("up", "down")}
OF_EXPERTS = {
    "gate": "gate",
    **{f"shared_experts.{name}_proj": f"shared_expert.{name}_proj" for name in ("up", "down")},
    "fc1_latent_proj": "to_latent",
    "fc2_latent_proj": "from_latent",
}
"""Modules of a layer of experts, official and ours."""
STACKS = (f"gate.{SELECTION_BIAS}", "experts.up_proj", "experts.down_proj")
"""Its other tensors, the same in both."""
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
EXPERT_FIELDS = {
    **{name: name for name in ("num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size")},
    "routed_scaling_factor": "routed_scaling_factor",
    "n_routed_experts": "num_experts",
    "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
    "moe_latent_size": "moe_latent_size",
}
"""Official field of experts -> ours."""
GROUPS = expert_groups(2)
NETWORKS = {
    "-": module_rules(NETWORK),
    "E": [
        *(rule.under("mixer.", "mlp.") for rule in module_rules(OF_EXPERTS)),
        *(Rule(f"mixer.{name}", f"mlp.{name}") for name in STACKS),
    ],
}
"""Letter of an official layer without attention -> its rules, without its prefix."""


class Turns:
    """Which layers there are."""

    def read(self, official):
        letters = [LETTERS.get(kind, "?") for kind in official.config.layer_types]
        kinds: list[str] = []
        networks: list[str] = []
        for letter in letters:
            if letter in MIXERS:
                kinds.append(MIXERS[letter])
                networks.append("")
            elif letter in NETWORKS and networks and not networks[-1]:
                networks[-1] = letter
            else:
                pattern = "".join(letters)
                fix = "here a feed-forward network or experts follow attention or a state space"
                raise ConversionError(
                    f"config.json: the layers are {pattern} (M state space, * attention, - network, E experts): {fix}"
                )
        sizes = {ours: getattr(official.config, theirs) for theirs, ours in SIZES.items()} if SCAN in kinds else {}
        if not all(networks):
            sizes["mlp_layers"] = [bool(each) for each in networks]
        if "E" in letters:
            sizes |= {ours: getattr(official.config, theirs) for theirs, ours in EXPERT_FIELDS.items()}
            if not sizes["shared_expert_intermediate_size"]:  # the class takes the width of a dense layer then
                sizes["shared_expert_intermediate_size"] = official.config.intermediate_size
            sizes |= {**FLOAT32_ROUTER, **GROUPS.read(official), "router_aux_loss_coef": 0.0}
            if "-" in letters:
                sizes["mlp_layer_types"] = ["dense" if each == "-" else "sparse" for each in networks]
        layers = {"layer_types": kinds, "num_hidden_layers": len(kinds), "sliding_window": None}
        return {**layers, **sizes}

    def write(self, config, head):
        if strange := sorted(set(config.layer_types) - {*MIXERS.values()}):
            raise NotExpressible("layer_types", f"{SCAN} and {FULL}", strange[0])
        sizes = {theirs: getattr(config, ours) for theirs, ours in SIZES.items()} if SCAN in config.layer_types else {}
        if config.num_experts:
            if not config.shared_expert_intermediate_size:
                raise NotExpressible("shared_expert_intermediate_size", "above 0", 0)
            sizes |= {theirs: getattr(config, ours) for theirs, ours in EXPERT_FIELDS.items()}
            sizes |= {"n_shared_experts": 1, **GROUPS.write(config, head)}
        return {"hybrid_override_pattern": pattern_of(config), **sizes}


def networks_of(config: PretrainedConfig) -> list[str]:
    """Each of our layers' feed-forward network as the letter of its official layer; empty where it has none."""
    kinds = config.mlp_layer_types or ["dense"] * config.num_hidden_layers
    pairs = zip(kinds, config.mlp_layers or [True] * config.num_hidden_layers, strict=True)
    return [("E" if kind == "sparse" else "-") if has_network else "" for kind, has_network in pairs]


def pattern_of(config: PretrainedConfig) -> str:
    """The official layers of our layers, a letter each."""
    letters = {kind: letter for letter, kind in MIXERS.items()}
    pairs = zip(config.layer_types, networks_of(config), strict=True)
    return "".join(letters[kind] + network for kind, network in pairs)


@dataclass(kw_only=True, eq=False)
class TurnsNames(ExpertNames):
    """The names of a decoder whose official layers are one or two to each of ours."""

    def stack_rules(self, config: PretrainedConfig) -> list[Rule]:
        rules, place = super().stack_rules(config), 0
        for layer, (kind, network) in enumerate(zip(config.layer_types, networks_of(config), strict=True)):
            ours = f"layers.{layer}."
            mixer = scan_rules(config, "mixer") if kind == SCAN else module_rules(ATTENTIONS)
            parts = [[*mixer, *module_rules({"norm": "self_attn_pre_norm"})]]
            parts += [[*NETWORKS[network], *module_rules({"norm": "mlp_pre_norm"})]] if network else []
            for part in parts:
                rules += [rule.under(f"layers.{place}.", ours) for rule in part]
                place += 1
        return rules

    def sparse_places(self, config: PretrainedConfig) -> list[str]:
        return [f"layers.{place}." for place, letter in enumerate(pattern_of(config)) if letter == "E"]


IN_TURNS = few_full(4, SCAN)


def some_networks(settings: dict) -> list[Any]:
    """The networks of a fresh model: a state space before attention is without one."""
    kinds = [*IN_TURNS(settings), None]
    return [kind == FULL or after != FULL for kind, after in itertools.pairwise(kinds)]


FAMILY = Family(
    "nemotron_h",
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
        published=OneByOne("mixer.", ("up_proj", "down_proj"), in_class="mixer."),
        sparse_rules=lambda config: [],  # in `stack_rules`, layer by layer
        outer={"embeddings": "embed_tokens", "norm_f": "norm"},
        spellings=[Prefix("backbone.", "model.", ())],
        outside=["mtp.*"],
    ),
    settings=DecoderSettings(
        # Whatever the last one says, the official class ties nothing.
        usual=fields_without("num_hidden_layers", "hidden_dropout", "tie_word_embeddings"),
        rope=None,
        window=Turns(),
        unsupported={"attention_bias": (False,)},  # which the official class does not follow
        computed=[constants(attention_bias=False)],
        reads_whole=False,
    ),
    pad_token_learns=True,
)
