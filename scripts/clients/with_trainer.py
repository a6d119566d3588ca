"""transformers' own Trainer: the losses of some steps of each task. Usage: python with_trainer.py MODELS [NAME ...]"""

import sys
import tempfile

import transformers
from shared import TEXTS, TRUST, compare
from transformers import Trainer, TrainingArguments

AUTO = {
    "qwen3": transformers.AutoModelForCausalLM,
    "gpt2": transformers.AutoModelForCausalLM,
    "llama-classifier": transformers.AutoModelForSequenceClassification,
    "bert": transformers.AutoModelForMaskedLM,
    "bert-classifier": transformers.AutoModelForSequenceClassification,
    "bert-tokens": transformers.AutoModelForTokenClassification,
    "t5": transformers.AutoModelForSeq2SeqLM,
    "bart": transformers.AutoModelForSeq2SeqLM,
}
WAYS = {
    "whole batches": {"per_device_train_batch_size": 4},
    "accumulated batches": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    "gradient checkpointing": {"per_device_train_batch_size": 4, "gradient_checkpointing": True},
}


def rows(name: str, tokenizer) -> list[dict]:
    """Rows of a task: pairs of texts with segments for a classifier, else texts."""
    found = []
    for index, text in enumerate(TEXTS):
        row = tokenizer(text, truncation=True, max_length=24)
        ids = row["input_ids"]
        if name == "bert-classifier":
            row = tokenizer(text, TEXTS[index - 1], truncation=True, max_length=24, return_token_type_ids=True)
            row["labels"] = index % 2
        elif name.endswith("-classifier"):
            row["labels"] = index % 2
        elif name == "bert-tokens":
            row["labels"] = [token % 2 for token in ids]
        elif name == "bert":
            row["labels"] = [token if place % 3 == 0 else -100 for place, token in enumerate(ids)]
        else:
            row["labels"] = list(ids)
        found.append(dict(row))
    return found


def run(name: str, way: str, folder: str) -> dict:
    """Losses of each step, and the trained model's outputs."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = AUTO[name].from_pretrained(folder, **TRUST)
    data = rows(name, tokenizer)
    if isinstance(data[0]["labels"], int):
        collate = transformers.DataCollatorWithPadding(tokenizer)
    else:
        collate = transformers.DataCollatorForTokenClassification(tokenizer)
    with tempfile.TemporaryDirectory() as place:
        arguments = TrainingArguments(
            place, max_steps=4, learning_rate=0.02, optim="sgd", logging_steps=1, report_to=[], use_cpu=True,
            save_strategy="no", disable_tqdm=True, seed=0, **WAYS[way],
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data, data_collator=collate)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return {"losses": losses, "evaluation": trainer.evaluate()["eval_loss"]}


if __name__ == "__main__":
    for way in WAYS:
        for name in sys.argv[2:] or AUTO:
            compare("transformers", f"Trainer, {way}", name, lambda folder, n=name, w=way: run(n, w, folder))
