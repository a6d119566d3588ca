"""The decoder of a BART, mBART or Marian alone, as a causal language model that may look at an encoder's states.

Its names are the decoder's of the whole model (`bart.py`) and its `model_type` too: the class in `architectures` tells
them apart. It has no bias of the logits. The official class counts padding among the positions, ours does not.
"""

from typing import Any

from ..errors import ConversionError
from ..rules.table import Rule, RuleTable
from .bart import DECODER, DECODER_PARTS, DROPOUTS, LM_HEAD, ONE_WIDTH, TABLES, BartFamily
from .base import Family, Form, Head, common_entries, token_or_none, unequal

SAME = "vocab_size max_position_embeddings use_cache pad_token_id bos_token_id eos_token_id tie_word_embeddings".split()
FIELDS = {
    **{name: name for name in SAME},
    "d_model": "hidden_size",
    "decoder_ffn_dim": "intermediate_size",
    "decoder_layers": "num_hidden_layers",
    "decoder_attention_heads": "num_attention_heads",
    "activation_function": "hidden_act",
    "init_std": "initializer_range",
    **DROPOUTS,
}
# What the encoder is said to have, which is not there: as the decoder.
ENCODER = {**{ours: theirs for theirs, ours in ONE_WIDTH.items()}, "decoder_layers": "encoder_layers"}


class BartDecoderFamily(Family[Head]):
    """The decoder of a family.

    Args:
        whole: the family.
        prefix: what the official classes' names begin with.
    """

    counts_padding = True

    def __init__(self, whole: BartFamily, prefix: str):
        heads = [Head(f"{prefix}ForCausalLM", "BlockformerDecoderForCausalLM")]
        super().__init__(f"{whole.name}-decoder", whole.config_class_name, heads)
        self.whole = whole
        settings = {name: value for name, value in whole.settings.items() if name != "decoder_starts_with_last_label"}
        self.settings = {**settings, "add_cross_attention": True, "lm_head_bias": False}

    @property
    def model_type(self):
        """See `Family.model_type`."""
        return self.whole.name

    def rules_for(self, form):
        """See `Family.rules_for`."""
        rules = [Rule(f"model.{DECODER}", "model.embed_tokens.weight"), Rule(LM_HEAD, LM_HEAD)]
        rules += self.whole.stack_rules("model.decoder.", "model.", DECODER_PARTS)
        return RuleTable(rules, ignored=[f"model.{TABLES[1]}"] if self.whole.computes_positions else [])

    def adjust(self, shapes, form, config):
        """See `Family.adjust`."""
        table = f"model.{TABLES[1]}" if self.whole.computes_positions else None
        return {name: shape for name, shape in shapes.items() if name != table}

    def check_ignored(self, name, tensor):
        """See `Family.check_ignored`."""
        return self.whole.check_ignored(name, tensor)

    def settle(self, model):
        """See `Family.settle`."""
        return self.whole.settle(model)

    def config_from(self, official, form: Form | None = None):
        """See `Family.config_from`."""
        self.refuse_unsupported({name: value for name, value in official.items() if name != "is_encoder_decoder"})
        head = self.head(form or self.form(official))
        config = self.official_config(official)
        if getattr(config, "decoder_vocab_size", config.vocab_size) != config.vocab_size:
            raise ConversionError(
                f"config.json: decoder_vocab_size is {config.decoder_vocab_size} and vocab_size is "
                f"{config.vocab_size}: {head.official} takes the one for its embeddings and the other for its head; "
                "make them equal"
            )
        settings = {**self.settings, "architectures": [head.ours]}
        settings.update({ours: getattr(config, theirs) for theirs, ours in FIELDS.items()})
        settings["pad_token_id"] = token_or_none(settings["pad_token_id"])
        settings["embedding_scale"] = config.d_model**0.5 if config.scale_embedding else None
        settings.update(common_entries(config))
        self.our_config(settings)
        return settings

    def differences(self, config):
        """See `Family.differences`."""
        if not self.has_topology_of(config):
            return [f"model_type must be '{self.config_class.model_type}'"]
        if config.architectures and config.architectures[0] != self.heads[0].ours:
            return [f"architectures must be {self.heads[0].ours}"]
        heads = config.num_attention_heads
        lines = unequal(
            config, {**self.settings, "num_key_value_heads": heads, "head_dim": config.hidden_size // heads}
        )
        if config.embedding_scale not in (None, config.hidden_size**0.5):
            lines.append(f"embedding_scale must be None or {config.hidden_size**0.5}, not {config.embedding_scale}")
        if config.initializer_range is None:
            lines.append("initializer_range must be a number, not None")
        return lines

    def config_to(self, config):
        """See `Family.config_to`."""
        self.check_expressible(config)
        official: dict[str, Any] = {"architectures": [self.heads[0].official], "model_type": self.model_type}
        official.update({theirs: getattr(config, ours) for theirs, ours in FIELDS.items()})
        official.update({theirs: official[decoder] for decoder, theirs in ENCODER.items()})
        official.update(is_decoder=True, is_encoder_decoder=False, scale_embedding=config.embedding_scale is not None)
        official["forced_eos_token_id"] = None  # ours is a generation setting, which lies in another file
        official.update(common_entries(config))
        self.official_config(official)
        return official
