"""Only the decoder of a BART, mBART or Marian, as a causal language model that may look at an encoder's states.

Its tensor names and `model_type` are the same as the whole model's (`bart.py`); the class in `architectures` tells them
apart. It has no bias of the logits. The official class counts padding as positions, ours does not.
"""

from blockformer.files.errors import ConversionError

from ..rules.table import Rule, RuleTable
from ..values import Computed, constants
from . import bart, marian
from .bart import FIELDS, NO_FORCED_END, SCALE, TABLES, BartFamily, stack_rules
from .base import Family
from .encoder_decoder import DECODER, LM_HEAD
from .head import Head

ENCODER = {
    "encoder_attention_heads": "num_attention_heads",
    "encoder_ffn_dim": "intermediate_size",
    "encoder_layers": "num_hidden_layers",
}
"""Settings of the missing encoder: the decoder's."""


def _check_vocabularies(official):
    config = official.config
    if getattr(config, "decoder_vocab_size", config.vocab_size) != config.vocab_size:
        raise ConversionError(
            f"config.json: decoder_vocab_size is {config.decoder_vocab_size} and vocab_size is {config.vocab_size}: "
            f"{official.head.official} takes the first for its embeddings and the second for its head; make them equal"
        )
    return {}


def _write_encoder(config, head):
    return {theirs: getattr(config, ours) for theirs, ours in ENCODER.items()}


class BartDecoderFamily(Family[Head]):
    """The decoder of a family.

    Args:
        whole: the family.
        official: name of the official class.
    """

    topology = "decoder"
    counts_padding = True

    def __init__(self, whole: BartFamily, official: str):
        fixed = {name: value for name, value in whole.fixed.items() if name != "decoder_starts_with_last_label"}
        super().__init__(
            f"{whole.name}-decoder",
            whole.config_class_name,
            [Head(official, "BlockformerDecoderForCausalLM")],
            fields={
                **FIELDS,
                "decoder_ffn_dim": "intermediate_size",
                "decoder_layers": "num_hidden_layers",
                "decoder_attention_heads": "num_attention_heads",
                "tie_word_embeddings": "tie_word_embeddings",
            },
            fixed={**fixed, "add_cross_attention": True},
            computed=[
                SCALE,
                NO_FORCED_END,
                Computed(_check_vocabularies, _write_encoder),
                constants(is_decoder=True, is_encoder_decoder=False),
            ],
            extra_fields=["is_encoder_decoder"],
            not_none=["initializer_range"],
            unsupported=whole.unsupported,
        )
        self.whole = whole
        self.tables = [f"model.{TABLES[1]}"] if whole.computes_positions else []

    @property
    def model_type(self):
        """See `ConfigTranslation.model_type`."""
        return self.whole.name

    def layout(self, variant, config):
        """See `Family.layout`."""
        rules = [Rule(f"model.{DECODER}", "model.embed_tokens.weight"), Rule(LM_HEAD, LM_HEAD)]
        rules += [rule.under("model.decoder.", "model.") for rule in stack_rules("decoder", config)]
        return RuleTable(rules, ignored=self.tables)

    def reads_ignored(self, name):
        """See `Family.reads_ignored`."""
        return self.whole.reads_ignored(name)

    def check_ignored(self, name, tensor):
        """See `Family.check_ignored`."""
        return self.whole.check_ignored(name, tensor)

    def prepare_official_model(self, model):
        """See `Family.prepare_official_model`."""
        return self.whole.prepare_official_model(model)


BART = BartDecoderFamily(bart.BART, "BartForCausalLM")
MBART = BartDecoderFamily(bart.MBART, "MBartForCausalLM")
MVP = BartDecoderFamily(bart.MVP, "MvpForCausalLM")
MARIAN = BartDecoderFamily(marian.FAMILY, "MarianForCausalLM")
PLBART = BartDecoderFamily(bart.PLBART, "PLBartForCausalLM")
BLENDERBOT = BartDecoderFamily(bart.BLENDERBOT, "BlenderbotForCausalLM")
PEGASUS = BartDecoderFamily(marian.PEGASUS, "PegasusForCausalLM")
