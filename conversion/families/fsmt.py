"""FSMT (Ng et al., 2019): the translators of WMT 2019, the original Transformer with a vocabulary for each side.

Positions are as in M2M-100. The head is a matrix of the decoder. The official class is not causal when it
uses a cache and several tokens come at once, and without a mask it hides padding tokens that the decoder reads. So we
run it without a cache and with a mask.
"""

import torch

from ..rules.table import Rule
from ..values import Computed
from .bart import FIELDS, FRESH, NO_FORCED_END, SCALE, TABLES, stack_rules
from .base import Family
from .encoder_decoder import BOTH, EncoderDecoderNames, EncoderDecoderSettings
from .fresh import root_of_width
from .head import Head
from .m2m_100 import OFFSET
from .oracle import Oracle
from .original import STRUCTURE

EMBEDDINGS = "embed_tokens.weight"


class OwnEmbeddings(EncoderDecoderNames):
    """The names of two stacks with their own embeddings, whose positions are computed."""

    def ignored(self, variant, config):
        return [*TABLES]


def rules_with_embeddings(stack, config):
    """The rules of a stack, which has its own embeddings."""
    return [*stack_rules(stack, config), Rule(EMBEDDINGS, EMBEDDINGS)]


def _read_vocabularies(official):
    source, target = official.config.src_vocab_size, official.config.tgt_vocab_size
    return {"vocab_size": source, "decoder_vocab_size": None if source == target else target}


def _write_vocabularies(config, head):
    return {"src_vocab_size": config.vocab_size, "tgt_vocab_size": config.decoder_vocab_size or config.vocab_size}


def _with_masks(model, args, named):
    tokens, named = named.get("decoder_input_ids"), {"use_cache": False, **named}
    if tokens is not None and named.get("decoder_attention_mask") is None:
        named["decoder_attention_mask"] = torch.ones_like(tokens)
    if named.get("encoder_outputs") is not None and named.get("input_ids") is None:  # without them it makes no mask
        named["input_ids"] = tokens
    return args, named


def _causal(model):
    model.register_forward_pre_hook(_with_masks, with_kwargs=True)
    return model


FAMILY = Family(
    "fsmt",
    [
        Head(
            "FSMTForConditionalGeneration",
            f"{BOTH}ForConditionalGeneration",
            "model.",
            tensors={"model.decoder.output_projection.weight": "lm_head.weight"},
        )
    ],
    structure={
        **STRUCTURE,
        "position_type": "sinusoidal_inclusive",
        "padding_position": "by_token",
        "share_embeddings": False,
        "decoder_starts_with_last_label": True,
    },
    fresh={
        **FRESH,
        "vocab_size": 42024,
        "num_hidden_layers": 6,
        "hidden_act": "relu",
        "embedding_scale": root_of_width,
        "lm_head_bias": False,
        "position_offset": 2,
        "tie_word_embeddings": False,
    },
    names=OwnEmbeddings(
        rules=rules_with_embeddings,
        refused={"FSMTModel": "it returns logits already; use FSMTForConditionalGeneration"},
    ),
    settings=EncoderDecoderSettings(
        fields=FIELDS,
        computed=[SCALE, NO_FORCED_END, OFFSET, Computed(_read_vocabularies, _write_vocabularies)],
        training_only=("encoder_layerdrop", "decoder_layerdrop"),
        fixed={"classifier_dropout": None},
        not_none=["initializer_range"],
        unsupported={"tie_word_embeddings": (False,)},
        reads_source=True,
    ),
    oracle=Oracle(prepared=_causal),
)
