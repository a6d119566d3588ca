"""A decoder becomes an embedder: made bidirectional, trained on pairs, measured before and after.

    pip install sentence-transformers
    python examples/train_embedder.py --output embedder            # a small decoder, trained here first
    python examples/train_embedder.py --output embedder --lora     # adapters, merged at the end (pip install peft)
    python examples/train_embedder.py --output embedder --model Qwen/Qwen3-0.6B --lora --steps 100

The pairs are docstrings of the standard library: the first sentence is the question, the rest is the text to find. No
module is both trained on and held out. The result is a model of sentence-transformers and a self-contained repo.
"""

import argparse
import importlib.util
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import set_seed

import blockformer
from blockformer.conversion.for_search import convert_for_search
from blockformer.data.corpus import encode, gather, train_tokenizer
from blockformer.demo.search import docstrings

SIZES = {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 48}
VOCABULARY, LENGTH, ROWS = 2048, 128, 16
PAIRS, TEMPERATURE = 64, 0.05
PROMPT = "Find: "
TOO_LITTLE = "no better than before: train for more steps"


def pairs(limit: int | None = None) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(question, text) pairs to train on and held out, each question once."""
    found: dict[str, tuple[str, str, str]] = {}
    for entry in docstrings():
        question, _, text = entry.text.partition("\n\n")
        question, text = " ".join(question.split()), " ".join(text.split())
        if len(question) >= 20 and len(text) >= 60:
            found.setdefault(question, (entry.file, question, text))
    files = sorted({file for file, _, _ in found.values()})
    random.Random(0).shuffle(files)  # nosec B311 # the same for everyone
    held = {*files[: len(files) // 4]}
    sides: tuple[list, list] = ([], [])
    for file, question, text in found.values():
        sides[file in held].append((question, text))
    return sides[0][:limit], sides[1][:limit]


def small_decoder(folder: Path, steps: int, num_bytes: int) -> None:
    """A language model of the standard library's sources, as a repo."""
    corpus = gather(max_bytes=num_bytes)
    tokenizer = train_tokenizer((file.text for file in corpus.train), VOCABULARY, LENGTH)
    ids = encode(corpus.train, tokenizer)
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = blockformer.preset("qwen3", **SIZES, **tokens, vocab_size=len(tokenizer), tie_word_embeddings=True)
    model = blockformer.BlockformerDecoderForCausalLM(config).train()
    optimizer = blockformer.adamw(model, 2e-3, 0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in tqdm(range(steps), "a small decoder", unit="step", leave=False):
        rows = ids[torch.randint(len(ids) - LENGTH, (ROWS,))[:, None] + torch.arange(LENGTH)]
        model(input_ids=rows, labels=rows).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    blockformer.export_model(model.eval(), folder, tokenizer)


def contrast(encoder, data: list[tuple[str, str]], steps: int, learning_rate: float) -> None:
    """Each question is to be nearer to its own text than to the others of the batch (van den Oord et al., 2018)."""
    weights = [weight for weight in encoder.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    encoder.train()
    for _ in tqdm(range(steps), "contrasting", unit="step", leave=False):
        batch = random.sample(data, min(PAIRS, len(data)))  # nosec B311 # a batch
        questions, texts = zip(*batch, strict=True)
        asked = encoder(encoder.preprocess(list(questions), prompt=PROMPT))["sentence_embedding"]  # [B, C]
        given = encoder(encoder.preprocess(list(texts)))["sentence_embedding"]
        scores = asked @ given.T / TEMPERATURE  # [B, B]
        own = torch.arange(len(scores))
        torch.nn.functional.cross_entropy(scores, own).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    encoder.eval()


def recall(scores: torch.Tensor) -> list[float]:
    """How often the own text is the first, and among the first ten, of scores [questions, texts]."""
    own = scores.diagonal()[:, None]
    ranks = (scores > own).sum(1)
    return [(ranks < count).float().mean().item() for count in (1, 10)]


def by_model(encoder, data: list[tuple[str, str]]) -> torch.Tensor:
    """Scores of questions and texts by an embedder."""
    questions, texts = map(list, zip(*data, strict=True))
    asked = encoder.encode_query(questions, convert_to_tensor=True)
    return asked @ encoder.encode_document(texts, convert_to_tensor=True).T


def by_words(data: list[tuple[str, str]]) -> torch.Tensor:
    """Scores by common words, rare ones counting more (TF-IDF): what a model must beat to be worth its time."""
    sides = [[text.lower().split() for text in side] for side in zip(*data, strict=True)]
    words = sorted({word for side in sides for text in side for word in text})
    places = {word: place for place, word in enumerate(words)}
    counts = [torch.zeros(len(data), len(places)) for _ in sides]
    for side, count in zip(sides, counts, strict=True):
        for row, text in enumerate(side):
            for word in text:
                count[row, places[word]] += 1
    weight = torch.log(len(data) / (1 + (counts[1] > 0).sum(0)))
    asked, given = (torch.nn.functional.normalize(torch.log1p(count) * weight, dim=-1) for count in counts)
    return asked @ given.T


def main(command_line=None) -> None:
    """Make a decoder or take one, convert, measure, train, measure, save, reload."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="the folder to make")
    parser.add_argument("--model", help="a decoder, a folder or Hub id (default: a small one, trained here)")
    parser.add_argument("--pretrain", type=int, default=400, help="steps for the small decoder (default: 400)")
    parser.add_argument("--steps", type=int, default=200, help=f"steps of {PAIRS} pairs (default: 200)")
    parser.add_argument("--lora", action="store_true", help="train adapters, and merge them")
    parser.add_argument("--limit", type=int, help="at most this many pairs of each kind, for a quick look")
    parser.add_argument("--bytes", type=int, default=8_000_000, help="bytes of text for the small decoder")
    arguments = parser.parse_args(command_line)
    for package in ("sentence_transformers", *(["peft"] if arguments.lora else [])):
        if importlib.util.find_spec(package) is None:
            name = package.replace("_", "-")
            sys.exit(f"{name} is not installed: pip install {name}")
    from sentence_transformers import SentenceTransformer

    if arguments.output.exists():
        sys.exit(f"{arguments.output} exists: name another folder, or remove it")
    console, start = Console(), time.perf_counter()
    set_seed(0)
    seen, held_out = pairs(arguments.limit)
    console.print(f"{len(seen):,} pairs to train on, {len(held_out):,} held out")
    with tempfile.TemporaryDirectory() as temporary:
        source = arguments.model or str(Path(temporary) / "decoder")
        if arguments.model is None:
            small_decoder(Path(source), arguments.pretrain, arguments.bytes)
        made = Path(temporary) / "embedder"
        report = convert_for_search(source, made, use="embedder", bidirectional=True, prompts={"query": PROMPT})
        console.print(report.not_verified or f"converted: {report.parity}")
        encoder = SentenceTransformer(str(made), trust_remote_code=True, model_kwargs={"dtype": torch.float32})
        encoder.max_seq_length = LENGTH
        table = Table("recall on held-out modules", "first", "in the first 10")

        def add(name: str, scores: torch.Tensor) -> float:
            found = recall(scores)
            table.add_row(name, *(f"{share:.1%}" for share in found))
            return found[1]

        add("common words (TF-IDF)", by_words(held_out))
        before = add("as converted", by_model(encoder, held_out))
        if arguments.lora:
            from peft import LoraConfig, get_peft_model

            config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
            encoder[0].model = get_peft_model(encoder[0].model, config)
        contrast(encoder, seen, arguments.steps, 2e-3 if arguments.lora else 5e-4)
        if arguments.lora:
            encoder[0].model = encoder[0].model.merge_and_unload()
        after = add("trained", by_model(encoder, held_out))
        saved = Path(temporary) / "saved"
        encoder.save_pretrained(str(saved), create_model_card=False)
        blockformer.conversion.export_folder(saved, arguments.output)
    again = SentenceTransformer(str(arguments.output), trust_remote_code=True)
    question = [held_out[0][0]]
    gap = abs(again.encode_query(question) - encoder.encode_query(question)).max()
    console.print(table)
    problems = blockformer.verify(arguments.output).problems
    console.print(f"{arguments.output}, verified: {problems or 'yes'}; reloaded within {gap:.0e}")
    console.print(f"{time.perf_counter() - start:.0f} s")
    if after <= before:
        sys.exit(TOO_LITTLE)


if __name__ == "__main__":
    main()
