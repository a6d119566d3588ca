"""What the decoders after Llama share: the names of their tensors and most of their settings.

Their names are ours, but for the norms, so every rule is an identity; what differs is which settings there are.
"""

from collections.abc import Collection, Mapping
from typing import Any

from transformers import PretrainedConfig

from ..errors import ConversionError, shown
from ..rules.table import Rule, RuleTable
from . import awq
from .base import Form, common_entries, token_or_none, unequal
from .decoder_heads import HeadedDecoder, decoder_heads

LAYER = "layers.{layer}."
WEIGHTS = (
    "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj mlp.up_proj mlp.down_proj"
).split()
NORMS = {"input_layernorm": "self_attn_pre_norm", "post_attention_layernorm": "mlp_pre_norm"}
Q_AND_K_NORM = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
QKV_BIAS = tuple(f"self_attn.{name}_proj.bias" for name in "qkv")
O_BIAS = ("self_attn.o_proj.bias",)
MLP_BIAS = tuple(f"mlp.{name}_proj.bias" for name in ("gate", "up", "down"))


# Official field -> ours, where all of these families agree.
SHARED_FIELDS = {
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
# Ours, in all of these families; a family adds to it or replaces entries.
SHARED_SETTINGS: dict[str, Any] = {
    "gated_mlp": True,
    "norm_type": "rms_norm",
    "norm_placement": "pre",
    "norm_bias": False,
    "position_type": "rotary",
    "qk_norm": False,
    "attention_bias": False,
    "attention_output_bias": False,
    "mlp_bias": False,
    "float32_down_proj": False,
    "lm_head_bias": False,
    "attention_scale": None,
    "embedding_norm": False,
    "embedding_scale": None,
    "logit_scale": 1.0,
    "final_norm": True,
    "position_offset": 0,
    "type_vocab_size": 0,
    "lm_head_transform": False,
    "pooler_act": None,
    "add_cross_attention": False,
    "hidden_dropout": 0.0,
    "activation_dropout": 0.0,
}


class Window:
    """Which layers look back over a window only. This one: none; the family has no such setting."""

    def read(self, official: PretrainedConfig) -> tuple[int | None, list[str]]:
        """Our `sliding_window` and `layer_types`.

        Raises:
            ConversionError: ours cannot express it.
        """
        layer_types = getattr(official, "layer_types", None)
        if layer_types is not None and set(layer_types) != {"full_attention"}:
            raise ConversionError("config.json: layer_types is set, which this family does not have; drop it")
        return None, ["full_attention"] * official.num_hidden_layers

    def write(self, config: PretrainedConfig) -> dict[str, Any]:
        """The official fields."""
        return {}

    def difference(self, config: PretrainedConfig) -> str | None:
        """Why the family cannot express a config's windows, or None."""
        return None if config.sliding_window is None else "sliding_window must be None"


class WindowEverywhere(Window):
    """A window in every layer or in none."""

    def read(self, official):
        """See `Window.read`."""
        window = official.sliding_window
        layer_type = "full_attention" if window is None else "sliding_attention"
        layer_types = getattr(official, "layer_types", None)
        if layer_types is not None and set(layer_types) != {layer_type}:
            raise ConversionError(
                f"config.json: layer_types must be {layer_type} in every layer when sliding_window is {window}; "
                "layers of both kinds are another family's"
            )
        return window, [layer_type] * official.num_hidden_layers

    def write(self, config):
        """See `Window.write`."""
        return {"sliding_window": config.sliding_window}

    def difference(self, config):
        """See `Window.difference`."""
        mixed = config.sliding_window is not None and "full_attention" in config.layer_types
        return "layer_types must be the same in every layer" if mixed else None


class WindowByLayer(Window):
    """A window in some of the layers; the official classes also need `use_sliding_window`."""

    def read(self, official):
        """See `Window.read`."""
        slides = "sliding_attention" in official.layer_types
        if slides and official.sliding_window is None:
            raise ConversionError(
                "config.json: layer_types names sliding_attention, but sliding_window is null or use_sliding_window "
                "is false; mend one of them"
            )
        return official.sliding_window if slides else None, list(official.layer_types)

    def write(self, config):
        """See `Window.write`."""
        layers = config.num_hidden_layers
        full = next((i for i, kind in enumerate(config.layer_types) if kind != "full_attention"), layers)
        return {
            "use_sliding_window": config.sliding_window is not None,
            "sliding_window": config.sliding_window,
            "max_window_layers": full,
            "layer_types": list(config.layer_types),
        }

    def difference(self, config):
        """See `Window.difference`."""


class DecoderFamily(HeadedDecoder):
    """A decoder after Llama.

    Args:
        name: the official `model_type`.
        prefix: what the official classes' names begin with.
        more: tensors of a layer beyond the shared ones, norms of queries and keys among them.
        fields: official field -> our field, or our fields that it sets together; beyond the shared ones.
        settings: our fields that this family never varies, where they differ from the shared ones.
        window: how windows are written.
        head_dim_field: whether the official class has a field `head_dim`.
        span_root: prefix of the stack's tensors in the official class for question answering.
    """

    has_low_bits = True

    def __init__(
        self,
        name: str,
        prefix: str,
        more: Collection[str] = (),
        fields: Mapping[str, str | tuple[str, ...]] | None = None,
        settings: Mapping[str, Any] | None = None,
        window: Window | None = None,
        head_dim_field: bool = True,
        span_root: str = "transformer.",
    ):
        heads = decoder_heads(prefix, "model.", span_root=span_root)
        super().__init__(name, f"{prefix}Config", heads, ("embed_tokens.", "layers.", "norm."))
        self.more = tuple(more)
        own = {theirs: (ours,) if isinstance(ours, str) else ours for theirs, ours in (fields or {}).items()}
        self.fields: dict[str, tuple[str, ...]] = {**{t: (o,) for t, o in SHARED_FIELDS.items()}, **own}
        varied = {name for names in self.fields.values() for name in names}
        fixed = {**SHARED_SETTINGS, **(settings or {})}
        self.settings = {name: value for name, value in fixed.items() if name not in varied}
        self.window = window or Window()
        self.head_dim_field = head_dim_field

    def rules_for(self, form):
        """See `Family.rules_for`."""
        rules, low = self._plain_rules(form)
        return awq.rules(rules, low) if awq.TRAIT in form.traits else rules

    def dequantizing_rules(self, form, dtype):
        """See `Family.dequantizing_rules`."""
        return awq.rules(*self._plain_rules(form), dtype)

    def _plain_rules(self, form: Form) -> tuple[RuleTable, frozenset[str]]:
        """The rules for plain weights, and the official names of those that have 4 bits in an AWQ checkpoint.

        The rotary frequencies that old checkpoints hold are computed, not trained, and left out.
        """
        head = self.head(form)
        inner = [LAYER + name + ".weight" for name in WEIGHTS] + [LAYER + name for name in self.more]
        names = ["embed_tokens.weight", "norm.weight", *inner]
        rules = [Rule(head.root + name, head.our_root + name) for name in names]
        here, there = head.root + LAYER, head.our_root + LAYER
        rules += [Rule(f"{here}{theirs}.weight", f"{there}{ours}.weight") for theirs, ours in NORMS.items()]
        rules += [Rule(theirs, ours) for theirs, ours in head.tensors]
        ignored = [head.root + LAYER + "self_attn.rotary_emb.inv_freq", head.root + "rotary_emb.inv_freq"]
        low = frozenset(head.root + name for name in inner if name.endswith("_proj.weight"))
        return RuleTable(rules, ignored=ignored), low

    def form(self, official, names=None, read=None):
        """See `Family.form`."""
        form = super().form(official, names, read)
        return form if awq.group_size(official) is None else awq.trait(form)

    def form_for(self, config, earlier=None):
        """See `Family.form_for`."""
        form = super().form_for(config, earlier)
        return form if config.linear_bits is None else awq.trait(form)

    def adjust(self, shapes, form, config):
        """See `Family.adjust`."""
        if awq.TRAIT not in form.traits:
            return shapes
        made: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes.items():
            is_low = name.endswith("_proj.weight")
            made |= awq.parts_of(name, shape, config.linear_group_size) if is_low else {name: shape}
        return made

    def config_from(self, official, form: Form | None = None):
        """See `Family.config_from`."""
        form = form or self.form(official)
        if awq.TRAIT in form.traits:
            bits: dict[str, Any] = {"linear_bits": 4, "linear_group_size": awq.group_size(official)}
            official = awq.without(official)
        else:
            bits = {}
        self.refuse_unsupported(official)
        if official.get("add_cross_attention"):
            raise ConversionError("config.json: add_cross_attention is true, which this family does not have; drop it")
        config = self.official_config(official)
        head = self.head(form)
        settings = {**self.settings, **bits, "architectures": [head.ours]}
        for theirs, names in self.fields.items():
            settings.update(dict.fromkeys(names, getattr(config, theirs)))
        if settings["attention_dropout"] is None:
            settings["attention_dropout"] = 0.0
        settings["pad_token_id"] = token_or_none(settings["pad_token_id"])
        settings["head_dim"] = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        settings["rope_parameters"] = _rope(config)
        settings["classifier_dropout"] = self.dropout_from(official, head)
        settings["sliding_window"], settings["layer_types"] = self.window.read(config)
        settings.update(common_entries(config))
        self.our_config(settings)
        return settings

    def differences(self, config):
        """See `Family.differences`."""
        lines = []
        if config.model_type != self.config_class.model_type:
            return [f"model_type must be '{self.config_class.model_type}'"]
        lines += unequal(config, self.settings)
        for names in self.fields.values():
            if any(getattr(config, name) != getattr(config, names[0]) for name in names):
                lines.append(" and ".join(names) + " must be the same")
        window = self.window.difference(config)
        return lines + ([window] if window else [])

    def config_to(self, config):
        """See `Family.config_to`."""
        self.check_expressible(config)
        head = self.head(self.form_for(config))
        official: dict[str, Any] = {"architectures": [head.official], "model_type": self.name}
        official.update({theirs: getattr(config, names[0]) for theirs, names in self.fields.items()})
        if self.head_dim_field or config.head_dim * config.num_attention_heads != config.hidden_size:
            official["head_dim"] = config.head_dim
        official["rope_parameters"] = dict(config.rope_parameters)
        official.update(self.window.write(config))
        official.update(self.dropout_to(config, head))
        official.update(common_entries(config))
        if config.linear_bits is not None:
            official[awq.FIELD] = awq.entries_for(config)
        self.official_config(official)
        return official


def _rope(official: PretrainedConfig) -> dict[str, Any]:
    """The official rotary parameters, as the official class has completed them."""
    rope = official.rope_parameters or {}
    nested = [name for name, value in rope.items() if isinstance(value, dict)]
    if nested:
        names = ", ".join(map(shown, nested))
        raise ConversionError(f"config.json: rope_parameters differ by layer type ({names}), which is not supported")
    return {name: value for name, value in rope.items() if name != "type"}
