"""Marian (Junczys-Dowmunt et al., 2018), the translators of OPUS-MT: the original Transformer and a bias of the logits.

Pegasus (Zhang et al., 2020) is the same with the norms first.

Its positions are computed, all sines before all cosines; older checkpoints contain the table. Each side may have its
own vocabulary. Everything else is as in `bart.py`.
"""

from functools import partial

import torch
from torch import Tensor

from .bart import FRESH, BartNames, bart_settings, with_table
from .base import Family
from .encoder_decoder import BOTH, LM_HEAD
from .fresh import root_of_width
from .head import Head
from .oracle import Oracle
from .original import FRESH as ORIGINAL_FRESH
from .original import STRUCTURE


def sinusoid(positions: int, width: int) -> Tensor:
    """The official table, all sines and then all cosines: float64 [positions, width]."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=-1)[:, :width]


ORACLE = Oracle(prepared=partial(with_table, sinusoid))
FAMILY = Family(
    "marian",
    [
        Head("MarianMTModel", f"{BOTH}ForConditionalGeneration", "model.", tensors={LM_HEAD: LM_HEAD}),
        Head("MarianModel", f"{BOTH}Model"),
    ],
    config_class="MarianConfig",
    structure={**STRUCTURE, "position_type": "sinusoidal_halves"},
    fresh={
        **FRESH,
        **ORIGINAL_FRESH,
        "decoder_reads_source": False,
        "vocab_size": 58101,
        "hidden_act": "silu",
        "embedding_scale": root_of_width,
        "lm_head_bias": "fixed",
        "initializer_range": 0.02,
        "pad_token_id": 58100,
        "bos_token_id": None,
        "eos_token_id": 0,
        "decoder_start_token_id": 58100,
    },
    names=BartNames(table=sinusoid, own_vocabularies=True),
    settings=bart_settings(
        fixed={"classifier_dropout": None}, own_vocabularies=True, not_none=["decoder_start_token_id"]
    ),
    oracle=ORACLE,
)
PEGASUS = Family(
    "pegasus",
    "PegasusForConditionalGeneration PegasusModel",
    structure={**STRUCTURE, "norm_placement": "pre", "position_type": "sinusoidal_halves"},
    fresh={
        **FRESH,
        "decoder_reads_source": False,
        "vocab_size": 96103,
        "num_hidden_layers": 16,
        "hidden_act": "relu",
        "embedding_scale": root_of_width,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    },
    names=BartNames(table=sinusoid),
    settings=bart_settings(fixed={"classifier_dropout": None}),
    oracle=ORACLE,
)
