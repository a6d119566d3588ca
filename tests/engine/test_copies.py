"""Copies of weights follow their weights."""

from functools import partial
from types import SimpleNamespace

import pytest
from torch import nn

from blockformer.engine.low_bits import Following


@pytest.mark.parametrize("shape", [(64, 96), (130, 77), (48, 1000)])
def test_a_write_through_data_to_some_rows_or_columns_is_seen(shape):
    """As whoever takes out a head writes, which PyTorch does not count."""
    layer = nn.Linear(shape[1], shape[0])
    places = [(layer._parameters, "weight")]
    for dim in (0, 1, 0):
        layer.weight.data = layer.weight.data.t()  # some adapters leave one that is not contiguous
        for part in layer.weight.data.chunk(8, dim):
            made: list = []
            copy = SimpleNamespace(holders=places, make=partial(made.append, 1))
            held = Following([copy], sampled=True)
            for _ in range(2):
                held.refresh()
            assert made == [1]
            part.add_(1)
            held.refresh()
            assert made == [1, 1]
