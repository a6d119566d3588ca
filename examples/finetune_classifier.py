"""Fine-tune a real encoder: which package of the standard library does a piece of code or documentation belong to?

    python examples/finetune_classifier.py --output classifier
    python examples/finetune_classifier.py --output classifier-lora --lora

The text is the standard library's own: docstrings and function bodies of some packages, held out file by file. The
result is compared with two baselines: the most frequent class, and a linear classifier on frozen features.
The saved repo is then loaded in a fresh process without this package, and must score the same.
"""

import argparse
import ast
import hashlib
import importlib.util
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

import blockformer
from blockformer.conversion import convert
from blockformer.data.corpus import gather
from blockformer.demo.elsewhere import run_elsewhere
from blockformer.demo.search import EncoderMissing, embed, encoder_folder

PACKAGES = ("asyncio", "email", "importlib", "logging", "multiprocessing", "unittest", "wsgiref", "xml")
MAX_LENGTH = 64
PER_CLASS = 300
TOO_LITTLE = (
    "Fine-tuning did worse than a linear classifier on frozen features: the encoder has seen too little, or has moved "
    "too fast. Give it more --epochs or --pieces, or half the --learning-rate."
)
BAR = partial(tqdm, desc="embedding", unit="batch")


@dataclass(frozen=True)
class Piece:
    """A docstring or a function's source, and the number of its package."""

    text: str
    label: int


def pieces(per_class: int = PER_CLASS, held_out_share: float = 0.25) -> tuple[list[Piece], list[Piece]]:
    """Training and held-out pieces. A file is in one of the two; no text is in both."""
    corpus = gather(max_bytes=100_000_000)
    train: list[Piece] = []
    held_out: list[Piece] = []
    for label, package in enumerate(PACKAGES):
        files = [file for file in corpus.train + corpus.held_out if file.name.startswith(f"{package}/")]
        files.sort(key=lambda file: hashlib.sha256(file.name.encode()).hexdigest())
        texts = [list(dict.fromkeys(_texts(file.text))) for file in files]
        wanted, taken, first = held_out_share * sum(map(len, texts)), 0, 0
        while taken < wanted and first < len(files) - 1:
            taken += len(texts[first])
            first += 1
        unseen = dict.fromkeys(text for part in texts[:first] for text in part)
        seen = dict.fromkeys(text for part in texts[first:] for text in part if text not in unseen)
        held_out += [Piece(text, label) for text in _some(unseen, per_class // 2)]
        train += [Piece(text, label) for text in _some(seen, per_class)]
    return train, held_out


def _texts(source: str):
    """Docstrings, and sources of functions without their docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            documentation = ast.get_docstring(node)
            if documentation and len(documentation) > 60:
                yield documentation
            if not isinstance(node, ast.ClassDef):
                body = node.body[1:] if documentation else node.body
                code = "\n".join(ast.unparse(statement) for statement in body)
                if len(code) > 80:
                    yield code


def _some(texts, count: int) -> list[str]:
    return sorted(texts, key=lambda text: hashlib.sha256(text.encode()).hexdigest())[:count]


class Rows(torch.utils.data.Dataset):
    """Tokenized pieces; rows of a batch are padded together later."""

    def __init__(self, entries: list[Piece], tokenizer):
        texts = [piece.text for piece in entries]
        self.inputs = tokenizer(texts, truncation=True, max_length=MAX_LENGTH)
        self.labels = [piece.label for piece in entries]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict:
        return {**{name: rows[index] for name, rows in self.inputs.items()}, "labels": self.labels[index]}


def frozen_features(encoder, tokenizer, train: list[Piece], held_out: list[Piece]) -> float:
    """Held-out accuracy of a linear classifier on the encoder's embeddings, the encoder unchanged."""
    features, unseen = (
        embed(encoder, tokenizer, [piece.text for piece in part], max_length=MAX_LENGTH, progress=BAR)
        for part in (train, held_out)
    )
    labels, answers = (torch.tensor([piece.label for piece in part]) for part in (train, held_out))
    linear = torch.nn.Linear(features.shape[1], len(PACKAGES))
    optimizer = torch.optim.LBFGS(linear.parameters(), max_iter=200)

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(linear(features * 10), labels) + 1e-3 * linear.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return (linear(unseen * 10).argmax(-1) == answers).float().mean().item()


def accuracy(prediction) -> dict[str, float]:
    """What `Trainer` reports in addition to the loss."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def train_classifier(repo: Path, tokenizer, train: Rows, held_out: Rows, folder: Path, arguments) -> tuple:
    """Fine-tune the encoder of `repo`; the model in evaluation mode and its held-out accuracy.

    Raises:
        FloatingPointError: a loss that is not finite, with its step.
    """
    names = dict(enumerate(PACKAGES))
    model = AutoModelForSequenceClassification.from_pretrained(
        repo, num_labels=len(PACKAGES), id2label=names, label2id={name: label for label, name in names.items()}
    )
    if arguments.lora:
        from peft import LoraConfig, TaskType, get_peft_model

        lora = LoraConfig(task_type=TaskType.SEQ_CLS, target_modules="all-linear", r=16, lora_alpha=32)
        model = get_peft_model(model, lora)
        model.print_trainable_parameters()
    trainer = Trainer(
        model,
        TrainingArguments(
            folder,
            num_train_epochs=arguments.epochs,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=64,
            learning_rate=arguments.learning_rate or (1e-3 if arguments.lora else 1e-4),
            warmup_steps=20,
            weight_decay=0.01,
            logging_steps=20,
            save_strategy="no",
            dataloader_pin_memory=False,
            report_to=[],
            seed=0,
        ),
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
        callbacks=[blockformer.StopOnNonFiniteLoss()],
    )
    trainer.train()
    score = trainer.evaluate()["eval_accuracy"]
    if arguments.lora:
        model = model.merge_and_unload()
    return model.eval(), score


RELOAD = """
import json, torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
folder, texts = sys.argv[1], torch.load(sys.argv[2], weights_only=True)
max_length = int(sys.argv[3])
model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
answers = []
with torch.inference_mode():
    for start in range(0, len(texts), 32):
        some = texts[start:start + 32]
        inputs = tokenizer(some, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
        answers += model(**inputs).logits.argmax(-1).tolist()
print(json.dumps(answers))
"""


def accuracy_after_reload(repo: Path, held_out: list[Piece], folder: Path) -> float:
    """Held-out accuracy of the saved repo in a fresh process that cannot import this package."""
    texts = folder / "texts.pt"
    torch.save([piece.text for piece in held_out], texts)
    answers = run_elsewhere(RELOAD, repo, texts, MAX_LENGTH)
    right = [one == piece.label for one, piece in zip(answers, held_out, strict=True)]
    return sum(right) / len(right)


def show(status, step: str, done: int, total: int) -> None:
    """A line that says how far the conversion is."""
    status.update(f"converting: {step}" + (f", {done / total:.0%}" if total else ""))


def main() -> None:
    """Convert, train, save, reload, compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of the repo to make")
    parser.add_argument("--epochs", type=float, default=4, help="passes over the training text (default: 4)")
    parser.add_argument(
        "--lora", action="store_true", help="train low-rank adapters instead of all weights (needs peft)"
    )
    parser.add_argument("--learning-rate", type=float, help="peak (default: 0.0001, with --lora 0.001)")
    parser.add_argument(
        "--pieces", type=int, default=PER_CLASS, help=f"largest number per package (default: {PER_CLASS})"
    )
    parser.add_argument("--force", action="store_true", help="replace the folder")
    arguments = parser.parse_args()

    console = Console()
    set_seed(0)
    try:
        source = encoder_folder()
    except EncoderMissing as error:
        sys.exit(str(error))
    if arguments.lora and importlib.util.find_spec("peft") is None:
        sys.exit("--lora needs peft, which is not installed: pip install peft")
    tokenizer = AutoTokenizer.from_pretrained(source)
    train, held_out = pieces(arguments.pieces)
    console.print(f"{len(train):,} pieces to train on, {len(held_out):,} held out, {len(PACKAGES)} packages")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with console.status("") as status:
            convert(source, folder / "encoder", progress=partial(show, status))
        frozen = frozen_features(blockformer.from_official(source), tokenizer, train, held_out)
        rows = Rows(train, tokenizer), Rows(held_out, tokenizer)
        model, tuned = train_classifier(folder / "encoder", tokenizer, *rows, folder / "training", arguments)
        blockformer.export_model(model, arguments.output, tokenizer=tokenizer, force=arguments.force)
        reloaded = accuracy_after_reload(arguments.output, held_out, folder)
    majority = Counter(piece.label for piece in train).most_common(1)[0][0]
    table = Table("classifier", "held-out accuracy")
    table.add_row("most frequent class", f"{sum(p.label == majority for p in held_out) / len(held_out):.1%}")
    table.add_row("linear, on frozen features", f"{frozen:.1%}")
    table.add_row("fine-tuned" + (" (LoRA)" if arguments.lora else ""), f"{tuned:.1%}")
    table.add_row("the same, reloaded in a fresh process", f"{reloaded:.1%}")
    console.print(table)
    console.print(f"The repo is in {arguments.output}.")
    if tuned < frozen:
        console.print(TOO_LITTLE)
    if abs(reloaded - tuned) > 0.5 / len(held_out):
        sys.exit("the reloaded model does not score what the trained one scored")


if __name__ == "__main__":
    main()
