"""Publish `ann/blocks`, a model with a norm from outside, and its config as `ann/blocks-config`; save its logits."""

import os

import torch
from hub_job import arguments, folder, logits, sizes, token

import blockformer

blockformer.register(arguments["block"])
torch.manual_seed(0)
model = blockformer.BlockformerDecoderForCausalLM(blockformer.preset("qwen3", norm_type="dynamic_tanh", **sizes)).eval()
model.push_to_hub("ann/blocks", token=token)
model.config.push_to_hub("ann/blocks-config", token=token)
torch.save(logits(model), os.path.join(folder, "blocks.pt"))
print("{}")
