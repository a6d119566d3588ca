"""The small model that tests publish, and what keeps this package out of the processes that load it."""

from inspect import getsource

from blockformer.demo.fresh import Refuse

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.4,
    "eos_token_id": 0,
    "pad_token_id": 1,
}

# Code for such a process, which must not import it from here.
REFUSAL = f"""
import sys

{getsource(Refuse)}

def refuse_this_package():
    sys.meta_path[:0] = [Refuse("blockformer"), Refuse("conversion")]
"""
