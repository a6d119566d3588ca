"""What holds of every rule by which a state goes from token to token: in chunks, of one token, and packed.

`given` are its inputs [B, H, T, ...] in float64, of which the last is the state before the first token.
"""

import torch
from pairs import assert_close


def assert_chunks_follow(by_token, by_chunk, given):
    """Outputs, state and gradients in chunks equal the results token by token."""
    results = []
    for rule in (by_token, by_chunk):
        inputs = [each.clone().requires_grad_() for each in given]
        output, state = rule(*inputs)
        (output.square().sum() + state.square().sum()).backward()
        results.append([output, state, *(each.grad for each in inputs)])
    assert_close(results[1], results[0], tolerance=1e-11)


def assert_one_follows(by_token, of_one, given):
    """One more token gives the output and the state of the definition, and writes over the state."""
    wanted = by_token(*given)
    output, state = of_one(*given[:-1], held := given[-1].clone())
    assert_close([output, state], [*wanted], tolerance=1e-11)
    assert state is held


def assert_packed_texts_are_apart(by_token, by_chunk, given):
    """Texts that are packed into a row of 150 tokens are as each by itself; only the first begins with the state."""
    lengths = (70, 1, 9, 70)
    numbers = torch.repeat_interleave(torch.arange(1, 5), torch.tensor(lengths))[None]
    output, state = by_chunk(*given, numbers)
    parts, start = [], 0
    for number, length in enumerate(lengths):
        tokens = [each[:, :, start : start + length] for each in given[:-1]]
        part, last = by_token(*tokens, given[-1] if number == 0 else torch.zeros_like(given[-1]))
        parts.append(part)
        start += length
    assert_close(output, torch.cat(parts, dim=2), tolerance=1e-11)
    assert_close(state, last, tolerance=1e-11)
