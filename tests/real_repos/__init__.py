"""Checkpoints of the Hub, small: the files of real repos with random weights of two layers."""

from . import decoders, encoder_decoders, encoders, experts
from .record import Record, make

RECORDS: tuple[Record, ...] = (
    *encoders.RECORDS,
    *decoders.RECORDS,
    *experts.RECORDS,
    *encoder_decoders.RECORDS,
)

__all__ = ["RECORDS", "Record", "make"]
