"""T5 (Raffel et al., 2020) in all its versions, mT5 and umT5: encoder-decoders, and the encoder alone.

What tells the versions apart is settings: the first T5 has plain ReLU layers and a head that is its embeddings, scaled;
version 1.1, Flan-T5 and mT5 have gated layers and a head of their own; umT5 has a relative bias in every layer. The
official classes of today say in every config that the head is tied, and then keep a stored head that differs: whether
it is tied is read from the tensors.

The one embedding matrix is stored once, as `shared.weight`, or also under the names that the two stacks have for it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..rules.operations import Copies, bytes_of
from ..rules.table import Rule, RuleTable, check_tied, module_rules
from .base import Family, Form, Head, common_entries, unequal

EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
LM_HEAD = "lm_head.weight"
UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
OLD_CLASSES = {"T5WithLMHeadModel": "T5ForConditionalGeneration"}
STACKS = {
    "encoder": ("SelfAttention", "DenseReluDense"),
    "decoder": ("SelfAttention", "EncDecAttention", "DenseReluDense"),
}
# Official part of a layer -> our module and the norm before it.
PARTS = {
    "SelfAttention": ("self_attn", "self_attn_pre_norm"),
    "EncDecAttention": ("cross_attn", "cross_attn_pre_norm"),
    "DenseReluDense": ("mlp", "mlp_pre_norm"),
}
ATTENTION = {name: f"{name}_proj" for name in "qkvo"}
PLAIN = {"wi": "up_proj", "wo": "down_proj"}
GATED = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}
FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "d_kv": "head_dim",
    "d_ff": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "relative_attention_num_buckets": "relative_attention_num_buckets",
    "relative_attention_max_distance": "relative_attention_max_distance",
    "layer_norm_epsilon": "norm_eps",
    "use_cache": "use_cache",
    "pad_token_id": "pad_token_id",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
}
DROPOUTS = ("hidden_dropout", "attention_dropout", "activation_dropout")
SETTINGS: dict[str, Any] = {
    "norm_type": "rms_norm",
    "norm_placement": "pre",
    "norm_bias": False,
    "position_type": "relative_bias",
    "relative_bias_per_layer": False,
    "qk_norm": False,
    "attention_bias": False,
    "attention_output_bias": False,
    "mlp_bias": False,
    "float32_down_proj": True,
    "lm_head_bias": False,
    "attention_scale": 1.0,
    "embedding_norm": False,
    "embedding_scale": None,
    "final_norm": True,
    "type_vocab_size": 0,
    "lm_head_transform": False,
    "pooler_act": None,
    "sliding_window": None,
    "add_cross_attention": False,
}


@dataclass(frozen=True)
class T5Head(Head):
    """A head of these families.

    Attributes:
        prefix: of the official names of the two stacks.
        modules: official module -> ours, each with weight and bias.
    """

    prefix: str = ""
    modules: tuple[tuple[str, str], ...] = ()

    @property
    def stacks(self) -> tuple[str, ...]:
        """The stacks that it has."""
        return ("encoder", "decoder") if "EncoderDecoder" in self.ours else ("encoder",)

    @property
    def writes(self) -> bool:
        """Whether it has a language model head."""
        return self.ours.endswith("ForConditionalGeneration")

    @property
    def our_prefix(self) -> str:
        """Of our names of the stacks."""
        return "" if self.ours.endswith("Model") else "model."


class T5Family(Family[T5Head]):
    """A T5.

    Args:
        name: the official `model_type`.
        prefix: what the official classes' names begin with.
        settings: our fields that this family never varies, beyond the shared ones.
        scales: whether the states are scaled before the head: always, never, or None for as the config says.
    """

    spoken = ("tie_word_embeddings", "scale_decoder_outputs", "dense_act_fn", "is_gated_act", "decoder_start_token_id")

    def __init__(self, name: str, prefix: str, settings: Mapping[str, Any] | None = None, scales: bool | None = None):
        both = "BlockformerEncoderDecoder"
        rows = (("classification_head.dense", "dense"), ("classification_head.out_proj", "score"))
        heads = (
            T5Head(f"{prefix}ForConditionalGeneration", f"{both}ForConditionalGeneration"),
            T5Head(f"{prefix}Model", f"{both}Model"),
            T5Head(f"{prefix}ForSequenceClassification", f"{both}ForSequenceClassification", "transformer.", rows),
            T5Head(
                f"{prefix}ForQuestionAnswering",
                f"{both}ForQuestionAnswering",
                modules=(("qa_outputs", "qa_outputs"),),
            ),
            T5Head(f"{prefix}EncoderModel", "BlockformerEncoderModel"),
            T5Head(
                f"{prefix}ForTokenClassification",
                "BlockformerEncoderForTokenClassification",
                "transformer.",
                (("classifier", "score"),),
            ),
        )
        super().__init__(name, f"{prefix}Config", heads)
        self.settings = {**SETTINGS, **(settings or {})}
        self.scales = scales

    # The form: which head, how the embeddings are stored, whether the head is their copy.

    def form(self, official, names: Collection[str] | None = None, read: Callable[[str], Tensor] | None = None):
        """See `Family.form`.

        Raises:
            ConversionError: also for stored copies of the embeddings that differ.
        """
        head = self._head(official, names)
        config = self.official_config(official)
        traits = {"gated"} if config.is_gated_act else set()
        if names is None:
            traits |= {EMBEDDINGS[0]} | ({"untied"} if official.get("tie_word_embeddings") is False else set())
            return Form(head.official, frozenset(traits))
        stored = [head.prefix + name for name in EMBEDDINGS if head.prefix + name in names]
        traits |= {name.removeprefix(head.prefix) for name in stored}
        if read is not None:
            check_tied(read, [(stored[0], other) for other in stored[1:]])
        if head.writes and LM_HEAD in names:
            tied = official.get("tie_word_embeddings") is not False and bool(stored)
            if not tied or read is None or not torch.equal(bytes_of(read(LM_HEAD)), bytes_of(read(stored[0]))):
                traits.add("untied")
        return Form(head.official, frozenset(traits))

    def _head(self, official: Mapping[str, Any], names: Collection[str] | None) -> T5Head:
        architectures = [OLD_CLASSES.get(name, name) for name in official.get("architectures") or []]
        if not architectures and names is not None and not any(name.startswith("decoder.") for name in names):
            architectures = [next(head.official for head in self.heads if head.ours == "BlockformerEncoderModel")]
        return self.head(super().form({"architectures": architectures}))

    def form_for(self, config, earlier: Form | None = None):
        """See `Family.form_for`."""
        head = self.head(super().form_for(config))
        traits = {"gated"} if config.gated_mlp else set()
        if head.writes and not config.tie_word_embeddings:
            traits.add("untied")
        if earlier is not None and earlier.head == head.official:
            same = {"gated", "untied"}
            if earlier.traits & same == traits & same:
                return earlier
        return Form(head.official, frozenset({*traits, EMBEDDINGS[0]}))

    # The tensors.

    def rules_for(self, form):
        """See `Family.rules_for`."""
        head = self.head(form)
        stored = tuple(head.prefix + name for name in EMBEDDINGS if name in form.traits)
        alone = len(head.stacks) == 1
        ours = head.our_prefix + ("" if alone else "encoder.")
        rules = [Rule(stored, f"{ours}embed_tokens.weight", Copies(len(stored)))] if stored else []
        for stack in head.stacks:
            there = head.our_prefix + ("" if alone else f"{stack}.")
            rules += self._stack_rules(f"{head.prefix}{stack}.", there, STACKS[stack], "gated" in form.traits)
        rules += module_rules(dict(head.modules))
        if head.writes:
            rules.append(Rule(LM_HEAD, LM_HEAD))
        return RuleTable(rules, ignored=[head.prefix + UNUSED] if not alone else [])

    def _stack_rules(self, here: str, there: str, parts: Iterable[str], gated: bool) -> list[Rule]:
        rules = [Rule(f"{here}final_layer_norm.weight", f"{there}norm.weight")]
        layer = "{layer}" if self.settings["relative_bias_per_layer"] else "0"
        module = "layers.{layer}.self_attn.relative_bias" if layer != "0" else "relative_bias"
        bias = f"{here}block.{layer}.layer.0.SelfAttention.relative_attention_bias.weight"
        rules.append(Rule(bias, f"{there}{module}.embedding.weight"))
        for index, part in enumerate(parts):
            own, norm = PARTS[part]
            official, ours = f"{here}block.{{layer}}.layer.{index}.", f"{there}layers.{{layer}}."
            rules.append(Rule(f"{official}layer_norm.weight", f"{ours}{norm}.weight"))
            weights = ATTENTION if own != "mlp" else GATED if gated else PLAIN
            for theirs, name in weights.items():
                rules.append(Rule(f"{official}{part}.{theirs}.weight", f"{ours}{own}.{name}.weight"))
        return rules

    def optional(self, form):
        """See `Family.optional`."""
        head = self.head(form)
        return tuple(head.prefix + name for name in EMBEDDINGS if name not in form.traits)

    def ties(self, tied, form):
        """See `Family.ties`."""
        return {name: source for name, source in tied.items() if name != LM_HEAD or "untied" not in form.traits}

    # The config.

    def config_from(self, official, form: Form | None = None):
        """See `Family.config_from`."""
        self.refuse_unsupported({name: value for name, value in official.items() if name != "is_encoder_decoder"})
        form = form or self.form(official)
        head = self.head(form)
        config = self.official_config(official)
        settings = {**self.settings, "architectures": [head.ours]}
        settings.update({ours: getattr(config, theirs, None) for theirs, ours in FIELDS.items()})
        settings.update(dict.fromkeys(DROPOUTS, float(config.dropout_rate)))
        settings["classifier_dropout"] = float(config.classifier_dropout)
        settings["gated_mlp"], settings["hidden_act"] = config.is_gated_act, config.dense_act_fn
        settings["num_key_value_heads"] = config.num_heads
        settings["initializer_range"] = None
        scaled = config.scale_decoder_outputs if self.scales is None else self.scales
        settings["logit_scale"] = config.d_model**-0.5 if scaled else 1.0
        settings["tie_word_embeddings"] = "untied" not in form.traits
        if len(head.stacks) > 1:
            settings["decoder_layers"] = config.num_decoder_layers
            settings["decoder_start_token_id"] = getattr(config, "decoder_start_token_id", None)
        settings.update(common_entries(config))
        self.our_config(settings)
        return settings

    def differences(self, config):
        """See `Family.differences`."""
        wanted_class = (config.architectures or [None])[0]
        heads = [head for head in self.heads if wanted_class in (None, head.ours)]
        if not heads or not self.has_topology_of(config):
            return [f"architectures must be one of {', '.join(head.ours for head in self.heads)}"]
        wanted = {**self.settings, "num_key_value_heads": config.num_attention_heads}
        lines = unequal(config, wanted)
        if len({getattr(config, name) for name in DROPOUTS}) > 1:
            lines.append(f"{', '.join(DROPOUTS)} must be the same")
        if not getattr(config, "share_embeddings", True):
            lines.append("share_embeddings must be True, not False")
        scale = config.hidden_size**-0.5
        allowed = {None: (1.0, scale), True: (scale,), False: (1.0,)}[self.scales]
        if heads[0].writes and config.logit_scale not in allowed:
            lines.append(f"logit_scale must be {' or '.join(map(str, allowed))}, not {config.logit_scale}")
        return lines

    def config_to(self, config):
        """See `Family.config_to`."""
        self.check_expressible(config)
        head = self.head(self.form_for(config))
        official: dict[str, Any] = {"architectures": [head.official], "model_type": self.name}
        official.update({theirs: getattr(config, ours) for theirs, ours in FIELDS.items()})
        if config.bos_token_id is None:  # two of the official classes do not know it
            del official["bos_token_id"]
        official["dropout_rate"] = config.hidden_dropout
        dropout = config.classifier_dropout
        official["classifier_dropout"] = config.hidden_dropout if dropout is None else dropout
        gated, act = config.gated_mlp, config.hidden_act
        official["feed_forward_proj"] = ("gated-" if gated else "") + ("gelu" if gated and act == "gelu_new" else act)
        official.update(is_gated_act=gated, dense_act_fn=act)
        # Once read, the official class knows only the second of these; older ones know only the first.
        official["tie_word_embeddings"] = config.tie_word_embeddings
        if self.scales is None:
            official["scale_decoder_outputs"] = config.logit_scale != 1
        if len(head.stacks) > 1:
            official["num_decoder_layers"] = config.decoder_layers
            if config.decoder_start_token_id is not None:
                official["decoder_start_token_id"] = config.decoder_start_token_id
        else:
            official["is_encoder_decoder"] = False
        official.update(common_entries(config))
        self.official_config(official)
        return official


T5 = T5Family("t5", "T5")
MT5 = T5Family("mt5", "MT5", scales=False)
UMT5 = T5Family("umt5", "UMT5", {"relative_bias_per_layer": True}, scales=True)
