"""An encoder-decoder from a repo: what it says, saves again, and says after that; one with fresh weights."""

import json
import os
import sys

import torch
from closeness import close
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

repo, again, ids = sys.argv[1], sys.argv[2], torch.tensor(json.loads(sys.argv[3]))
trust = {"trust_remote_code": True}


def results(folder):
    assert AutoConfig.from_pretrained(folder, **trust).model_type == "blockformer_encoder_decoder"
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, **trust).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    base = AutoModel.from_pretrained(folder, **trust).eval()
    with torch.no_grad():
        outputs = model(ids, decoder_input_ids=ids)
        assert close(model.logits_of(base(ids, decoder_input_ids=ids).last_hidden_state), outputs.logits)
    written = [model.generate(ids, max_new_tokens=9, do_sample=False, num_beams=n).tolist() for n in (1, 3)]
    return model, {"logits": outputs.logits.tolist(), "written": written}


model, first = results(repo)
model.save_pretrained(again)
second = results(again)[1]
assert close(second.pop("logits"), first["logits"])
assert {**second, "logits": first["logits"]} == first
classifier = AutoModelForSequenceClassification.from_pretrained(repo, num_labels=3, **trust)
assert classifier(ids).logits.shape == (2, 3)
fresh = AutoModelForSeq2SeqLM.from_config(AutoConfig.from_pretrained(repo, **trust), **trust)
q_proj = fresh.model.encoder.layers[0].self_attn.q_proj.weight
assert abs(q_proj.std().item() * (48 * 16) ** 0.5 - 1) < 0.1  # drawn as T5 draws it, in remote code too
assert not os.path.exists(os.path.join(again, "modeling_decoder.py"))
assert "blockformer" not in sys.modules
print(json.dumps(first))
