"""A repo's config by itself: it says what it is for, and saves the code with it."""

import json
import os
import shutil
import sys

import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

repo, again, auto_class = sys.argv[1:4]
config = transformers.AutoConfig.from_pretrained(repo, trust_remote_code=True)
lists = [
    config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    config.model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
]
assert not [name for name in sys.modules if ".modeling_" in name and name.startswith("transformers_modules.")]
config.save_pretrained(again)
code = {name for name in os.listdir(repo) if name.endswith(".py")}
assert code == {name for name in os.listdir(again) if name.endswith(".py")}
shutil.copy(os.path.join(repo, "model.safetensors"), again)
shutil.rmtree(repo)
model = getattr(transformers, auto_class).from_pretrained(again, trust_remote_code=True)
assert type(model).__name__ == config.architectures[0]
assert "blockformer" not in sys.modules
print(json.dumps(lists))
