"""One trained decoder in five other shapes: what each loses, and what a little training gives back.

    python examples/reshape.py

A small decoder learns the Python standard library's own sources. It is then made into one with fewer layers, with one
key/value head, with experts, into an encoder and into an encoder-decoder (`blockformer.reshape`). Each is trained a
little, next to a fresh model of the same settings, on the same rows; the table has the losses on held-out files.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import set_seed

import blockformer
from blockformer.data.corpus import encode, gather, train_tokenizer

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32}
SHAPES = {
    "layers 0, 1, 3": {"layers": [0, 1, 3]},
    "one key/value head": {"kv_heads": 1},
    "4 experts": {"experts": 4},
    "encoder": {"topology": "encoder"},
    "encoder-decoder": {"topology": "encoder-decoder"},
}
VOCABULARY, LENGTH, BATCH, MASKED = 1024, 64, 32, 0.2


def causal(rows: torch.Tensor, _: torch.Generator) -> dict[str, torch.Tensor]:
    """Rows [B, T] as inputs and labels: the next token."""
    return {"input_ids": rows, "labels": rows}


def masked_next_token(rows: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Some tokens are hidden behind token 0, and each is predicted at the token before it.

    A decoder's states say what comes next, so as an encoder it has less to relearn (BehnamGhader et al., 2024).
    """
    hidden = torch.rand(rows.shape, generator=generator) < MASKED
    hidden[:, 0] = False
    labels = torch.full_like(rows, -100)
    labels[:, :-1] = rows[:, 1:].masked_fill(~hidden[:, 1:], -100)
    return {"input_ids": rows.masked_fill(hidden, 0), "labels": labels}


def second_half(rows: torch.Tensor, _: torch.Generator) -> dict[str, torch.Tensor]:
    """The first half of each row is the source, the second half the target."""
    return {"input_ids": rows[:, : LENGTH // 2], "labels": rows[:, LENGTH // 2 :]}


TASKS: dict[str, Callable] = {"encoder": masked_next_token, "encoder-decoder": second_half}


def batches(ids: torch.Tensor, task: Callable, count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """`count` batches of rows drawn from one long row [N] of tokens."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(ids) - LENGTH, (count, BATCH), generator=generator)
    places = torch.arange(LENGTH)
    return [task(ids[each[:, None] + places], generator) for each in starts]


def train(model, data, learning_rate: float):
    """AdamW with a cosine; the model comes back in evaluation mode."""
    optimizer = blockformer.adamw(model, learning_rate, 0.01, betas=(0.9, 0.98))
    steps = max(3, len(data))
    warmup = max(0.1, 2 / steps)  # no shorter than a step, or OneCycleLR divides by zero
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, steps, pct_start=warmup)
    model.train()
    for batch in tqdm(data, "training", unit="step", leave=False):
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


@torch.inference_mode()
def loss_of(model, data) -> float:
    """Mean loss in nats per token."""
    return sum(model(**batch).loss.item() for batch in data) / len(data)


def main(command_line=None) -> None:
    """Train one, reshape it, train the others, show."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=800, help=f"steps of {BATCH} rows for the decoder (default: 800)")
    parser.add_argument("--more", type=int, default=100, help="steps for each model after it (default: 100)")
    parser.add_argument("--bytes", type=int, default=2_000_000, help="bytes of text, including the held-out part")
    arguments = parser.parse_args(command_line)

    console, start = Console(), time.perf_counter()
    set_seed(0)
    corpus = gather(max_bytes=arguments.bytes)
    tokenizer = train_tokenizer((file.text for file in corpus.train), VOCABULARY, LENGTH)
    seen, held_out = (encode(files, tokenizer) for files in (corpus.train, corpus.held_out))
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = blockformer.preset("qwen3", **SIZES, **tokens, vocab_size=len(tokenizer), tie_word_embeddings=True)
    console.print(f"training a decoder: {arguments.steps} steps")
    decoder = train(
        blockformer.BlockformerDecoderForCausalLM(config), batches(seen, causal, arguments.steps, seed=1), 3e-3
    )
    table = Table("held-out loss, nats per token", "decoder", "in the new shape", "trained", "a fresh one, trained")
    won = True
    for index, (name, shape) in enumerate(SHAPES.items(), 1):
        task = TASKS.get(name, causal)
        asked, data = batches(held_out, task, 20, seed=2), batches(seen, task, arguments.more, seed=3)
        model = blockformer.reshape(decoder, **shape)
        set_seed(1)
        fresh = type(model)(model.config)
        console.print(f"{index} of {len(SHAPES)}, {name}: {arguments.more} steps, and as many of a fresh one")
        right_after = loss_of(model, asked)
        ours, theirs = (loss_of(train(each, data, 1e-3), asked) for each in (model, fresh))
        before = f"{loss_of(decoder, asked):.2f}" if task is causal else ""
        table.add_row(name, before, f"{right_after:.2f}", f"{ours:.2f}", f"{theirs:.2f}")
        won = won and ours < theirs
    console.print(table)
    console.print(f"{time.perf_counter() - start:.0f} s")
    if not won:
        sys.exit("a fresh model did better: train the decoder for longer")


if __name__ == "__main__":
    main()
