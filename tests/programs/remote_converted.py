"""A converted decoder from a repo: its logits and texts, which are the same once it has saved itself again."""

import json
import sys

import torch
from closeness import close
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

repo, again, ids = sys.argv[1], sys.argv[2], torch.tensor(json.loads(sys.argv[3]))
trust = {"trust_remote_code": True}


def results(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, **trust).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    with torch.no_grad():
        logits = model(ids).logits
        assert close(model.lm_head(AutoModel.from_pretrained(folder, **trust).eval()(ids)[0]), logits)
    written = [model.generate(ids, max_new_tokens=9, do_sample=False, num_beams=n).tolist() for n in (1, 3)]
    return model, {"logits": logits.tolist(), "written": written}


model, first = results(repo)
assert AutoConfig.from_pretrained(repo, **trust).model_type == "blockformer_decoder"
model.save_pretrained(again)
assert results(again)[1] == first
assert "blockformer" not in sys.modules
print(json.dumps(first))
