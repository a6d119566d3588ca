"""M2M-100 (Fan et al., 2021) and NLLB (NLLB team, 2022): translators between many languages, with the norms first.

Positions are computed and begin after the padding token's id; the last frequency is 1/10000. The head has no bias.
The official class counts the tokens that are not that one.
"""

from blockformer.files.errors import ConversionError

from ..values import Computed, NotExpressible, token_or_none
from .bart import FRESH, BartNames, bart_settings
from .base import Family
from .fresh import root_of_width
from .original import STRUCTURE


def _read_offset(official):
    padding = token_or_none(official.config.pad_token_id)
    if padding is None:
        raise ConversionError("config.json: pad_token_id must be set: the positions begin after it")
    return {"position_offset": padding + 1}


def _write_offset(config, head):
    if config.pad_token_id is None or config.position_offset != config.pad_token_id + 1:
        raise NotExpressible("position_offset", "pad_token_id + 1", config.position_offset)
    return {}


OFFSET = Computed(_read_offset, _write_offset)
FAMILY = Family(
    "m2m_100",
    "M2M100ForConditionalGeneration M2M100Model",
    structure={
        **STRUCTURE,
        "norm_placement": "pre",
        "position_type": "sinusoidal_inclusive",
        "padding_position": "by_token",
    },
    fresh={
        **FRESH,
        "decoder_reads_source": False,
        "vocab_size": 128112,
        "hidden_act": "relu",
        "embedding_scale": root_of_width,
        "lm_head_bias": False,
        "position_offset": 2,
    },
    names=BartNames(logits_bias=False),
    settings=bart_settings(fixed={"classifier_dropout": None}, computed=[OFFSET]),
    scales_in_embedding=True,
)
