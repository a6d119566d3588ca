"""Blocks from outside for the tests, and how they are forgotten again."""

import sys
from contextlib import contextmanager

from example_files import EXAMPLES

import blockformer
from blockformer.model.axes import BLOCKS

NORM, NETWORK = EXAMPLES / "blocks/dynamic_tanh.py", EXAMPLES / "blocks/squared_relu.py"
ATTENTION = EXAMPLES / "blocks/gated_attention.py"
POSITIONS, RESIDUAL = EXAMPLES / "blocks/p_rope.py", EXAMPLES / "blocks/rezero.py"
VALUES, LOOKED_UP = EXAMPLES / "blocks/value_residual.py", EXAMPLES / "blocks/value_embeddings.py"
RECURRENCE = EXAMPLES / "blocks/gated_recurrence.py"
FILES = (NORM, ATTENTION, POSITIONS, RESIDUAL, NETWORK)
ALL = {
    "norm_type": "dynamic_tanh",
    "mlp_type": "squared_relu",
    "attention_type": "gated_attention",
    "position_type": "p_rope",
    "residual": "rezero",
}
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


_TRIED = {}
"""What a file registered in this process, and its module."""


@contextmanager
def forgotten_after():
    """While it lasts, files may be registered; then they are not."""
    before = {axis: dict(known) for axis, known in BLOCKS.items()}
    try:
        yield
    finally:
        for axis, known in BLOCKS.items():
            for value, each in known.items():
                if before.get(axis, {}).get(value) is not each:
                    sys.modules.pop(each.cls.__module__, None)
        BLOCKS.clear()
        BLOCKS.update(before)


def register(*files):
    """Register files; what was registered and forgotten comes back as it was, without another trial of its blocks.

    In a trial, models are made, trained and loaded again: a second for a handful of blocks.
    """
    for file in files:
        blocks = [each for known in BLOCKS.values() for each in known.values() if each.file == file.name]
        if blocks or file not in _TRIED:
            blockformer.register(file)
            blocks = [each for known in BLOCKS.values() for each in known.values() if each.file == file.name]
            _TRIED[file] = blocks, sys.modules[blocks[0].cls.__module__]
            continue
        blocks, module = _TRIED[file]
        sys.modules[module.__name__] = module
        for each in blocks:
            BLOCKS[each.axis][each.value] = each


def register_all():
    """The blocks of `examples/blocks`."""
    register(*FILES, VALUES, LOOKED_UP)


def block_file(folder, body="        return hidden_states", name="my_norm", head="", fields=""):
    """A file with one norm."""
    path = folder / f"{name}.py"
    path.write_text(
        f"{head}from torch import nn\n\nfrom .blocks import block\n\n\n"
        f'@block("norm_type", "{name}"{fields})\nclass MyNorm(nn.Module):\n'
        "    def __init__(self, config, size):\n        super().__init__()\n\n"
        f"    def forward(self, hidden_states):\n{body}\n"
    )
    return path
