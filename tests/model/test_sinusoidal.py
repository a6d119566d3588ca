"""Sinusoids against their formula."""

import math

import pytest
import torch

from blockformer import BlockformerDecoderConfig
from blockformer.model.sinusoidal import SinusoidalPositions


@pytest.mark.parametrize("position_type", ["sinusoidal", "sinusoidal_halves"])
def test_sinusoids_follow_the_formula(position_type):
    """In float32, yet as exact at a far position as at a near one."""
    config = BlockformerDecoderConfig(hidden_size=10, num_attention_heads=2, head_dim=6, position_type=position_type)
    positions = [0, 1, 511, 5000, 16383]
    encoding = SinusoidalPositions(config)(torch.tensor([positions]))[0]
    for row, position in enumerate(positions):
        angles = [position / 10000 ** (2 * pair_index / 10) for pair_index in range(5)]
        sines, cosines = [math.sin(angle) for angle in angles], [math.cos(angle) for angle in angles]
        pairs = zip(sines, cosines, strict=True)
        expected = (
            sines + cosines if config.position_type == "sinusoidal_halves" else [x for pair in pairs for x in pair]
        )
        torch.testing.assert_close(encoding[row], torch.tensor(expected), atol=2e-6, rtol=0)
