"""gpt-oss (OpenAI, 2025): experts with biases and a clamped gate, attention sinks, windows in every other layer.

Its weights are published with 4 bits (MXFP4): blocks of 32 numbers that share a power of two. Conversion makes bfloat16
of them (`storage/mxfp4.py`), and what goes back out is bfloat16, as other tools publish it.

E experts, C hidden size, I inner width of an expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blockformer.files.errors import ConversionError

from ..rules.operations import Chain, Identity, Reversible, Shape, Transpose
from ..rules.table import Rule, module_rules
from ..values import Computed
from .base import Family
from .decoder import DecoderSettings
from .fresh import every
from .shared import LLAMA, sinks
from .with_experts import ExpertNames


@dataclass(frozen=True)
class DeinterleaveGateUp:
    """[E, 2 n, ...] with gate and up in turn -> all of gate, then all of up."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat((tensor[:, ::2], tensor[:, 1::2]), dim=1) for tensor in tensors]

    def inverse(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.stack(tensor.chunk(2, dim=1), dim=2).flatten(1, 2) for tensor in tensors]

    def forward_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        for shape in shapes:
            if len(shape) < 2 or shape[1] % 2:
                raise ConversionError(f"axis 1 of shape {list(shape)} cannot be split in two")
        return list(shapes)

    inverse_shapes = forward_shapes


IN_TURN = DeinterleaveGateUp()


def sparse_rules(config, order: Reversible = IN_TURN):
    """The rules of a sparse layer. The class has its weights transposed, and gate and up in an order."""
    return [
        *module_rules({"mlp.router": "mlp.gate"}),
        Rule("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj", Chain(Transpose(1, 2), order)),
        Rule("mlp.experts.gate_up_proj_bias", "mlp.experts.gate_up_proj_bias", order),
        Rule("mlp.experts.down_proj", "mlp.experts.down_proj", Transpose(1, 2)),
        Rule("mlp.experts.down_proj_bias", "mlp.experts.down_proj_bias"),
    ]


LIMIT = Computed(
    # Older releases have the number in their code.
    lambda official: {"expert_gate_limit": getattr(official.config, "swiglu_limit", 7.0)},
    lambda config, head: {"swiglu_limit": config.expert_gate_limit},
)


STRUCTURE = {**LLAMA, "attention_sinks": True, "expert_bias": True, "hidden_act": "quick_gelu"}
SETTINGS: dict[str, Any] = {
    "fields": {"intermediate_size": ("intermediate_size", "moe_intermediate_size")},
    "unsupported": {"hidden_act": ("silu",), "swiglu_alpha": (1.702,)},
}
FAMILY = Family(
    "gpt_oss",
    "GptOssForCausalLM GptOssModel GptOssForSequenceClassification GptOssForTokenClassification",
    structure=STRUCTURE,
    fresh={
        **every(2, 128),
        "attention_bias": True,
        "attention_output_bias": True,
        "expert_gate_limit": 7.0,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "head_dim": 64,
        "norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    names=ExpertNames(published=None, sparse_rules=sparse_rules, more_rules=sinks),
    settings=DecoderSettings(computed=[LIMIT], **SETTINGS),
)


# OpenAI's Privacy Filter (2026): a small gpt-oss that looks both ways, to each side as far as its window says, and
# finds names, addresses and the like. Neighbouring channels of a head turn, and up follows gate as a whole.
def _read_dropout(official):
    return {"classifier_dropout": official.config.classifier_dropout}


def _write_dropout(config, head):
    return {"classifier_dropout": config.classifier_dropout or 0.0}


PRIVACY_FILTER = Family(
    "openai_privacy_filter",
    "OpenAIPrivacyFilterForTokenClassification OpenAIPrivacyFilterModel",
    structure={**STRUCTURE, "bidirectional": True, "router_float32": True},
    names=ExpertNames(
        published=None, sparse_rules=partial(sparse_rules, order=Identity()), more_rules=sinks, pairs=True
    ),
    settings=DecoderSettings(
        computed=[LIMIT, Computed(_read_dropout, _write_dropout)],
        not_none=["sliding_window"],
        reads_whole=False,
        **SETTINGS,
    ),
)
