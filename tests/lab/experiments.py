"""Small experiments on a few kilobytes of made-up text, for the tests beside."""

import random

import yaml

TINY = {
    "base": {
        "preset": "qwen3",
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "axes": {"qk_norm": [True, False]},
    "data": {"files": ["text/*.txt"], "sequence_length": 16},
    "budget": {"tokens": 640},
    "training": {"learning_rate": 3e-3, "per_device_train_batch_size": 4, "use_cpu": True},
    "seeds": [0, 1],
    "evaluations": 5,
}


def write_experiment(folder, **changes):
    """An experiment's file beside its text; the base, the data and training are mended, other parts replaced."""
    content = dict(TINY)
    for name, value in changes.items():
        content[name] = {**content[name], **value} if name in ("base", "data", "training") else value
    texts, source = folder / "text", random.Random(0)
    if not texts.exists():
        texts.mkdir()
        words = ["".join(source.choices("abcdefghij", k=source.randint(2, 7))) for _ in range(120)]
        for number in range(8):
            (texts / f"{number}.txt").write_text(" ".join(source.choices(words, k=900)), encoding="utf-8")
    path = folder / "tiny.yaml"
    path.write_text(
        yaml.safe_dump({name: value for name, value in content.items() if value is not None}, sort_keys=False)
    )
    return path
