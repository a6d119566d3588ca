"""nanochat (Karpathy, 2025) as transformers has it: RMS norms without a factor, also on the embeddings, squared ReLU.

Its rotation turns the other way, which exchanges the halves of each head.
"""

from ..rules.operations import LastFirst
from ..rules.table import Rule, module_rules
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import rotary
from .shared import LLAMA

TURNED = ("self_attn.q_proj", "self_attn.k_proj")


def turned_rules(config) -> list[Rule]:
    """The rules of queries and keys."""
    return module_rules({name: name for name in TURNED}, LastFirst(config.head_dim, config.head_dim // 2))


FAMILY = Family(
    "nanochat",
    "NanoChatForCausalLM NanoChatModel",
    structure={
        **LLAMA,
        "norm_weight": "none",
        "embedding_norm": True,
        "qk_norm": "rotated",
        "gated_mlp": False,
    },
    fresh={**rotary(10_000.0), "hidden_act": "relu2", "final_logit_softcapping": 15.0},
    names=DecoderNames(
        layer={
            "self_attn.v_proj": "self_attn.v_proj",
            "self_attn.o_proj": "self_attn.o_proj",
            "mlp.fc1": "mlp.up_proj",
            "mlp.fc2": "mlp.down_proj",
        },
        outer={"embed_tokens": "embed_tokens"},
        more_rules=turned_rules,
    ),
    settings=DecoderSettings(fields={"final_logit_softcapping": "final_logit_softcapping"}),
)
