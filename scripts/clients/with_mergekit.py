"""mergekit: merges of two models. Usage: python with_mergekit.py MODELS"""

import tempfile

import torch
import transformers
from mergekit.config import MergeConfiguration
from mergekit.merge import MergeOptions, run_merge
from shared import MODELS, TRUST, compare

AUTO = {
    "qwen3": transformers.AutoModelForCausalLM,
    "gpt2": transformers.AutoModelForCausalLM,
    "bert-classifier": transformers.AutoModelForSequenceClassification,
    "t5-v1.1": transformers.AutoModelForSeq2SeqLM,
}
METHODS = {
    "linear": {"parameters": {"normalize": True}},
    "slerp": {"parameters": {"t": 0.3}},
    "ties": {"parameters": {"density": 0.5, "weight": 0.5}},
}


def recipe(method: str, first: str, second: str) -> dict:
    """The content of a merge's file."""
    weights = {"parameters": {"weight": 0.6}}, {"parameters": {"weight": 0.4}}
    models = [{"model": first}, {"model": second}]
    if method == "linear":
        models = [{**model, **weight} for model, weight in zip(models, weights, strict=True)]
    base = {} if method == "linear" else {"base_model": first}
    return {"merge_method": method, "models": models, **base, **METHODS[method], "dtype": "float32"}


def run(name: str, method: str, folder: str) -> list:
    """The merged model's outputs."""
    second = str(MODELS / (f"{name}-2-official" if folder.endswith("-official") else f"{name}-2"))
    plan = MergeConfiguration.model_validate(recipe(method, folder, second))
    with tempfile.TemporaryDirectory() as merged:
        run_merge(plan, merged, MergeOptions(trust_remote_code=True, copy_tokenizer=True, quiet=True))
        model, loading = AUTO[name].from_pretrained(merged, output_loading_info=True, **TRUST)
    if wrong := sorted(loading["missing_keys"]) + sorted(loading["unexpected_keys"]):
        raise RuntimeError(f"missing or unexpected in the merged model: {wrong}")
    ids = torch.randint(4, 512, (2, 9), generator=torch.Generator().manual_seed(0))
    extra = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return [model.eval()(ids, **extra).logits]


if __name__ == "__main__":
    for name in AUTO:
        for method in METHODS:
            compare("mergekit", method, name, lambda folder, n=name, m=method: run(n, m, folder))
