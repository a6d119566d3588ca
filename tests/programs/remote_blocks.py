"""A repo with blocks from outside: what its model computes and writes; it is saved again, and so is its config."""

import json
import sys

import torch
import transformers
from transformers import AutoConfig, AutoModel

repo, again, auto_class, inputs = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
trust = {"trust_remote_code": True}


def results(folder):
    model = getattr(transformers, auto_class).from_pretrained(folder, **trust).eval()
    given = {name: torch.tensor(value) for name, value in inputs.items()}
    with torch.no_grad():
        found = {"logits": model(**given).logits.tolist()}
        if model.can_generate():
            found["ids"] = model.generate(given["input_ids"], max_new_tokens=6, do_sample=False).tolist()
    return model, found


model, first = results(repo)
model.save_pretrained(again)
assert results(again)[1] == first
AutoModel.from_pretrained(again, **trust)
AutoConfig.from_pretrained(repo, **trust).save_pretrained(again + "-config")
config = AutoConfig.from_pretrained(again + "-config", **trust)
getattr(transformers, auto_class).from_config(config, **trust)
assert "blockformer" not in sys.modules
print(json.dumps(first))
