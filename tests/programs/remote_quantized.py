"""A repo quantized while it is loaded: it saves itself, and says the same from there."""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

repo, again, library, ids = *sys.argv[1:4], torch.tensor(json.loads(sys.argv[4]))
if library == "torchao":
    from torchao.quantization import Int8WeightOnlyConfig

    config = TorchAoConfig(Int8WeightOnlyConfig())
else:
    config = BitsAndBytesConfig(load_in_8bit=True)
settings = {"trust_remote_code": True, "dtype": torch.float32, "device_map": "cpu"}


def logits_of(model):
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    with torch.no_grad():
        return model.eval()(ids).logits


model = AutoModelForCausalLM.from_pretrained(repo, quantization_config=config, **settings)
model.save_pretrained(again)
logits = logits_of(model)
assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(again, **settings)), logits)
print(json.dumps(logits.tolist()))
