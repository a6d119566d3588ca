"""Publish `ann/small` in three versions and the private `ann/secret`; save the logits of all, print their commits."""

import json
import os

import torch
from hub_job import folder, logits, make, token
from huggingface_hub import HfApi
from transformers import PreTrainedTokenizerFast

import blockformer

api = HfApi(token=token)
tokenizer = PreTrainedTokenizerFast.from_pretrained(os.path.join(folder, "tokenizer"))
commits = {}

first = make(1)
first.add_model_tags("tiny")
commits["first"] = first.push_to_hub("ann/small", token=token, commit_message="The first weights").oid
tokenizer.push_to_hub("ann/small", token=token)
api.create_tag("ann/small", tag="v1", token=token)
commits["second"] = make(2).push_to_hub("ann/small", token=token, max_shard_size="100KB").oid
commits["third"] = make(3).push_to_hub("ann/small", token=token, revision="try").oid

exported = make(4)
blockformer.export_model(exported, os.path.join(folder, "exported"), tokenizer=tokenizer, max_shard_size="100KB")
api.create_repo("ann/secret", private=True)
commits["secret"] = api.upload_folder(repo_id="ann/secret", folder_path=os.path.join(folder, "exported")).oid

torch.save([logits(make(seed)) for seed in range(5)], os.path.join(folder, "logits.pt"))
print(json.dumps(commits))
