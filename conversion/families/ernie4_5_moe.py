"""ERNIE 4.5 with experts (Baidu, 2025): a softmax's scores with a term in the choice, experts for every token.

Checkpoints hold a layer that predicts one token more. Here it reads the states after the final norm, as in Baidu's
server FastDeploy; in the training code of Baidu's ERNIE repo it reads those before.
"""

import itertools
from typing import Any

from ..storage.experts import OneByOne
from ..values import Computed
from .base import Family
from .decoder import DecoderSettings
from .fresh import rotary
from .further import LIKE_ERNIE
from .shared import ALL_BIASES, LLAMA
from .with_experts import FINE, SHARED_EXPERTS, ExpertNames, shared_experts


def _read_layers(official) -> dict[str, Any]:
    config = official.config
    first, last, step = config.moe_layer_start_index, config.moe_layer_end_index, config.moe_layer_interval
    kinds = [(i + 1) % step == 0 and first <= i <= last for i in range(config.num_hidden_layers)]
    return {"mlp_layer_types": ["sparse" if sparse else "dense" for sparse in kinds]}


def _write_layers(config, head) -> dict[str, Any]:
    places = [i for i, kind in enumerate(config.mlp_layer_types or ()) if kind == "sparse"] or [0]
    steps = {after - before for before, after in itertools.pairwise(places)}
    return {
        "moe_layer_start_index": places[0],
        "moe_layer_end_index": places[-1],
        "moe_layer_interval": steps.pop() if len(steps) == 1 else 1,
    }


FAMILY = Family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM Ernie4_5_MoeModel",
    structure={**LLAMA, "router_selection_bias": True},
    fresh={**rotary(500_000.0), **FINE, "shared_expert_intermediate_size": 768, "tie_word_embeddings": True},
    names=ExpertNames(
        head_bias=True,
        sparse=SHARED_EXPERTS,
        ignored=["mtp_*"],
        published=OneByOne(statics="moe_statics.e_score_correction_bias"),
        bias_of_choice="gate.moe_statics.e_score_correction_bias",
        pairs=True,
        further=LIKE_ERNIE,
    ),
    settings=DecoderSettings(
        fields={
            "moe_num_experts": "num_experts",
            "moe_k": "num_experts_per_tok",
            "use_bias": (*ALL_BIASES, "lm_head_bias"),
        },
        unsupported={"moe_norm_min": (None, 1e-12)},
        computed=(shared_experts("moe_num_shared_experts"), Computed(_read_layers, _write_layers), LIKE_ERNIE),
        extra_fields=["num_nextn_predict_layers"],
    ),
)
