"""A decoder and its tokenizer from a repo: what they say, save again, and say after that."""

import json
import sys

import torch
from closeness import close
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

repo, again, words = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
trust = {"trust_remote_code": True}


def results(folder):
    config = AutoConfig.from_pretrained(folder, **trust)
    tokenizer = AutoTokenizer.from_pretrained(folder, **trust)
    model = AutoModelForCausalLM.from_pretrained(folder, **trust).eval()
    base = AutoModel.from_pretrained(folder, **trust).eval()
    batch = tokenizer(words, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**batch).logits
        states = base(**batch).last_hidden_state
    assert close(model.lm_head(states), logits)
    alone = model(**batch, labels=batch["input_ids"], return_logits=False)
    assert alone.logits is None
    assert close(alone.loss, model(**batch, labels=batch["input_ids"]).loss)
    ids = model.generate(**batch, max_new_tokens=8, do_sample=False)
    assert config.model_type == "blockformer_decoder"
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    text = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return model, tokenizer, base, {"ids": batch.input_ids.tolist(), "logits": logits.tolist(), "text": text}


model, tokenizer, base, first = results(repo)
model.save_pretrained(again)
tokenizer.save_pretrained(again)
base.save_pretrained(again + "-base")
_, _, _, second = results(again)
assert close(second.pop("logits"), first["logits"])
assert {**second, "logits": first["logits"]} == first
AutoModel.from_pretrained(again + "-base", **trust)
classifier = AutoModelForSequenceClassification.from_pretrained(repo, num_labels=3, **trust)
assert classifier.score.weight.shape == (3, model.config.hidden_size)
assert "blockformer" not in sys.modules
print(json.dumps(first))
