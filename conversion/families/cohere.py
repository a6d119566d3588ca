"""Command R (Cohere, 2024) and Command R7B and A (2025): parallel sub-layers that share a layer norm without a bias.

Later ones have experts (2026), or a vision tower next to the text (North Micro Vision, 2026).

Neighbouring channels of a head make a pair. The layers of the later ones that see everything have no positions.
"""

from blockformer.files.errors import ConversionError, shown

from ..rules.operations import DeinterleaveRotaryNorms
from ..rules.table import Rule
from ..values import AXES, Computed, Flag, Rope, only_sliding_layers_rotate
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import every, rotary
from .shared import ATTENTION, EXPERT_FIELDS, LLAMA, MLP, fields_without
from .with_experts import FINE, SHARED_EXPERTS, ExpertNames

STRUCTURE = {**LLAMA, "norm_type": "layer_norm", "norm_bias": False, "residual": "parallel_shared_norm"}
MODULES = {**ATTENTION, **MLP, "input_layernorm": "self_attn_pre_norm"}
FIELDS = {"logit_scale": "logit_scale"}


def norms_of_heads(config):
    """Norms of heads have pairs side by side, too."""
    op = DeinterleaveRotaryNorms(config.head_dim, config.head_dim)
    return [Rule(name, name, op) for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight")]


COHERE = Family(
    "cohere",
    "CohereForCausalLM CohereModel",
    structure=STRUCTURE,
    fresh={**rotary(500_000.0), "norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True},
    names=DecoderNames(layer=MODULES, pairs=True, more_rules=norms_of_heads),
    settings=DecoderSettings(
        fields=FIELDS,
        computed=[Flag("use_qk_norm", "qk_norm", (False, "per_head"))],
    ),
)
COHERE2 = Family(
    "cohere2",
    "Cohere2ForCausalLM Cohere2Model",
    structure=STRUCTURE,
    fresh={
        **rotary(50_000.0),
        **every(4, 4096),
        **every(4),
        "norm_eps": 1e-5,
        "logit_scale": 0.25,
        "tie_word_embeddings": True,
    },
    names=DecoderNames(layer=MODULES, pairs=True),
    settings=DecoderSettings(
        fields=FIELDS,
        computed=[Computed(only_sliding_layers_rotate)],
    ),
)


def _read_sparse(official):
    """Widths, the norm, the router, and which layers rotate, as the official class takes them from its config."""
    config = official.config
    if config.num_shared_experts and config.shared_expert_combination_strategy != "sum":
        said = shown(config.shared_expert_combination_strategy)
        raise ConversionError(
            f"config.json: shared_expert_combination_strategy is {said}; here, what all experts give is added ('sum')"
        )
    dense, wide = config.prefix_dense_intermediate_size, config.intermediate_size
    is_softmax, is_rms = config.expert_selection_fn == "softmax", config.rms_norm_eps is not None
    dense_layers_rotate = config.prefix_dense_sliding_window_pattern == 1
    kinds = zip(config.layer_types, config.mlp_layer_types, strict=True)
    rotates = [kind == "sliding_attention" or (dense_layers_rotate and mlp == "dense") for kind, mlp in kinds]
    return {
        "intermediate_size": wide if dense is None else dense,
        "moe_intermediate_size": wide,
        "shared_expert_intermediate_size": wide * config.num_shared_experts,
        "norm_type": "rms_norm" if is_rms else "layer_norm",
        "norm_eps": config.rms_norm_eps if is_rms else config.layer_norm_eps,
        "router_score": config.expert_selection_fn,
        "norm_topk_prob": is_softmax or config.norm_topk_prob,  # a softmax of the chosen logits is normed
        "rope_layers": None if all(rotates) else rotates,
    }


def _write_sparse(config, head):
    wide, is_rms = config.moe_intermediate_size or config.intermediate_size, config.norm_type == "rms_norm"
    rotates = config.rope_layers or [True] * config.num_hidden_layers
    kinds = zip(rotates, config.layer_types, config.mlp_layer_types or (), strict=False)
    is_still = any(not turns and mlp == "dense" for turns, _, mlp in kinds)
    return {
        "intermediate_size": wide,
        "prefix_dense_intermediate_size": None if config.intermediate_size == wide else config.intermediate_size,
        "num_shared_experts": config.shared_expert_intermediate_size // wide,
        "shared_expert_combination_strategy": "sum",
        "rms_norm_eps": config.norm_eps if is_rms else None,
        **({} if is_rms else {"layer_norm_eps": config.norm_eps}),
        "expert_selection_fn": config.router_score,
        "norm_topk_prob": config.norm_topk_prob,
        "prefix_dense_sliding_window_pattern": 2 if is_still else 1,
    }


COHERE2_MOE = Family(
    "cohere2_moe",
    "Cohere2MoeForCausalLM Cohere2MoeModel",
    structure=STRUCTURE,
    fresh={
        **rotary(50_000.0),
        **every(4, 4096),
        **every(4),
        **FINE,
        "norm_eps": 1e-5,
        "logit_scale": 0.25,
        "tie_word_embeddings": True,
    },
    names=ExpertNames(layer=MODULES, sparse=SHARED_EXPERTS, pairs=True),
    settings=DecoderSettings(
        usual={**fields_without("rms_norm_eps", "layer_norm_eps", "intermediate_size"), **EXPERT_FIELDS},
        fields=FIELDS,
        computed=[Computed(_read_sparse, _write_sparse)],
        without_effect=("router_aux_loss_coef", "output_router_logits"),
    ),
)


class RopeWhereTurned(Rope):
    """Rotary parameters of each layer type, of one without rotation none. A text's tokens have one position each."""

    def read(self, official):
        rope, types = official.config.rope_parameters, official.config.layer_types
        if lacking := sorted({*types} - {*rope}):
            raise ConversionError(
                f"config.json: rope_parameters says nothing of {lacking[0]}; the official class needs it"
            )
        turned = {kind: rope[kind] for kind in sorted({*types}) if rope[kind] is not None}
        for kind, own in turned.items():
            self.check_part(own, f" of {kind}")
        if not turned:
            return {"position_type": "none", "rope_parameters": None, "rope_layers": None}
        usual = next(iter(turned.values()))
        own = {kind: _of_text(turned.get(kind, usual)) for kind in sorted({*types})}
        rotates = [kind in turned for kind in types]
        same = all(each == own[types[0]] for each in own.values())
        return {
            "position_type": "rotary",
            "rope_parameters": own[types[0]] if same else own,
            "rope_layers": None if all(rotates) else rotates,
        }

    def write(self, config, head):
        rope, types = config.rope_parameters or {}, config.layer_types
        turns = dict(zip(types, config.rope_layers or [bool(rope)] * len(types), strict=True))
        return {"rope_parameters": {kind: dict(rope.get(kind, rope)) if turns[kind] else None for kind in turns}}


def _of_text(rope):
    return {name: value for name, value in rope.items() if name not in (*AXES, "type")}


COMPASS = Family(
    "cohere_compass_text",
    "CohereCompassForCausalLM CohereCompassTextModel",
    config_class="CohereCompassTextConfig",
    structure=STRUCTURE,
    fresh={
        **rotary(50_000.0),
        **every(4, 4096),
        **every(4),
        "norm_eps": 1e-5,
        "logit_scale": 0.25,
        "tie_word_embeddings": True,
    },
    names=DecoderNames(
        layer=MODULES,
        refused={
            "CohereCompassTextForSequenceClassification": "it finds a row's last token by the mask, or takes a mean; "
            "here the padding token shows the last one"
        },
    ),
    settings=DecoderSettings(
        fields=FIELDS,
        rope=RopeWhereTurned(),
        computed=[
            Computed(lambda official: {"logit_scale": 1.0 if (scale := official.config.logit_scale) is None else scale})
        ],
        unsupported={"pooling": (None,)},
    ),
)
