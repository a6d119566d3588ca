"""Only the decoder of a BART, mBART or Marian, as a causal language model that may look at an encoder's states.

Its tensor names and `model_type` are the same as the whole model's (`bart.py`); the class in `architectures` tells them
apart. It has no bias of the logits. The official class counts padding as positions, ours does not.
"""

from dataclasses import dataclass
from typing import cast

from blockformer.files.errors import ConversionError

from ..rules.table import Rule, RuleTable
from ..values import Computed, constants
from . import bart, marian
from .bart import NO_FORCED_END, SCALE, TABLES, BartNames, stack_rules
from .base import Family
from .encoder_decoder import DECODER, LM_HEAD
from .head import Head
from .names import Names
from .oracle import Oracle
from .settings import Settings

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


@dataclass(kw_only=True, eq=False)
class BartDecoderNames(Names[Head]):
    """The names of the decoder of a family.

    Attributes:
        whole: the names of the whole encoder-decoder.
    """

    whole: BartNames

    topology = "decoder"

    def layout(self, variant, config):
        rules = [Rule(f"model.{DECODER}", "model.embed_tokens.weight"), Rule(LM_HEAD, LM_HEAD)]
        rules += [rule.under("model.decoder.", "model.") for rule in stack_rules("decoder", config)]
        return RuleTable(rules, ignored=[f"model.{TABLES[1]}"] if self.whole.computes_positions else [])

    def reads_ignored(self, name):
        return self.whole.reads_ignored(name)

    def check_ignored(self, name, tensor):
        return self.whole.check_ignored(name, tensor)


def decoder_of(whole: Family, official: str) -> Family:
    """The decoder of a family.

    Args:
        whole: the family.
        official: name of the official class.
    """
    known = whole.settings
    fixed = {name: value for name, value in known.constant.items() if name != "decoder_starts_with_last_label"}
    return Family(
        f"{whole.name}-decoder",
        [Head(official, "BlockformerDecoderForCausalLM")],
        config_class=known.config_class,
        names=BartDecoderNames(whole=cast(BartNames, whole.names)),
        settings=Settings(
            fields={
                "decoder_ffn_dim": "intermediate_size",
                "decoder_layers": "num_hidden_layers",
                "decoder_attention_heads": "num_attention_heads",
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
            unsupported=known.unsupported,
        ),
        oracle=Oracle(counts_padding=True, prepared=whole.oracle.prepared),
        model_type=whole.name,
        scales_in_embedding=known.scales_in_embedding,
    )


BART = decoder_of(bart.BART, "BartForCausalLM")
MBART = decoder_of(bart.MBART, "MBartForCausalLM")
MVP = decoder_of(bart.MVP, "MvpForCausalLM")
MARIAN = decoder_of(marian.FAMILY, "MarianForCausalLM")
PLBART = decoder_of(bart.PLBART, "PLBartForCausalLM")
BLENDERBOT = decoder_of(bart.BLENDERBOT, "BlenderbotForCausalLM")
PEGASUS = decoder_of(marian.PEGASUS, "PegasusForCausalLM")
