"""Compares numbers in programs that run where the helpers of the tests are out of reach."""

import torch


def close(found, expected):
    # Two folders are two copies of the code, and each measures for itself which product is the quicker one here.
    found, expected = torch.as_tensor(found), torch.as_tensor(expected)
    return (found - expected).abs().max() <= 1e-5 * expected.abs().max()
