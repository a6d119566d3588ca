"""What follows from declaring an axis and reading it: run in a copy of the package that has `gate_multiplier`.

Arguments: the copy's folder, and the repo to write.
"""

import sys

sys.path.insert(0, sys.argv[1])
import torch

import blockformer
from blockformer.page.facts import Facts
from blockformer.page.fields import fields_of
from blockformer.summary import shown_settings

package, repo = sys.argv[1:]
assert blockformer.__file__.startswith(package)

SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 48}


def boxes_with_it(config):
    return {box.kind for box in Facts(config, 4).parts.boxes() if "gate_multiplier" in fields_of(box, config)}


for kind in (blockformer.BlockformerEncoderConfig, blockformer.BlockformerEncoderDecoderConfig):
    assert "gate_multiplier (a positive number; default 1.0): factor of the gate." in kind.__doc__
config = blockformer.preset("qwen3", **SIZES, gate_multiplier=3.0)
assert shown_settings(config)["feed-forward"]["gate_multiplier"] == 3.0
assert boxes_with_it(config) == {"feed-forward"}
plain = blockformer.preset("gpt2")  # a network without a gate
assert "gate_multiplier" not in shown_settings(plain)["feed-forward"]
assert not boxes_with_it(plain)

torch.manual_seed(0)
model = blockformer.BlockformerDecoderForCausalLM(config).eval()
ids = torch.arange(7)[None]
logits = model(ids).logits
model.save_pretrained(repo)
again = blockformer.BlockformerDecoderForCausalLM.from_pretrained(repo)
assert again.config.gate_multiplier == 3.0
assert torch.equal(again(ids).logits, logits)
other = blockformer.BlockformerDecoderForCausalLM.from_pretrained(repo, gate_multiplier=1.0)
assert not torch.equal(other(ids).logits, logits)
torch.save(logits, f"{repo}/logits.pt")
print("{}")
