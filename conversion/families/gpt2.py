"""GPT-2 (Radford et al., 2019): a decoder with learned positions and layer norms before each sub-layer.

Its matrices are stored [inputs, outputs], those of queries, keys and values as one. The first checkpoints have no
prefix, and hold the causal mask of every layer, which is computed today; it lies beside the weights for the way back.

Two differences are about training only: ours has a dropout before the head of rows where the config asks for one, the
official class never; and the fresh weights of ours all have one deviation. The settings `summary_*` are about a head
that ours does not have, and are kept for the way back.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ..errors import ConversionError, listed, shown
from ..rules.operations import Chain, Chunk, Identity, Operation, Transpose
from ..rules.table import Rule, RuleTable, module_rules
from .base import Form, common_entries, token_or_none, unequal
from .decoder_heads import HeadedDecoder, decoder_heads

ROOT = "transformer."
INNER = ("wte.", "wpe.", "h.", "ln_f.")
MASK, MASKED_BIAS = "h.{layer}.attn.bias", "h.{layer}.attn.masked_bias"
MASKED = -1e4
QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")
LINEAR = {"attn.c_proj": "self_attn.o_proj", "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}
NORMS = {"ln_1": "self_attn_pre_norm", "ln_2": "mlp_pre_norm"}
SAME = "vocab_size initializer_range use_cache tie_word_embeddings pad_token_id bos_token_id eos_token_id".split()
FIELDS = {
    **{name: name for name in SAME},
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
    "attn_pdrop": "attention_dropout",
    "resid_pdrop": "hidden_dropout",
    "embd_pdrop": "hidden_dropout",
    "layer_norm_epsilon": "norm_eps",
}
SETTINGS: dict[str, Any] = {
    "gated_mlp": False,
    "norm_type": "layer_norm",
    "norm_placement": "pre",
    "norm_bias": True,
    "position_type": "learned",
    "position_offset": 0,
    "type_vocab_size": 0,
    "qk_norm": False,
    "attention_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
    "float32_down_proj": False,
    "lm_head_bias": False,
    "lm_head_transform": False,
    "embedding_norm": False,
    "embedding_scale": None,
    "logit_scale": 1.0,
    "final_norm": True,
    "sliding_window": None,
    "add_cross_attention": False,
    "activation_dropout": 0.0,
}
# Official settings that change what is computed and that ours cannot say.
REFUSED = ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention")
SUMMARY = tuple(f"summary_{name}" for name in "type use_proj activation proj_to_labels first_dropout".split())
END = 50256
"""The official class's own beginning and end; a small vocabulary does not have it."""


class GPT2Family(HeadedDecoder):
    """GPT-2, with the heads that Auto classes have."""

    refused = {
        "GPT2DoubleHeadsModel": "it has two heads at once, and the second reads the token that a caller points at; for "
        "its language model, load it as GPT2LMHeadModel in transformers and save that"
    }

    def __init__(self):
        heads = decoder_heads("GPT2", ROOT, "LMHeadModel", token_score="classifier")
        super().__init__("gpt2", "GPT2Config", heads, INNER)

    # The tensors.

    def rules_for(self, form):
        """See `Family.rules_for`."""
        head = self.head(form)
        root, prefix = head.root, head.our_root
        here, there = f"{root}h.{{layer}}.", f"{prefix}layers.{{layer}}."
        rules = [
            Rule(f"{root}wte.weight", f"{prefix}embed_tokens.weight"),
            Rule(f"{root}wpe.weight", f"{prefix}embed_positions.weight"),
            *module_rules({f"{root}ln_f": f"{prefix}norm"}),
            *(Rule(theirs, ours) for theirs, ours in head.tensors),
            *module_rules({here + theirs: there + ours for theirs, ours in NORMS.items()}),
        ]
        kinds: dict[str, Operation] = {"weight": Transpose(), "bias": Identity()}
        for kind, op in kinds.items():
            rules += [Rule(f"{here}{theirs}.{kind}", f"{there}{ours}.{kind}", op) for theirs, ours in LINEAR.items()]
            fused = tuple(f"{there}{ours}.{kind}" for ours in QKV)
            rules.append(Rule(f"{here}attn.c_attn.{kind}", fused, Chain(op, Chunk(0, 3))))
        return RuleTable(rules, ignored=[root + MASK, root + MASKED_BIAS])

    def check_ignored(self, name, tensor: Tensor):
        """See `Family.check_ignored`."""
        if name.endswith(".masked_bias"):
            value = torch.tensor(MASKED, dtype=tensor.dtype) if tensor.dtype.is_floating_point else None
            is_value = value is not None and tensor.numel() == 1 and torch.equal(tensor.reshape(()), value)
            return None if is_value else f"is not {MASKED:g}, so the official class did not hide with it what it hides"
        size = tensor.shape[-1] if tensor.dim() else 0
        if tuple(tensor.shape) == (1, 1, size, size):
            causal = torch.ones(size, size, dtype=torch.bool).tril().to(tensor.dtype)
            if torch.equal(tensor[0, 0], causal):
                return None
        return "is not the causal mask, [1, 1, n, n] with 1 up to the diagonal, that the official class computes"

    # The config.

    def config_from(self, official, form: Form | None = None):
        """See `Family.config_from`."""
        self.refuse_unsupported(official)
        head = self.head(form or self.form(official))
        config = self.official_config(official)
        lines = [f"{name} is {shown(getattr(config, name))}" for name in REFUSED if getattr(config, name)]
        if config.resid_pdrop != config.embd_pdrop:
            lines.append(f"resid_pdrop is {config.resid_pdrop} and embd_pdrop is {config.embd_pdrop}: make them equal")
        if lines:
            raise ConversionError(f"config.json: settings that cannot be converted:{listed(lines)}")
        settings = {**SETTINGS, "architectures": [head.ours]}
        settings.update({ours: getattr(config, theirs) for theirs, ours in FIELDS.items()})
        settings["intermediate_size"] = 4 * config.n_embd if config.n_inner is None else config.n_inner
        settings["attention_scale"] = None if config.scale_attn_weights else 1.0
        settings["classifier_dropout"] = self.dropout_from(official, head)
        settings["pad_token_id"] = token_or_none(settings["pad_token_id"])
        for name in ("bos_token_id", "eos_token_id"):
            if settings[name] == END and config.vocab_size <= END:
                settings[name] = None
        settings.update(common_entries(config))
        self.our_config(settings)
        return settings

    def differences(self, config):
        """See `Family.differences`."""
        if not self.has_topology_of(config):
            return [f"model_type must be '{self.config_class.model_type}'"]
        heads = ", ".join(head.ours for head in self.heads)
        if config.architectures and config.architectures[0] not in {head.ours for head in self.heads}:
            return [f"architectures must be one of {heads}"]
        wanted = {**SETTINGS, "num_key_value_heads": config.num_attention_heads}
        if config.hidden_size % config.num_attention_heads == 0:
            wanted["head_dim"] = config.hidden_size // config.num_attention_heads
        lines = unequal(config, wanted)
        if "head_dim" not in wanted:
            lines.append(f"hidden_size must be a multiple of num_attention_heads, not {config.hidden_size}")
        if config.attention_scale not in (None, 1.0):
            lines.append(f"attention_scale must be None or 1.0, not {config.attention_scale}")
        if config.initializer_range is None:
            lines.append("initializer_range must be a number, not None")
        return lines

    def config_to(self, config: PretrainedConfig):
        """See `Family.config_to`."""
        self.check_expressible(config)
        head = self.head(self.form_for(config))
        official: dict[str, Any] = {"architectures": [head.official], "model_type": self.name}
        official.update({theirs: getattr(config, ours) for theirs, ours in FIELDS.items()})
        plain = config.intermediate_size == 4 * config.hidden_size
        official["n_inner"] = None if plain else config.intermediate_size
        official["scale_attn_weights"] = config.attention_scale is None
        official.update(self.dropout_to(config, head))
        official.update(common_entries(config))
        return official

    def unused(self, official):
        """See `Family.unused`. The settings of a head that ours does not have count too where they say something."""
        usual = self.official_config({}).to_dict()
        told = {name for name in SUMMARY if name in official and official[name] != usual[name]}
        return sorted({*super().unused(official), *told} - set(self.official_config_class.attribute_map))


FAMILY = GPT2Family()
