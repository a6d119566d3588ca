"""Fine-tune a model of a Hub repo by its own code with several tools, and save what each of them saves.

Prints what adapters say of their base; saves the logits and vectors of what was saved.
"""

import json
import os
import sys

import huggingface_hub.constants
import torch
from hub_job import arguments, folder, logits
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

COMMIT = arguments["commit"]
BASE = {"pretrained_model_name_or_path": "ann/small", "revision": COMMIT, "trust_remote_code": True}
LORA = {"task_type": "CAUSAL_LM", "init_lora_weights": False}
TEXTS = ["def heap(x):", "import textwrap"] * 2
SETTINGS = {"max_steps": 2, "save_steps": 2, "report_to": [], "disable_tqdm": True, "use_cpu": True}
tokenizer = AutoTokenizer.from_pretrained(**BASE)
results, adapters = {}, {}


def home(name):
    return os.path.join(folder, "tuned", name)


def fresh_model():
    model = AutoModelForCausalLM.from_pretrained(**BASE)
    assert "transformers_modules" in type(model).__module__
    return model


def keep(name, model, path=None):
    if path is None:
        model.save_pretrained(home(name))
    results[name] = logits(model.eval())


def with_trainer():
    rows = [{**tokenizer(text), "labels": tokenizer(text).input_ids} for text in TEXTS]
    settings = {**SETTINGS, "per_device_train_batch_size": 1, "dataloader_pin_memory": False}
    trainer = Trainer(fresh_model(), TrainingArguments(home("run"), **settings), train_dataset=rows)
    trainer.train()
    trainer.save_model(home("trainer"))
    keep("trainer", trainer.model, home("trainer"))
    keep(os.path.join("run", "checkpoint-2"), trainer.model, home("run"))


def with_peft():
    model = fresh_model()
    adapted = get_peft_model(model, LoraConfig(**LORA), revision=COMMIT)
    adapted.save_pretrained(home("adapter"))
    wanted = logits(adapted.eval())
    with open(os.path.join(home("adapter"), "adapter_config.json")) as file:
        adapters["adapter"] = json.load(file)
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    again = AutoPeftModelForCausalLM.from_pretrained(home("adapter"), trust_remote_code=True)
    huggingface_hub.constants.HF_HUB_OFFLINE = False
    assert type(again.base_model.model).__module__ == type(model).__module__  # which names the commit
    assert torch.equal(logits(again.eval()), wanted)
    keep("merged", adapted.merge_and_unload())


def with_sentence_transformers():
    model = SentenceTransformer("ann/small", revision=COMMIT, trust_remote_code=True, device="cpu")
    model.save_pretrained(home("sentences"))
    results["sentences"] = torch.tensor(model.encode(TEXTS[:2]))


def with_trl():
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    settings = SFTConfig(home("trl-run"), **SETTINGS, per_device_train_batch_size=1, max_length=16, bf16=False)
    data = Dataset.from_list([{"text": text} for text in TEXTS])
    options = {"args": settings, "train_dataset": data, "processing_class": tokenizer}
    trainer = SFTTrainer(fresh_model(), **options)
    trainer.train()
    trainer.save_model(home("trl"))
    keep("trl", trainer.model, home("trl"))
    trainer = SFTTrainer(fresh_model(), **options, peft_config=LoraConfig(**LORA, revision=COMMIT))
    trainer.save_model(home("trl-adapter"))
    with open(os.path.join(home("trl-adapter"), "adapter_config.json")) as file:
        adapters["trl-adapter"] = json.load(file)


for way in arguments["ways"]:
    globals()[f"with_{way}"]()
assert "blockformer" not in sys.modules
torch.save(results, arguments["save"])
print(json.dumps({name: [found["base_model_name_or_path"], found["revision"]] for name, found in adapters.items()}))
