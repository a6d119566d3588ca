"""sentence-transformers: vectors, training, a cross-encoder. Usage: python with_sentence_transformers.py MODELS"""

import tempfile

from datasets import Dataset
from sentence_transformers import (
    CrossEncoder,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)
from shared import TEXTS, TRUST, compare


def embedder(folder: str, pooling: str = "mean") -> SentenceTransformer:
    """A model with a pooling of its token states."""
    options = {"model_kwargs": TRUST, "config_kwargs": TRUST, "processor_kwargs": TRUST}
    words = models.Transformer(folder, **options)
    return SentenceTransformer(modules=[words, models.Pooling(64, pooling)], device="cpu")


def vectors(folder: str) -> list:
    """Vectors of sentences by two ways of pooling, in batches with padding."""
    return [embedder(folder, way).encode(TEXTS, batch_size=4, convert_to_tensor=True) for way in ("mean", "cls")]


def trained(folder: str) -> list:
    """Vectors after four steps, saved and loaded."""
    model = embedder(folder)
    rows = Dataset.from_list([{"anchor": text, "positive": text[5:]} for text in TEXTS])
    with tempfile.TemporaryDirectory() as place:
        arguments = SentenceTransformerTrainingArguments(
            place, max_steps=4, per_device_train_batch_size=4, learning_rate=0.01, optim="sgd", report_to=[],
            use_cpu=True, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = SentenceTransformerTrainer(model, arguments, rows, loss=losses.MultipleNegativesRankingLoss(model))
        trainer.train()
        model.save(f"{place}/saved")
        again = SentenceTransformer(f"{place}/saved", device="cpu", **TRUST)
        return [again.encode(TEXTS, convert_to_tensor=True)]


def scores(folder: str) -> list:
    """A cross-encoder's scores of pairs."""
    model = CrossEncoder(folder, num_labels=1, device="cpu", **TRUST)
    return [model.predict(list(zip(TEXTS, reversed(TEXTS), strict=True)), convert_to_tensor=True)]


if __name__ == "__main__":
    compare("sentence-transformers", "encode", "bert-encoder", vectors)
    compare("sentence-transformers", "encode", "qwen3", vectors)
    compare("sentence-transformers", "train, save, load", "bert-encoder", trained)
    compare("sentence-transformers", "CrossEncoder", "bert-score", scores)
