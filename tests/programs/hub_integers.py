"""Publish a checkpoint that has integers in place of a norm's weights."""

import json
import os

from hub_job import folder, make, token
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file

made = os.path.join(folder, "integers")
make(1).save_pretrained(made)
weights = os.path.join(made, "model.safetensors")
tensors = load_file(weights)
tensors["model.norm.weight"] = tensors["model.norm.weight"].int()
save_file(tensors, weights, metadata={"format": "pt"})
HfApi(token=token).create_repo("ann/integers")
HfApi(token=token).upload_folder(repo_id="ann/integers", folder_path=made)
print(json.dumps(None))
