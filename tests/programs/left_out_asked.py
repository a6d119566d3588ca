"""What repos without parts say where these are asked for. Arguments: an encoder, a decoder."""

import json
import sys

from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.from_pretrained(sys.argv[2], trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(sys.argv[2], trust_remote_code=True)
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 1}
asked = {
    "num_experts": lambda: type(config)(num_experts=4),
    "position_type": lambda: AutoModelForCausalLM.from_config(
        type(config)(**SIZES, position_type="alibi"), trust_remote_code=True
    ),
    "prepared": model.prepare_for_inference,
}
said = {}
for name, ask in asked.items():
    try:
        ask()
    except (ValueError, NotImplementedError) as error:
        said[name] = str(error)
print(json.dumps(said))
