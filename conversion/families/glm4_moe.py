"""GLM-4.5 and 4.6 (GLM team, 2025): DeepSeek's experts, a part of each head turns, perhaps a norm on queries and keys.

Checkpoints hold a layer after the last one, which predicts one token more.
"""

from .fields import Flag, constants
from .llama_like import ATTENTION, MLP, NORMS, Q_AND_K_NORM
from .rope import Rope
from .with_experts import (
    DEEPSEEK_FIELDS,
    DEEPSEEK_GROUPS,
    FIRST_DENSE,
    SHARED_EXPERTS,
    ExpertsFamily,
    shared_experts,
)

FAMILY = ExpertsFamily(
    "glm4_moe",
    "Glm4Moe",
    layer={**ATTENTION, **MLP, **NORMS, **Q_AND_K_NORM},
    sparse=SHARED_EXPERTS,
    passed_over=("layers.{layer}.",),
    fields={**DEEPSEEK_FIELDS, "attention_bias": "attention_bias"},
    rope=Rope(by_part=True),
    unsupported=DEEPSEEK_GROUPS,
    without_effect=("router_aux_loss_coef", "output_router_logits"),
    computed=(
        shared_experts("n_shared_experts"),
        FIRST_DENSE,
        Flag("use_qk_norm", "qk_norm", (False, True)),
        constants(num_nextn_predict_layers=0),
    ),
    extra_fields=["partial_rotary_factor"],
)
