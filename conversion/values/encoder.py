"""Settings of BERT-like encoders that are more than a field of the same meaning: positions, pooler, token types."""

from blockformer.files.errors import ConversionError, shown

from .base import Computed, NotExpressible, Value
from .common import token_or_none

RELATIVE = ("relative_key", "relative_key_query")


class EncoderPositions(Value):
    """How positions are told apart, and the rows at the head of their table.

    Args:
        relative: whether the family has tables of relative keys.
        shifted: whether positions begin after the padding token's id.
    """

    def __init__(self, relative: bool = False, shifted: bool = False):
        self.kinds = RELATIVE if relative else ()
        self.shifted = shifted

    def read(self, official):
        stated = official.entries.get("position_embedding_type") or "absolute"
        if stated not in ("absolute", *self.kinds):
            known = ", ".join(("absolute", *self.kinds))
            raise ConversionError(f"config.json: position_embedding_type must be one of {known}, not {shown(stated)}")
        kind = "learned" if stated == "absolute" else stated
        offset = 0
        if self.shifted and kind == "learned":
            padding = token_or_none(official.config.pad_token_id)
            if padding is None:
                raise ConversionError("config.json: pad_token_id must be set: the positions begin after it")
            offset = padding + 1
        rows = official.config.max_position_embeddings - offset
        read = {"position_type": kind, "position_offset": offset, "max_position_embeddings": rows}
        return read | {"padding_position": "by_token" if offset else "index"}

    def write(self, config, head):
        entries = {"max_position_embeddings": config.max_position_embeddings + config.position_offset}
        return entries | ({"position_embedding_type": config.position_type} if config.position_type in RELATIVE else {})


class Pooler(Value):
    """Whether there is a pooler, which has one activation in a family.

    Args:
        act: the activation.
    """

    def __init__(self, act: str):
        self.act = act

    def read(self, official):
        head = official.head
        there = head.own_pooler or head.pooler == "needed" or "pooler" in official.variant.traits
        return {"pooler_act": self.act if there and not head.is_decoder else None}

    def write(self, config, head):
        if config.pooler_act is None and not head.is_decoder and (head.own_pooler or head.pooler == "needed"):
            wanted = f"{self.act!r} (this head has a pooler: load the repo with pooler_act={self.act!r} and train that)"
            raise NotExpressible("pooler_act", wanted)
        return {}


def _read_side(official):
    if official.head.is_decoder:
        return {"add_cross_attention": official.config.add_cross_attention}
    if official.entries.get("add_cross_attention"):
        raise ConversionError("config.json: add_cross_attention is true but is_decoder is not; set both or neither")
    return {}


def _write_side(config, head):
    return {"is_decoder": True, "add_cross_attention": config.add_cross_attention} if head.is_decoder else {}


SIDE = Computed(_read_side, _write_side)
"""Whether it is a decoder, and looks at an encoder's states."""


def _write_token_types(config, head):
    if config.type_vocab_size < 1:
        raise NotExpressible("type_vocab_size", "1 or more", config.type_vocab_size)
    return {"type_vocab_size": config.type_vocab_size}


TOKEN_TYPES = Computed(lambda official: {"type_vocab_size": official.config.type_vocab_size}, _write_token_types)
