"""Text written with and without drafts of the model's own layers that predict further (`use_mtp`), in turns.

`python benchmarks/drafts.py [--steps N] [--layers K] [--output FILE]` trains a small decoder on the standard
library's sources and continues held-out text greedily. It counts forwards of the model's layers and times the
process's own seconds.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import report
import torch
from machine import named

import blockformer
from blockformer.data.corpus import encode, gather, train_tokenizer

LENGTH, ROWS, PROMPT, NEW, TEXTS, ROUNDS = 128, 4, 32, 64, 8, 3


def trained(steps: int, layers: int, corpus) -> tuple[blockformer.BlockformerDecoderForCausalLM, torch.Tensor]:
    """A decoder after so many steps of 512 tokens, and the held-out tokens."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer((file.text for file in corpus.train), 1024, LENGTH)
    config = blockformer.preset(
        "qwen3", vocab_size=len(tokenizer), hidden_size=192, intermediate_size=512, num_hidden_layers=6,
        num_attention_heads=6, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, eos_token_id=None,
        pad_token_id=0, num_nextn_predict_layers=layers, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    model = blockformer.BlockformerDecoderForCausalLM(config).train()
    ids = encode(corpus.train, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.01)
    for step in range(steps):
        starts = torch.randint(len(ids) - LENGTH, (ROWS,))
        rows = torch.stack([ids[start : start + LENGTH] for start in starts.tolist()]).long()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 20) * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), encode(corpus.held_out, tokenizer).long()


@torch.no_grad()
def measured(model, prompts) -> dict[int, tuple[float, float]]:
    """Layers that draft -> forwards and seconds of the processor for each text; 0 writes without drafts."""
    forwards: list[int] = []
    model.model.register_forward_hook(lambda *_: forwards.append(1))
    further, found, texts = model.mtp, {}, {}
    for _ in range(ROUNDS):
        for count in range(len(further) + 1):
            model.mtp = further[: max(count, 1)]
            forwards.clear()
            start = time.process_time()
            written = [
                model.generate(prompt[None], max_new_tokens=NEW, do_sample=False, use_mtp=count > 0 or None)
                for prompt in prompts
            ]
            seconds = (time.process_time() - start) / len(prompts)
            known = texts.setdefault("plain", written)
            assert all(torch.equal(one, other) for one, other in zip(known, written, strict=True))
            found[count] = (len(forwards) / len(prompts), min(seconds, found.get(count, (0, seconds))[1]))
    return found


def main() -> None:
    """Train, write, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--prepared", action="store_true", help="prepare the model for inference first")
    parser.add_argument("--output", type=Path, help="write the rows to this JSON file, too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    start = time.process_time()
    model, held_out = trained(given.steps, given.layers, gather(max_bytes=2_000_000))
    print(f"{named()['processor']}, one thread; {given.steps} steps took {time.process_time() - start:.0f} s")
    rows = held_out[: len(held_out) // PROMPT * PROMPT].view(-1, PROMPT)
    prompts = rows[:: len(rows) // TEXTS][:TEXTS]
    if given.prepared:
        model = blockformer.prepare_for_inference(model)
    found = measured(model, prompts)
    print(f"{'drafts':>6} {'forwards':>9} {'tokens a forward':>17} {'seconds':>8}")
    for count, (forwards, seconds) in found.items():
        print(f"{count:6} {forwards:9.1f} {NEW / forwards:17.2f} {seconds:8.3f}")
    if given.output:
        rows = [{"drafts": count, "forwards": each[0], "seconds": each[1]} for count, each in found.items()]
        report.record(given.output, named(), rows)


if __name__ == "__main__":
    main()
