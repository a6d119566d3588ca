"""What follows from a record and its name in the index: run in a copy of the package to which a family was added.

Arguments: the copy's folder, and a folder to write into.
"""

import sys

sys.path.insert(0, sys.argv[1])
import torch
from safetensors.torch import load_file
from transformers import Jais2Config, Jais2ForCausalLM

import blockformer

package, folder = sys.argv[1:]
assert blockformer.__file__.startswith(package)

SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

assert blockformer.preset("jais2").norm_type == "layer_norm"
torch.manual_seed(0)
Jais2ForCausalLM(Jais2Config(**SIZES)).save_pretrained(f"{folder}/official")
report = blockformer.convert(f"{folder}/official", f"{folder}/ours")
assert report.parity.passed
blockformer.convert(f"{folder}/ours", f"{folder}/back", to_official=True, verify=False)
before, after = (load_file(f"{folder}/{name}/model.safetensors") for name in ("official", "back"))
assert before.keys() == after.keys()
assert all(torch.equal(before[name], after[name]) for name in before)
print("{}")
