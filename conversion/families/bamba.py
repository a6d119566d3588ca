"""Bamba (IBM, Princeton, CMU and UIUC, 2024): most layers have a selective state space in place of attention."""

from transformers import PretrainedConfig

from ..rules.operations import Split
from ..rules.table import Rule, module_rules
from ..values import Rope, ScansByLayer
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import few_full, rotary
from .shared import ATTENTION, LLAMA

SCAN = "state_space"
SAME = ("A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias", "norm.weight")
MAPS = tuple(f"in_proj_{part}" for part in ("z", "v", "k", "q", "dt"))
"""Ours, in the order in which official classes hold them in one matrix."""


def scan_rules(config: PretrainedConfig, module: str = "mamba", ours: str = "self_attn", kind=SCAN) -> list[Rule]:
    """The rules of a layer with a selective state space, without its prefix.

    Args:
        config: ours.
        module: the official name of the state space.
        ours: its name here.
        kind: the type of layers that have one.
    """
    if kind not in config.layer_types:
        return []
    values, keys = config.mamba_n_heads * config.mamba_d_head, config.mamba_n_groups * config.mamba_d_state
    parts = Split(0, (values, values, keys, keys, config.mamba_n_heads))
    return [
        *module_rules({f"{module}.in_proj": tuple(f"{ours}.{name}" for name in MAPS)}, parts),
        *(Rule(f"{module}.{name}", f"{ours}.{name}") for name in SAME),
        *module_rules({f"{module}.out_proj": f"{ours}.out_proj"}),
    ]


def twice_the_width(settings: dict) -> int:
    """A fresh model's heads, of 64 channels each."""
    return max(settings["hidden_size"] // 32, 1)


NETWORK = {f"feed_forward.{part}": f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")}
NORMS = {"input_layernorm": "self_attn_pre_norm", "pre_ff_layernorm": "mlp_pre_norm"}
"""Modules of a layer, official and ours."""
FAMILY = Family(
    "bamba",
    "BambaForCausalLM BambaModel",
    structure=LLAMA,
    fresh={
        **rotary(10_000.0, 0.5),
        "layer_types": few_full(8, SCAN),
        "mamba_n_heads": twice_the_width,
        "norm_eps": 1e-5,
    },
    names=DecoderNames(
        layer={**ATTENTION, **NETWORK, **NORMS},
        outer={"embed_tokens": "embed_tokens", "final_layernorm": "norm"},
        more_rules=scan_rules,
    ),
    settings=DecoderSettings(
        rope=Rope(by_part=True),
        window=ScansByLayer(by_index=True),
        training_only=["z_loss_coefficient"],
        reads_whole=False,
    ),
)
