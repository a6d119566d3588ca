"""What Llama-like decoders share: the names of their tensors and most of their settings.

Their names are ours except for the norms; they differ in which tensors and settings they have.
"""

from collections.abc import Collection, Mapping
from typing import Any

from transformers import PretrainedConfig

from blockformer.presets import STRUCTURES

from ..rules.table import Rule
from . import awq
from .decoder import ClassifierDropout, DecoderFamily, decoder_heads
from .fields import HeadDim, NoWindow, Rope, Value

LAYER = "layers.{layer}."
WEIGHTS = tuple(
    f"{name}.weight"
    for name in (
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj mlp.up_proj mlp.down_proj"
    ).split()
)
NORMS = {"input_layernorm": "self_attn_pre_norm", "post_attention_layernorm": "mlp_pre_norm"}
"""Official norm of a layer -> ours."""
Q_AND_K_NORM = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
QKV_BIAS = tuple(f"self_attn.{name}_proj.bias" for name in "qkv")
O_BIAS = ("self_attn.o_proj.bias",)
MLP_BIAS = tuple(f"mlp.{name}_proj.bias" for name in ("gate", "up", "down"))
FIELDS: dict[str, str | tuple[str, ...]] = {
    **{
        name: name
        for name in (
            "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
            "hidden_act max_position_embeddings initializer_range use_cache tie_word_embeddings attention_dropout "
            "pad_token_id bos_token_id eos_token_id"
        ).split()
    },
    "rms_norm_eps": "norm_eps",
}
ALL_ATTENTION_BIASES = ("attention_bias", "attention_output_bias")
"""What the official `attention_bias` of some families sets."""


class LowBits:
    """The 4-bit weights of an AWQ checkpoint."""

    def read(self, official):
        """See `Value.read`."""
        if awq.TRAIT not in official.form.traits:
            return {}
        return {"linear_bits": 4, "linear_group_size": awq.group_size(official.entries)}

    def write(self, config, head):
        """See `Value.write`."""
        return {} if config.linear_bits is None else {awq.FIELD: awq.entries_for(config)}


class LlamaLikeFamily(DecoderFamily):
    """A decoder after Llama.

    Args:
        name: the official `model_type`, which is the preset's name too.
        prefix: what the official classes' names begin with.
        tensors: names of a layer's tensors, official and ours, beyond its weights and norms.
        norms: official norm of a layer -> ours.
        fields: official field -> ours, beyond `FIELDS`.
        window: how windows are written.
        head_dim: how the size of a head is written.
        spans: prefix of the stack's tensors in the official class for question answering.
    """

    has_low_bits = True

    def __init__(
        self,
        name: str,
        prefix: str,
        *,
        tensors: Collection[str] = (),
        norms: Mapping[str, str] = NORMS,
        fields: Mapping[str, str | tuple[str, ...]] | None = None,
        window: Value | None = None,
        head_dim: Value | None = None,
        spans: str = "transformer.",
    ):
        own = fields or {}
        varied = {each for names in own.values() for each in ((names,) if isinstance(names, str) else names)}
        super().__init__(
            name,
            f"{prefix}Config",
            decoder_heads(prefix, "model.", spans=spans),
            rules=self._stack_rules,
            inner=("embed_tokens.", "layers.", "norm."),
            ignored=[LAYER + "self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"],
            fields={**FIELDS, **own},
            fixed={field: value for field, value in STRUCTURES[name].items() if field not in varied},
            computed=[head_dim or HeadDim(), Rope(), window or NoWindow(), ClassifierDropout(), LowBits()],
            unsupported={"add_cross_attention": (None, False)},
        )
        self.layer = {**{tensor: tensor for tensor in (*WEIGHTS, *tensors)}}
        self.layer |= {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in norms.items()}

    def _stack_rules(self, config: PretrainedConfig) -> list[Rule]:
        outer = [Rule(name, name) for name in ("embed_tokens.weight", "norm.weight")]
        return [*outer, *(Rule(LAYER + theirs, LAYER + ours) for theirs, ours in self.layer.items())]

    def rules_for(self, form, config):
        """See `Family.rules_for`."""
        rules = super().rules_for(form, config)
        return awq.rules(rules, self._low_bit_weights(form)) if awq.TRAIT in form.traits else rules

    def dequantizing_rules(self, form, config, dtype):
        """See `Family.dequantizing_rules`."""
        return awq.rules(super().rules_for(form, config), self._low_bit_weights(form), dtype)

    def _low_bit_weights(self, form) -> frozenset[str]:
        return frozenset(self.head(form).root + LAYER + name for name in WEIGHTS)

    def form(self, official, names=None, read=None):
        """See `Family.form`."""
        form = super().form(official, names, read)
        return form if awq.group_size(official) is None else awq.trait(form)

    def form_for(self, config, earlier=None):
        """See `Family.form_for`."""
        form = super().form_for(config, earlier)
        return form if config.linear_bits is None else awq.trait(form)

    def plain_entries(self, official, form):
        """See `ConfigTranslation.plain_entries`."""
        return awq.without(official) if awq.TRAIT in form.traits else official

    def adjust(self, shapes, form, config):
        """See `Family.adjust`."""
        if awq.TRAIT not in form.traits:
            return shapes
        made: dict[str, Any] = {}
        for name, shape in shapes.items():
            is_low = name.endswith("_proj.weight")
            made |= awq.parts_of(name, shape, config.linear_group_size) if is_low else {name: shape}
        return made
