"""A mix that no family has: an encoder with rotary positions, RMSNorm, SwiGLU and grouped heads, as a masked LM.

    python examples/train_masked_lm.py --output encoder

It is trained on the Python standard library's own sources with `Trainer` and `DataCollatorForLanguageModeling`. How
well it guesses masked tokens of held-out files is compared with a baseline that knows only token frequencies. The
saved repo is then loaded in a fresh process without this package, must score the same, and fills in masks.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import AddedToken
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast, Trainer, TrainingArguments, set_seed

import blockformer
from blockformer.data.corpus import Blocks, encode, gather, train_tokenizer
from blockformer.demo.elsewhere import run_elsewhere

MIX = {
    "position_type": "rotary",
    "norm_type": "rms_norm",
    "norm_placement": "pre",
    "gated_mlp": True,
    "hidden_act": "silu",
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "initializer_range": 0.02,
}
VOCABULARY = 1024
LENGTH, BATCH = 64, 32
MASKED = 0.15
BY_HAND = (
    "def __init__(<mask>, name):",
    "    def __<mask>__(self, name):",
    "if value is <mask> None:",
    "if value is not <mask>:",
    "        return <mask>.name",
    "for i in <mask>(len(names)):",
)


def make_tokenizer(texts, vocab_size: int) -> PreTrainedTokenizerFast:
    """The demo's byte-level BPE with a mask token, which takes the space before it as the token that it hides would."""
    tokenizer = train_tokenizer(texts, vocab_size - 1, LENGTH)
    tokenizer.add_special_tokens({"mask_token": AddedToken("<mask>", lstrip=True, special=True)})
    tokenizer.padding_side = "right"
    return tokenizer


def masked_batches(blocks: Blocks, tokenizer, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Held-out rows with tokens masked once and for all, so that everyone gets the same task."""
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=MASKED, seed=seed)
    rows = [blocks[index] for index in range(len(blocks))]
    return [dict(collator(rows[start : start + BATCH])) for start in range(0, len(rows), BATCH)]


@dataclass(frozen=True)
class Score:
    """How well masked tokens are guessed: the share of right guesses, and nats per token."""

    accuracy: float
    loss: float


def score_of(log_probabilities: list[torch.Tensor], labels: list[torch.Tensor]) -> Score:
    """Scores from log-probabilities [N, V] and the N right tokens, both in pieces."""
    guesses, right = torch.cat(log_probabilities), torch.cat(labels)
    loss = torch.nn.functional.nll_loss(guesses, right).item()
    return Score(accuracy=(guesses.argmax(-1) == right).double().mean().item(), loss=loss)


@torch.inference_mode()
def model_score(model, batches) -> Score:
    """The score of a masked language model."""
    pieces, labels = [], []
    for batch in batches:
        masked = batch["labels"] != -100
        logits = model(input_ids=batch["input_ids"].to(model.device)).logits.cpu()
        pieces.append(logits[masked].log_softmax(-1))
        labels.append(batch["labels"][masked])
    return score_of(pieces, labels)


def unigram_score(train_ids: torch.Tensor, batches, vocab_size: int) -> Score:
    """The score of the training text's token frequencies (plus one each), whatever stands around the mask."""
    counts = torch.bincount(train_ids, minlength=vocab_size).double() + 1
    labels = [batch["labels"][batch["labels"] != -100] for batch in batches]
    row = (counts / counts.sum()).log()[None]
    return score_of([row.expand(len(one), -1) for one in labels], labels)


def train(config, tokenizer, blocks: Blocks, folder: Path, arguments):
    """A trained model in evaluation mode.

    Raises:
        FloatingPointError: a loss that is not finite, with its step.
    """
    model = blockformer.BlockformerEncoderForMaskedLM(config)
    trainer = Trainer(
        model,
        TrainingArguments(
            folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=BATCH,
            learning_rate=arguments.learning_rate,
            weight_decay=0.01,
            adam_beta2=0.98,
            lr_scheduler_type="cosine",
            warmup_steps=min(100, arguments.steps // 4),
            logging_steps=100,
            save_strategy="no",
            report_to=[],
            dataloader_pin_memory=torch.cuda.is_available(),
            seed=0,
        ),
        train_dataset=blocks,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=MASKED),
        callbacks=[blockformer.StopOnNonFiniteLoss()],
    )
    trainer.train()
    return model.eval()


RELOAD = """
import json, sys, torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline
folder, batches, texts = sys.argv[1], torch.load(sys.argv[2], weights_only=True), json.loads(sys.argv[3])
model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
right = total = 0
with torch.inference_mode():
    for batch in batches:
        masked = batch["labels"] != -100
        guesses = model(input_ids=batch["input_ids"]).logits[masked].argmax(-1)
        right, total = right + int((guesses == batch["labels"][masked]).sum()), total + len(guesses)
fill = pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=3)
filled = [[(one["token_str"], one["score"]) for one in fill(text)] for text in texts]
print(json.dumps({"accuracy": right / total, "filled": filled}))
"""


def reload_elsewhere(repo: Path, batches, texts, folder: Path) -> dict:
    """The saved repo's outputs in a fresh process that cannot import this package.

    Returns:
        `accuracy` on the batches, and `filled`: for each text three pairs of a token and its probability.
    """
    saved = folder / "batches.pt"
    torch.save(batches, saved)
    return run_elsewhere(RELOAD, repo, saved, json.dumps(list(texts)))


def main(command_line=None) -> None:
    """Train, judge, save, reload elsewhere, show."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of the repo to make")
    parser.add_argument("--steps", type=int, default=700, help=f"optimizer steps of {BATCH} rows (default: 700)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak (default: 0.003)")
    parser.add_argument("--bytes", type=int, default=4_000_000, help="bytes of text, including the held-out part")
    parser.add_argument("--force", action="store_true", help="replace the folder")
    arguments = parser.parse_args(command_line)

    console = Console()
    set_seed(0)
    corpus = gather(max_bytes=arguments.bytes)
    tokenizer = make_tokenizer((file.text for file in corpus.train), VOCABULARY)
    train_ids = encode(corpus.train, tokenizer)
    batches = masked_batches(Blocks(encode(corpus.held_out, tokenizer), LENGTH, limit=600), tokenizer)
    config = blockformer.BlockformerEncoderConfig(
        **MIX,
        **SIZES,
        vocab_size=len(tokenizer),
        max_position_embeddings=LENGTH,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    start, busy = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        model = train(config, tokenizer, Blocks(train_ids, LENGTH), Path(scratch), arguments)
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        baseline, score = unigram_score(train_ids, batches, len(tokenizer)), model_score(model, batches)
        blockformer.export_model(model, arguments.output, tokenizer=tokenizer, force=arguments.force)
        elsewhere = reload_elsewhere(arguments.output, batches, BY_HAND, Path(scratch))

    console.print(
        f"{model.num_parameters():,} parameters, {len(tokenizer):,} tokens, {len(train_ids):,} tokens of text; "
        f"trained in {seconds:.0f} s ({busy:.0f} s of CPU)"
    )
    table = Table("masked tokens of held-out files", "right", "nats per token")
    table.add_row("token frequencies", f"{baseline.accuracy:.1%}", f"{baseline.loss:.2f}")
    table.add_row("the encoder", f"{score.accuracy:.1%}", f"{score.loss:.2f}")
    table.add_row("the same, reloaded in a fresh process", f"{elsewhere['accuracy']:.1%}", "")
    console.print(table)
    table = Table("text", "fill-mask, in the fresh process")
    for text, guesses in zip(BY_HAND, elsewhere["filled"], strict=True):
        table.add_row(text.strip(), ", ".join(f"{token!r} {share:.0%}" for token, share in guesses))
    console.print(table)
    if abs(elsewhere["accuracy"] - score.accuracy) > 1e-6:
        sys.exit("the reloaded model does not score what the trained one scored")


if __name__ == "__main__":
    main()
