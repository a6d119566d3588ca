"""An encoder and its tokenizer from a repo: logits of a batch, and what the pipeline fills in."""

import json
import sys

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

repo, batch, text = sys.argv[1], torch.load(sys.argv[2], weights_only=True), sys.argv[3]
model = AutoModelForMaskedLM.from_pretrained(repo, trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(repo, trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
with torch.no_grad():
    logits = model(**batch).logits
filled = pipeline("fill-mask", model=model, tokenizer=tokenizer)(text)
assert "blockformer" not in sys.modules
print(json.dumps({"logits": logits.tolist(), "filled": filled}))
