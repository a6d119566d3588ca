"""Each method of PEFT that takes these models: train, save, load, merge. Usage: with_peft.py MODELS [NAME ...]"""

import tempfile

import torch
import transformers
from peft import (
    AdaLoraConfig,
    AdaptionPromptConfig,
    IA3Config,
    LNTuningConfig,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from shared import TRUST, compare

AUTO = {
    "CAUSAL_LM": transformers.AutoModelForCausalLM,
    "SEQ_CLS": transformers.AutoModelForSequenceClassification,
    "TOKEN_CLS": transformers.AutoModelForTokenClassification,
    "SEQ_2_SEQ_LM": transformers.AutoModelForSeq2SeqLM,
    None: transformers.AutoModelForMaskedLM,
}
TASKS = {
    "llama": "CAUSAL_LM",
    "gpt2": "CAUSAL_LM",
    "llama-classifier": "SEQ_CLS",
    "gpt2-classifier": "SEQ_CLS",
    "bert": None,
    "bert-classifier": "SEQ_CLS",
    "bert-tokens": "TOKEN_CLS",
    "t5": "SEQ_2_SEQ_LM",
    "bart": "SEQ_2_SEQ_LM",
}
# The same modules by their names here and there: for LoRA, for IA3 (and which of these are fed forward), the norms.
OURS = (["q_proj", "v_proj"], ["k_proj", "v_proj", "down_proj"], ["down_proj"])
NORMS = ["self_attn_pre_norm", "mlp_pre_norm", "cross_attn_pre_norm", "norm"]
NORMS_AFTER = ["self_attn_post_norm", "mlp_post_norm", "cross_attn_post_norm"]
OFFICIAL = {
    "llama": (*OURS, ["input_layernorm", "post_attention_layernorm", "norm"]),
    "gpt2": (["c_proj"], ["attn.c_proj", "mlp.c_proj"], ["mlp.c_proj"], ["ln_1", "ln_2", "ln_f"]),
    "bert": (
        ["query", "value"],
        r".*(self\.(key|value)|layer\.\d+\.output\.dense)",
        r".*layer\.\d+\.output\.dense",
        ["output.LayerNorm"],
    ),
    "t5": (["q", "v"], ["k", "v", "wo"], ["wo"], ["layer_norm", "final_layer_norm"]),
    "bart": (
        ["q_proj", "v_proj"],
        ["k_proj", "v_proj", "fc2"],
        ["fc2"],
        ["self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"],
    ),
}
MERGED = ("LoRA", "DoRA", "AdaLoRA", "IA3", "LN tuning")


def methods(model: str, folder: str) -> dict:
    """name -> config of each method; the modules are named, since the defaults mean other ones here and there."""
    family, task = model.partition("-")[0], TASKS[model]
    theirs = folder.endswith("-official")
    lora, ia3, down, norms = (
        OFFICIAL[family] if theirs else (*OURS, NORMS_AFTER if family in ("bert", "bart") else NORMS)
    )
    if family == "gpt2" and not theirs:
        lora, ia3 = ["o_proj", "down_proj"], ["o_proj", "down_proj"]
    common = {"task_type": task} if task else {}
    prompts = {"num_virtual_tokens": 4, **common}
    found = {
        "LoRA": LoraConfig(r=4, target_modules=lora, **common),
        "DoRA": LoraConfig(r=4, target_modules=lora, use_dora=True, **common),
        "AdaLoRA": AdaLoraConfig(init_r=4, target_r=2, total_step=4, target_modules=lora, **common),
        "IA3": IA3Config(target_modules=ia3, feedforward_modules=down, **common),
        "LN tuning": LNTuningConfig(target_modules=norms, **common),
    }
    if task:
        found["prompt tuning"] = PromptTuningConfig(**prompts)
        found["p-tuning"] = PromptEncoderConfig(encoder_hidden_size=16, **prompts)
        found["prefix tuning"] = PrefixTuningConfig(**prompts)
    if task == "CAUSAL_LM":
        found["adaption prompt"] = AdaptionPromptConfig(adapter_len=4, adapter_layers=2, **common)
    return found


def inputs(task: str | None) -> dict:
    """A batch with labels; the first row is padded on the left, which all topologies take."""
    ids = torch.randint(4, 512, (4, 10), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    labels = {"SEQ_CLS": torch.tensor([0, 1, 1, 0]), "TOKEN_CLS": ids % 2}.get(task or "", ids)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def run(model: str, method: str, folder: str) -> dict:
    """Losses of three steps, the logits, also of the saved and loaded adapter and of the merged model."""
    task, auto = TASKS[model], AUTO[TASKS[model]]
    base = auto.from_pretrained(folder, **TRUST)
    torch.manual_seed(0)
    adapted = get_peft_model(base, methods(model, folder)[method])
    batch = inputs(task)
    with torch.no_grad():  # the modules come in another order here and there: the same values for equal shapes
        for name, parameter in adapted.named_parameters():
            if "lora_A" in name or ("lora_B" in name and method == "AdaLoRA"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.05)
    result: dict = {"losses": []}
    for _ in range(3):
        loss = adapted(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        result["losses"].append(loss.item())
    labels = batch.pop("labels")  # PEFT: a loaded AdaLoRA adapter that is not to be trained fails where there are any
    if task == "SEQ_2_SEQ_LM":
        batch["decoder_input_ids"] = labels
    with torch.no_grad(), tempfile.TemporaryDirectory() as place:
        result["logits"] = adapted.eval()(**batch).logits
        adapted.save_pretrained(place)
        again = PeftModel.from_pretrained(auto.from_pretrained(folder, **TRUST), place).eval()
        torch.testing.assert_close(again(**batch).logits, result["logits"], atol=1e-4, rtol=1e-4)
        if method in MERGED:
            merged = adapted.merge_and_unload()
            torch.testing.assert_close(merged(**batch).logits, result["logits"], atol=1e-3, rtol=1e-3)
            merged.save_pretrained(f"{place}/merged")
            loaded = auto.from_pretrained(f"{place}/merged", **TRUST).eval()
            torch.testing.assert_close(loaded(**batch).logits, merged(**batch).logits, atol=1e-5, rtol=1e-5)
    return result


if __name__ == "__main__":
    import sys

    torch.set_num_threads(1)
    for model in sys.argv[2:] or TASKS:
        for method in methods(model, model):
            compare("peft", method, model, lambda folder, m=model, n=method: run(m, n, folder))
