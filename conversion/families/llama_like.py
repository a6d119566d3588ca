"""What the decoders after Llama share: how their tensors are named, and most of their settings.

A family is data: which official module is which of ours. Some keep several of our matrices in one, or the channels of
a head in another order; an operation says how.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from transformers import PretrainedConfig

from blockformer.presets import STRUCTURES
from blockformer.rotary import rotary_size

from ..rules.operations import Chain, Each, Identity, Operation, Pairs, Split
from ..rules.table import Rule
from . import awq
from .decoder import ClassifierDropout, DecoderFamily, decoder_heads
from .fields import HeadDim, NoWindow, Value
from .rope import Rope

Modules = Mapping[str, str | tuple[str, ...]]
LAYER = "layers.{layer}."
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ATTENTION = {name: name for name in (*QKV, "self_attn.o_proj")}
MLP = {name: name for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
NORMS = {"input_layernorm": "self_attn_pre_norm", "post_attention_layernorm": "mlp_pre_norm"}
"""Official norm of a layer -> ours."""
OUTPUT_NORMS = {"post_attention_layernorm": "self_attn_output_norm", "post_feedforward_layernorm": "mlp_output_norm"}
FOUR_NORMS = {
    "input_layernorm": "self_attn_pre_norm",
    "post_attention_layernorm": "self_attn_output_norm",
    "pre_feedforward_layernorm": "mlp_pre_norm",
    "post_feedforward_layernorm": "mlp_output_norm",
}
PLAIN_MLP = {name: name for name in ("mlp.up_proj", "mlp.down_proj")}
"""Without a gate."""
LAYER_NORM = {"rms_norm_eps": None, "layer_norm_eps": "norm_eps"}
"""Official field -> ours, of layer norms."""
Q_AND_K_NORM = {name: name for name in ("self_attn.q_norm", "self_attn.k_norm")}
FUSED_MLP: Modules = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj": "mlp.down_proj"}
OUTER = {"embed_tokens": "embed_tokens", "norm": "norm"}
"""Official module outside of the layers -> ours."""
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
ALL_BIASES = (*ALL_ATTENTION_BIASES, "mlp_bias")


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
        layer: official module of a layer -> ours, or those of ours that it holds side by side.
        outer: official module outside of the layers -> ours.
        root: prefix of the official names of the stack's tensors.
        layers: what the official names of a layer's tensors begin with.
        lm: name of the official language model, without `prefix`.
        tokens: name of the official head of tokens.
        spans: prefix of the stack's tensors in the official class for question answering.
        head_bias: whether the language model head may have a bias.
        split: how a module that holds several of ours does so, for a config of ours; None: one after the other.
        pairs: whether the official class turns neighbouring channels of a head.
        bare_root: prefix of the stack's tensors in the official class without a head.
        part: what official classes but the language model's have before their task, after `prefix`.
        config_class: name of the official configuration class, where `prefix` does not say it.
        fields: official field -> ours, beyond `FIELDS`; None takes one of those away.
        rope: how rotary parameters are written.
        window: how windows are written.
        head_dim: how the size of a head is written.
        computed: more values.
        settings: further arguments of `ConfigTranslation`.
    """

    def __init__(
        self,
        name: str,
        prefix: str,
        *,
        layer: Modules = {**ATTENTION, **MLP, **NORMS},  # noqa: B006 - never changed
        outer: Modules = OUTER,
        root: str = "model.",
        layers: str = LAYER,
        lm: str = "ForCausalLM",
        tokens: str = "score",
        spans: str = "",
        head_bias: bool = False,
        split: Callable[[PretrainedConfig, tuple[int, ...]], Operation] | None = None,
        pairs: bool = False,
        bare_root: str = "",
        part: str = "",
        config_class: str = "",
        fields: Mapping[str, str | tuple[str, ...] | None] | None = None,
        rope: Value | None = None,
        window: Value | None = None,
        head_dim: Value | None = None,
        computed: Sequence[Value] = (),
        ignored: Collection[str] = (),
        **settings,
    ):
        known = {theirs: ours for theirs, ours in {**FIELDS, **(fields or {})}.items() if ours is not None}
        varied = {each for names in known.values() for each in ((names,) if isinstance(names, str) else names)}
        unsupported = {"add_cross_attention": (None, False), **settings.pop("unsupported", {})}
        rope = rope or Rope()
        has_low_bits = not pairs and all(isinstance(ours, str) for ours in layer.values())
        super().__init__(
            name,
            config_class or f"{prefix}Config",
            decoder_heads(prefix, root, lm, spans, tokens, head_bias, bare_root, part),
            rules=self._stack_rules,
            inner=(*(f"{each}." for each in outer), layers.partition(".")[0] + "."),
            ignored=[layers + "self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq", *ignored],
            fields=known,
            fixed={field: value for field, value in STRUCTURES[name].items() if field not in varied},
            computed=[
                *(head_dim or HeadDim(), rope, window or NoWindow(), ClassifierDropout()),
                *([LowBits()] if has_low_bits else []),
                *computed,
            ],
            unsupported=unsupported,
            **settings,
        )
        self.layer, self.outer, self.layers = layer, outer, layers
        self.split, self.pairs = split, pairs
        self.has_low_bits = has_low_bits

    def _stack_rules(self, config: PretrainedConfig, more: Modules | None = None) -> list[Rule]:
        heads, groups = (count * config.head_dim for count in (config.num_attention_heads, config.num_key_value_heads))
        sizes = {"q_proj": heads, "k_proj": groups, "v_proj": groups}

        def rules(modules: Modules, theirs: str = "", ours: str = ""):
            for official, names in modules.items():
                op: Operation = Identity()
                parts = (names,) if isinstance(names, str) else names
                if len(parts) > 1:
                    rows = tuple(sizes.get(part.rpartition(".")[2], config.intermediate_size) for part in parts)
                    op = Split(0, rows)
                    if self.split is not None and QKV[0] in parts:
                        op = self.split(config, rows)
                op = self._in_pairs(config, parts, op)
                for kind in ("weight", "bias"):
                    targets = tuple(f"{ours}{part}.{kind}" for part in parts)
                    yield Rule(f"{theirs}{official}.{kind}", targets if len(targets) > 1 else targets[0], op)

        return [
            *rules(self.outer),
            *rules({**self.layer, **(more or {})}, self.layers, LAYER),
            *self.more_rules(config),
        ]

    def more_rules(self, config: PretrainedConfig) -> list[Rule]:
        """Rules that are more than a module's name."""
        return []

    def _in_pairs(self, config, parts: tuple[str, ...], op: Operation) -> Operation:
        """Queries and keys whose pairs are side by side, among these parts."""
        if not self.pairs or not {*QKV[:2]} & {*parts}:
            return op
        turn = Pairs(config.head_dim, rotary_size(config.rope_parameters, config.head_dim))
        turns = tuple(turn if part in QKV[:2] else Identity() for part in parts)
        return turns[0] if len(turns) == 1 else Chain(op, Each(turns))

    def rules_for(self, form, config):
        """See `Family.rules_for`."""
        rules = super().rules_for(form, config)
        return awq.rules(rules, self._low_bit_weights(form)) if awq.TRAIT in form.traits else rules

    def dequantizing_rules(self, form, config, dtype):
        """See `Family.dequantizing_rules`."""
        return awq.rules(super().rules_for(form, config), self._low_bit_weights(form), dtype)

    def _low_bit_weights(self, form) -> frozenset[str]:
        root, linear = self.head(form).root + self.layers, {*ATTENTION, *MLP}
        return frozenset(f"{root}{theirs}.weight" for theirs, ours in self.layer.items() if ours in linear)

    def form(self, official, names=None, read=None):
        """See `Family.form`."""
        form = super().form(official, names, read)
        if awq.group_size(official) is None or not self.has_low_bits:
            return form
        return awq.trait(form)

    def form_for(self, config, earlier=None):
        """See `Family.form_for`."""
        form = super().form_for(config, earlier)
        return form if config.linear_bits is None or not self.has_low_bits else awq.trait(form)

    def plain_entries(self, official, form):
        """See `ConfigTranslation.plain_entries`."""
        return awq.without(official) if awq.TRAIT in form.traits else official

    def adjust(self, shapes, form, config):
        """See `Family.adjust`."""
        if awq.TRAIT not in form.traits:
            return shapes
        made: dict[str, Any] = {}
        low = self._low_bit_weights(form)
        for name, shape in shapes.items():
            is_low = re.sub(r"\.\d+\.", ".{layer}.", name, count=1) in low
            made |= awq.parts_of(name, shape, config.linear_group_size) if is_low else {name: shape}
        return made
