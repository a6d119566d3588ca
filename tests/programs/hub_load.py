"""Load revisions of a repo where this package is not; save their logits, and print the text of the last one."""

import json
import sys

import torch
from hub_job import arguments, logits, token
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

constants.DOWNLOAD_CHUNK_SIZE = arguments.get("piece") or constants.DOWNLOAD_CHUNK_SIZE
found = {}
for revision in arguments["revisions"]:
    options = {"revision": revision, "trust_remote_code": True, "token": token}
    model = AutoModelForCausalLM.from_pretrained(arguments["repo"], **options).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    found[str(revision)] = logits(model)
torch.save(found, arguments["save"])
text = None
if arguments.get("words"):
    tokenizer = AutoTokenizer.from_pretrained(arguments["repo"], **options)
    batch = tokenizer(arguments["words"], return_tensors="pt")
    written = model.generate(**batch, max_new_tokens=8, do_sample=False)
    text = [batch.input_ids.tolist(), tokenizer.batch_decode(written)]
assert "blockformer" not in sys.modules
print(json.dumps(text))
