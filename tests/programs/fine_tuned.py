"""What fine-tuned folders compute by the code that lies in them: logits, or vectors of sentence-transformers."""

import json
import os
import sys

import torch
from transformers import AutoModelForCausalLM

folder, names, ids, file = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
results = {}
for name in names:
    place = os.path.join(folder, name)
    if os.path.exists(os.path.join(place, "modules.json")):
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(place, trust_remote_code=True, device="cpu")
        results[name] = torch.tensor(model.encode(["def heap(x):", "import textwrap"]))
        continue
    model = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    with torch.no_grad():
        results[name] = model(torch.tensor(ids)).logits
assert "blockformer" not in sys.modules
torch.save(results, file)
print(json.dumps(sorted(results)))
