"""RoFormer (Su et al., 2021), which brought rotary positions: BERT whose heads turn, neighbouring channels together.

Files hold the table of sines and cosines that the official class computes; here it is computed, too.
"""

from dataclasses import dataclass, replace

import torch

from blockformer.files.errors import ConversionError, shown

from ..rules.operations import DeinterleaveRotary
from ..rules.table import RuleTable
from ..values import TOKEN_TYPES, Computed, NotExpressible
from .base import Family
from .bert import EMBEDDINGS, FRESH, LANGUAGE_MODEL, LAYER, STRUCTURE
from .bert_like import EncoderNames, EncoderSettings
from .encoder_heads import ROBERTA_ROWS, encoder_heads
from .fresh import rotary

TABLE = "encoder.embed_positions.weight"
TURNED = tuple(f"attention.self.{name}.{kind}" for name in ("query", "key") for kind in ("weight", "bias"))
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


@dataclass(kw_only=True, eq=False)
class TurnedNames(EncoderNames):
    """The names of an encoder whose queries and keys have the channels of a pair side by side."""

    def layout(self, variant, config):
        """See `Names.layout`."""
        table = super().layout(variant, config)
        turn = DeinterleaveRotary(config.head_dim, config.head_dim)
        rules = [replace(rule, op=turn) if str(rule.source).endswith(TURNED) else rule for rule in table.rules]
        return RuleTable(rules, table.ignored, table.layers)

    def reads_ignored(self, name):
        return name.endswith(TABLE) or super().reads_ignored(name)

    def check_ignored(self, name, tensor):
        if not name.endswith(TABLE):
            return super().check_ignored(name, tensor)
        tolerance = max(1e-6, torch.finfo(tensor.dtype).eps)
        if torch.allclose(tensor.double(), _sinusoid(*tensor.shape), rtol=0, atol=tolerance):
            return None
        return "is not the table of sines and cosines that the official class computes, so it cannot be left out"


def _sinusoid(positions: int, width: int) -> torch.Tensor:
    """The table of a head's channels: all sines, then all cosines."""
    angles = torch.arange(positions, dtype=torch.float64)[:, None]
    angles = angles * 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def _write_rope(config, head):
    if config.rope_parameters != ROPE:
        raise NotExpressible("rope_parameters", repr(ROPE), config.rope_parameters)
    return {}


def _check_rows(official):
    """The head for rows goes through `hidden_act`, and our pooler through one activation in a family."""
    act = official.config.hidden_act
    if official.head.own_pooler and act != "gelu":
        raise ConversionError(f"hidden_act must be 'gelu' with a head for rows, not {shown(act)}")
    return {}


def _embedding_size(official):
    size = official.config.embedding_size
    return {"embedding_size": official.config.hidden_size if size is None else size}


FAMILY = Family(
    "roformer",
    encoder_heads(
        "RoFormerModel RoFormerForMaskedLM RoFormerForSequenceClassification RoFormerForTokenClassification "
        "RoFormerForQuestionAnswering RoFormerForCausalLM",
        ROBERTA_ROWS,
        Model={},
    ),
    structure={**STRUCTURE, "position_type": "rotary"},
    fresh={**FRESH, **rotary(10_000.0), "vocab_size": 50000, "max_position_embeddings": 1536},
    names=TurnedNames(
        root="roformer.",
        embeddings={theirs: ours for theirs, ours in EMBEDDINGS.items() if ours != "embed_positions"},
        layer="encoder.layer.{layer}.",
        modules=LAYER,
        stack={"embeddings.LayerNorm": "embedding_norm", "embeddings_project": "embed_projection"},
        language_model=LANGUAGE_MODEL,
        ignored=[TABLE],
        refused={
            "RoFormerForMultipleChoice": "it reads the last token of each choice, which no head of an encoder does here"
        },
    ),
    settings=EncoderSettings(
        positions=Computed(lambda official: {"position_type": "rotary", "rope_parameters": ROPE}, _write_rope),
        computed=[
            TOKEN_TYPES,
            Computed(_check_rows),
            Computed(_embedding_size, lambda config, head: {"embedding_size": config.embedding_size}),
        ],
        pooler_act="gelu",
        unsupported={"rotary_value": (None, False)},
    ),
)
