"""GPT-2 (Radford et al., 2019): a decoder with learned positions and layer norms before each sub-layer.

Its matrices are stored [inputs, outputs], with queries, keys and values in one. The first checkpoints have no prefix
and contain the causal mask of every layer, which is computed today; it is kept beside the weights for the way back.

Two differences only matter for training: ours has a dropout before the classification head if the config asks for
one, the official class never has; and our fresh weights all have the same deviation. The settings `summary_*` belong
to a head that ours does not have, and are kept for the way back.
"""

import torch

from blockformer.presets import STRUCTURES

from ..rules.operations import Chain, Identity, Operation, Split, Transpose
from ..rules.table import Rule, module_rules
from .decoder import ClassifierDropout, DecoderFamily, decoder_heads
from .fields import Computed, Flag, InnerSize

MASKED = -1e4
SAME = "vocab_size initializer_range use_cache tie_word_embeddings pad_token_id bos_token_id eos_token_id".split()
NAMES = {
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
"""What GPT-2 and those after it call ours."""
LAYER = ("h.{layer}.", "layers.{layer}.")
LINEAR = {"attn.c_proj": "self_attn.o_proj", "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}
SUMMARY = tuple(f"summary_{name}" for name in "type use_proj activation proj_to_labels first_dropout".split())
END = 50256
"""The official class's own beginning and end; a small vocabulary does not have it."""


def stack_rules(config):
    """The rules of the stack."""
    norms = {"ln_1": "self_attn_pre_norm", "ln_2": "mlp_pre_norm"}
    rules = [
        Rule("wte.weight", "embed_tokens.weight"),
        Rule("wpe.weight", "embed_positions.weight"),
        *module_rules({"ln_f": "norm"}),
        *(rule.under(*LAYER) for rule in module_rules(norms)),
    ]
    kinds: dict[str, Operation] = {"weight": Transpose(), "bias": Identity()}
    for kind, op in kinds.items():
        rules += [Rule(f"{theirs}.{kind}", f"{ours}.{kind}", op).under(*LAYER) for theirs, ours in LINEAR.items()]
        fused = tuple(f"self_attn.{name}_proj.{kind}" for name in "qkv")
        rules.append(Rule(f"attn.c_attn.{kind}", fused, Chain(op, Split(0, (config.hidden_size,) * 3))).under(*LAYER))
    return rules


def read_ends(official):
    """The tokens that begin and end a text, where the vocabulary has them."""
    config = official.config
    lost = [name for name in ("bos_token_id", "eos_token_id") if getattr(config, name) == END]
    return dict.fromkeys(lost if config.vocab_size <= END else ())


class GPT2Family(DecoderFamily):
    """GPT-2, whose first checkpoints hold more than today's."""

    def check_ignored(self, name, tensor):
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

    def unused(self, official):
        """See `ConfigTranslation.unused`. Settings of a head that ours lacks count too where they say something."""
        usual = self.official_config({}).to_dict()
        told = {name for name in SUMMARY if name in official and official[name] != usual[name]}
        return sorted({*super().unused(official), *told} - set(self.official_config_class.attribute_map))


FAMILY = GPT2Family(
    "gpt2",
    "GPT2Config",
    decoder_heads("GPT2", "transformer.", "LMHeadModel", tokens="classifier"),
    rules=stack_rules,
    inner=("wte.", "wpe.", "h.", "ln_f."),
    ignored=["h.{layer}.attn.bias", "h.{layer}.attn.masked_bias"],
    fields={
        **{name: name for name in SAME},
        **NAMES,
    },
    fixed=STRUCTURES["gpt2"],
    computed=[
        InnerSize("n_inner"),
        Flag("scale_attn_weights", "attention_scale", (1.0, None)),
        Computed(read_ends),
        ClassifierDropout(),
    ],
    unsupported=dict.fromkeys(
        ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"), (None, False)
    ),
    not_none=["initializer_range"],
    refused={
        "GPT2DoubleHeadsModel": "it has two heads at once, and the second reads the token that a caller points at; for "
        "its language model, load it as GPT2LMHeadModel in transformers and save that"
    },
)
