"""TRL's trainers: losses of some steps. Usage: python with_trl.py MODELS"""

import tempfile

import transformers
from datasets import Dataset
from peft import LoraConfig
from shared import TEXTS, TRUST, compare
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

COMMON = {
    "max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 0.01, "optim": "sgd", "logging_steps": 1,
    "report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True, "seed": 0,
    "trust_remote_code": True,
}  # fmt: skip
PAIRS = [
    {"prompt": text[:12], "chosen": text[12:], "rejected": TEXTS[index - 1][:20]} for index, text in enumerate(TEXTS)
]
LABELLED = [
    {"prompt": text[:12], "completion": text[12:] or "x", "label": index % 2 == 0} for index, text in enumerate(TEXTS)
]


def lengths(completions, **_) -> list[float]:
    """A reward: longer is better."""
    return [len(text) / 10 for text in completions]


WAYS = {
    "SFT": (SFTTrainer, SFTConfig, [{"text": text} for text in TEXTS], {"max_length": 32}),
    "SFT with packing": (
        SFTTrainer,
        SFTConfig,
        [{"text": text} for text in TEXTS],
        {"max_length": 32, "packing": True},
    ),
    "SFT with LoRA": (SFTTrainer, SFTConfig, [{"text": text} for text in TEXTS], {"max_length": 32}),
    "DPO": (DPOTrainer, DPOConfig, PAIRS, {"max_length": 48}),
    "KTO": (KTOTrainer, KTOConfig, LABELLED, {"max_length": 48}),
    "Reward": (RewardTrainer, RewardConfig, [{k: row[k] for k in ("chosen", "rejected")} for row in PAIRS], {}),
    "GRPO": (
        GRPOTrainer,
        GRPOConfig,
        [{"prompt": text[:12]} for text in TEXTS],
        {"num_generations": 2, "max_completion_length": 6, "beta": 0.1, "temperature": 1.0},
    ),
}


def run(way: str, folder: str) -> dict:
    """The losses of each step."""
    trainer_class, config_class, rows, settings = WAYS[way]
    auto = transformers.AutoModelForCausalLM
    if way == "Reward":
        auto = transformers.AutoModelForSequenceClassification
    model = auto.from_pretrained(folder, **TRUST)
    extra: dict = {"reward_funcs": lengths} if way == "GRPO" else {}
    if way == "SFT with LoRA":
        extra["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as place:
        trainer = trainer_class(
            model=model,
            args=config_class(place, **{**COMMON, **settings}),
            train_dataset=Dataset.from_list(rows),
            processing_class=transformers.AutoTokenizer.from_pretrained(folder),
            **extra,
        )
        trainer.train()
        return {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}


if __name__ == "__main__":
    for way in WAYS:
        model = "llama-reward" if way == "Reward" else "qwen3"
        compare("trl", way, model, lambda folder, w=way: run(w, folder))
