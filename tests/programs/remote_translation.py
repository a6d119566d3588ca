"""An encoder-decoder and its tokenizer from a repo: logits of a batch, and phrases written greedily and with beams."""

import json
import sys

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

repo, batch, phrases = sys.argv[1], torch.load(sys.argv[2], weights_only=True), json.loads(sys.argv[3])
model = AutoModelForSeq2SeqLM.from_pretrained(repo, trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(repo, trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
with torch.no_grad():
    logits = model(**batch).logits
inputs = tokenizer(phrases, padding=True, return_tensors="pt")
written = [model.generate(**inputs, max_new_tokens=12, do_sample=False, num_beams=n).tolist() for n in (1, 3)]
assert "blockformer" not in sys.modules
print(json.dumps({"logits": logits.tolist(), "written": written}))
