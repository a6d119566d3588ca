"""Logits of repos by their own code, and of what it saves. Arguments: a folder, the repos' names."""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

AUTO = {"decoder": AutoModelForCausalLM, "encoder": AutoModelForMaskedLM, "encoder_decoder": AutoModelForSeq2SeqLM}
folder, logits = Path(sys.argv[1]), {}
ids = torch.tensor(json.loads((folder / "ids.json").read_text()))
with torch.no_grad():
    for name in sys.argv[2:]:
        kind = json.loads((folder / name / "config.json").read_text())["model_type"].removeprefix("blockformer_")
        for place in (name, f"{name} again"):
            model = AUTO[kind].from_pretrained(folder / place, trust_remote_code=True).eval()
            sides = {"decoder_input_ids": ids} if kind == "encoder_decoder" else {}
            logits[place] = model(ids, **sides).logits
            if place == name:
                model.save_pretrained(folder / f"{name} again")
torch.save(logits, folder / "logits.pt")
assert "blockformer" not in sys.modules
print("done")
