"""Convert repos of a Hub into the official format and back, by revision too; print why a private one is refused."""

import json
import os

import torch
from hub_job import folder, logits, token
from huggingface_hub import HfApi
from transformers import Qwen3ForCausalLM

import blockformer
from blockformer.conversion import ConversionError, convert

main, tagged = os.path.join(folder, "official"), os.path.join(folder, "tagged")
convert("ann/small", main, to_official=True, verify=False)
torch.save(logits(Qwen3ForCausalLM.from_pretrained(main)), os.path.join(folder, "official.pt"))
convert("ann/small", tagged, to_official=True, verify=False, revision="v1")
api = HfApi(token=token)
api.create_repo("ann/official", private=True)
api.upload_folder(repo_id="ann/official", folder_path=main)
api.upload_folder(repo_id="ann/official", folder_path=tagged)
api.create_tag("ann/official", tag="v1", token=token)
api.upload_folder(repo_id="ann/official", folder_path=main)
cache = os.path.join(folder, "cache")
ours = blockformer.from_official("ann/official", token=token, revision="v1", cache_dir=cache, device_map="cpu")
torch.save(logits(ours), os.path.join(folder, "ours.pt"))
assert os.listdir(cache)
try:
    convert("ann/secret", os.path.join(folder, "nothing"), to_official=True)
except ConversionError as error:
    print(json.dumps(str(error)))
