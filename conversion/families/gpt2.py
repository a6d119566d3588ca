"""GPT-2 (Radford et al., 2019): a decoder with learned positions and layer norms before each sub-layer.

Its matrices are stored [inputs, outputs], with queries, keys and values in one. The first checkpoints have no prefix
and contain the causal mask of every layer, which is computed today; it is kept next to the weights for the way back.

Two differences only matter for training: ours has a dropout before the classification head if the config asks for
one, the official class never has; and our fresh weights all have the same deviation. The settings `summary_*` belong
to a head that ours does not have, and are kept for the way back.
"""

import copy
from dataclasses import dataclass

import torch

from ..rules.operations import Chain, EqualParts, Identity, Reversible, Split, Transpose, ZeroBias
from ..rules.table import Rule
from ..values import NOT_PRUNED, PRUNED_HEADS, Computed, Flag, InnerSize
from .base import Family
from .decoder import DecoderNames, DecoderSettings
from .fresh import every
from .gpt_neox import by_head
from .oracle import Oracle
from .shared import GPT, QKV, READ_TYPED, TYPED, fields_without

MASKED = -1e4
BIASES = ("attention_bias", "attention_output_bias", "mlp_bias", "norm_bias")
"""What every GPT-2 has; one without is written with zeros, which is the same function."""
FRESH = {
    "vocab_size": 50257,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "hidden_act": "gelu_new",
    "tie_word_embeddings": True,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}
NORMS = {"ln_1": "self_attn_pre_norm", "ln_2": "mlp_pre_norm"}
OUTER = {"wte": "embed_tokens", "wpe": "embed_positions", "ln_f": "norm"}
LAYER = ("h.{layer}.", "layers.{layer}.")
MASKS = ["h.{layer}.attn.bias", "h.{layer}.attn.masked_bias"]
"""What the first checkpoints hold of each layer's attention, and is computed today."""
LINEAR = {"attn.c_proj": "self_attn.o_proj", "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}
SUMMARY = (
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
)


def stack_rules(config):
    """The rules of the stack."""
    rules = [Rule("wte.weight", "embed_tokens.weight"), Rule("wpe.weight", "embed_positions.weight")]
    for names in (("ln_f", "norm"), *NORMS.items()):
        own = biased(*names, Identity(), config.norm_bias)
        rules += own if names[0] == "ln_f" else [rule.under(*LAYER) for rule in own]
    for theirs, ours in LINEAR.items():
        has_bias = config.mlp_bias if ours.startswith("mlp") else config.attention_output_bias
        rules += [rule.under(*LAYER) for rule in biased(theirs, ours, Transpose(), has_bias)]
    # Layers without some heads have smaller parts.
    split = EqualParts(3) if config.pruned_heads else Split(0, (config.hidden_size,) * 3)
    fused = biased("attn.c_attn", QKV, Transpose(), config.attention_bias, split)
    return rules + [rule.under(*LAYER) for rule in fused]


def biased(theirs: str, ours: str | tuple[str, ...], op: Reversible, has_bias: bool, split: Reversible | None = None):
    """The rules of a module's weight and bias, which is zero where ours has none."""

    def chained(op: Reversible) -> Reversible:
        return op if split is None else Chain(op, split)

    def named(kind: str):
        return f"{ours}.{kind}" if isinstance(ours, str) else tuple(f"{name}.{kind}" for name in ours)

    names = (f"{theirs}.weight", f"{theirs}.bias")
    if not has_bias:
        return [Rule(names, named("weight"), ZeroBias(chained(op)))]
    return [Rule(names[0], named("weight"), chained(op)), Rule(names[1], named("bias"), chained(Identity()))]


@dataclass(kw_only=True, eq=False)
class GPT2Names(DecoderNames):
    """GPT-2's names; its first checkpoints hold more than today's."""

    def stack_rules(self, config):
        return stack_rules(config)

    def notes_on_writing(self, config):
        absent = [name for name in BIASES if not getattr(config, name)]
        return [f"biases of zero are written where the model has none ({', '.join(absent)})"] if absent else []

    def reads_ignored(self, name):
        """See `Names.reads_ignored`: all that it ignores is masks."""
        return True

    def check_ignored(self, name, tensor):
        if name.endswith(".masked_bias"):
            value = torch.tensor(MASKED, dtype=tensor.dtype) if tensor.dtype.is_floating_point else None
            is_value = value is not None and tensor.numel() == 1 and torch.equal(tensor.reshape(()), value)
            return None if is_value else f"is not {MASKED:g}, so it hides other keys than the official class does"
        size = tensor.shape[-1] if tensor.dim() else 0
        if tuple(tensor.shape) == (1, 1, size, size):
            causal = torch.ones(size, size, dtype=torch.bool).tril().to(tensor.dtype)
            if torch.equal(tensor[0, 0], causal):
                return None
        return "is not the causal mask, [1, 1, n, n] with 1 up to the diagonal, that the official class computes"


@dataclass(kw_only=True, eq=False)
class GPT2Settings(DecoderSettings):
    """GPT-2's settings, some of which belong to a head that ours lacks."""

    def written_as(self, config):
        """See `Settings.written_as`. A bias that ours lacks is fine: it is written as zero."""
        if config.norm_type == "layer_norm" and config.norm_weight == "plain":
            config = copy.copy(config)
            for name in BIASES:
                setattr(config, name, True)
        return config

    def unused(self, official):
        """See `Settings.unused`. Settings of a head that ours lacks count too where they say something."""
        usual = self.defaults.to_dict()
        told = {name for name in SUMMARY if name in official and official[name] != usual[name]}
        return sorted({*super().unused(official), *told} - set(self.official_class.attribute_map))


FAMILY = Family(
    "gpt2",
    "GPT2LMHeadModel GPT2Model GPT2ForSequenceClassification GPT2ForTokenClassification GPT2ForQuestionAnswering",
    structure={**GPT, "position_type": "learned"},
    fresh={**FRESH, **TYPED},
    names=GPT2Names(
        root="transformer.",
        token_head="classifier",
        layer={"attn.c_attn": QKV, **LINEAR, **NORMS},
        outer=OUTER,
        layers=LAYER[0],
        ignored=MASKS,
        refused={
            "GPT2DoubleHeadsModel": "it has two heads at once, and the second reads the token that a caller points at; "
            "for its language model, load it as GPT2LMHeadModel in transformers and save that"
        },
    ),
    settings=GPT2Settings(
        rope=None,
        head_dim=None,
        computed=[
            InnerSize("n_inner"),
            Flag("scale_attn_weights", "attention_scale", (1.0, None)),
            PRUNED_HEADS,
            READ_TYPED,
        ],
        extra_fields=["pruned_heads"],
        unsupported=dict.fromkeys(
            ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"), (None, False)
        ),
        not_none=["initializer_range"],
    ),
    oracle=Oracle(not_runnable=lambda family, config: NOT_PRUNED if config.pruned_heads else None),
    pad_token_learns=True,
)


# SantaCoder and StarCoder (BigCode, 2023): GPT-2 with one key/value head, and matrices the usual way round.
def split_bigcode(config, rows):
    """One key/value head comes last; as many as query heads are side by side with theirs."""
    return Split(0, rows) if config.num_key_value_heads == 1 else by_head(config, rows)


KEYS = Computed(
    lambda official: {"num_key_value_heads": 1 if official.config.multi_query else official.config.n_head},
    lambda config, head: {"multi_query": config.num_key_value_heads == 1},
)
BIGCODE = Family(
    "gpt_bigcode",
    "GPTBigCodeForCausalLM GPTBigCodeModel GPTBigCodeForSequenceClassification GPTBigCodeForTokenClassification",
    structure={**GPT, "position_type": "learned"},
    fresh={
        **TYPED,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_eps": 1e-5,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    names=DecoderNames(
        root="transformer.",
        token_head="classifier",
        layer={"attn.c_attn": QKV, **LINEAR, **NORMS},
        outer=OUTER,
        layers="h.{layer}.",
        split=split_bigcode,
        ignored=MASKS,
    ),
    settings=DecoderSettings(
        usual=fields_without("num_key_value_heads"),
        rope=None,
        computed=[InnerSize("n_inner"), KEYS, Flag("scale_attn_weights", "attention_scale", (1.0, None)), READ_TYPED],
    ),
    pad_token_learns=True,
)


# GPT-Neo (Black et al., 2021): GPT-2 with separate matrices, scores as they are, and windows in every other layer.
KINDS = {"global": "full_attention", "local": "sliding_attention"}
"""Official type of a layer -> ours."""


def read_layers(official):
    """The official list has a type for each layer, and one window for all that are local."""
    config = official.config
    kinds = [KINDS[each] for each in config.attention_layers]
    return {"layer_types": kinds, "sliding_window": config.window_size if KINDS["local"] in kinds else None}


def write_layers(config, head):
    """The way back, as one block of all layers."""
    names = {ours: theirs for theirs, ours in KINDS.items()}
    window = {} if config.sliding_window is None else {"window_size": config.sliding_window}
    return {"attention_types": [[[names[kind] for kind in config.layer_types], 1]], **window}


NEO = Family(
    "gpt_neo",
    "GPTNeoForCausalLM GPTNeoModel GPTNeoForSequenceClassification "
    "GPTNeoForTokenClassification GPTNeoForQuestionAnswering",
    structure={**GPT, "position_type": "learned", "attention_bias": False, "attention_scale": 1.0},
    fresh={
        **FRESH,
        **TYPED,
        **every(2, 256),
        "max_position_embeddings": 2048,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    names=DecoderNames(
        root="transformer.",
        token_head="classifier",
        layer={
            **{f"attn.attention.{name}": f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")},
            "attn.attention.out_proj": "self_attn.o_proj",
            "mlp.c_fc": "mlp.up_proj",
            "mlp.c_proj": "mlp.down_proj",
            **NORMS,
        },
        outer=OUTER,
        layers="h.{layer}.",
        ignored=["h.{layer}.attn.attention.bias", "h.{layer}.attn.attention.masked_bias"],
    ),
    settings=DecoderSettings(
        rope=None,
        head_dim=None,
        computed=[InnerSize("intermediate_size"), Computed(read_layers, write_layers), READ_TYPED],
        reads_whole=False,
    ),
    pad_token_learns=True,
)
