"""An embedder learns to find code by what it does: measured before and after, on modules that it has not seen.

    pip install '.[demo]'
    python examples/train_embedder.py --output embedder            # starts from a trained encoder of 6 layers
    python examples/train_embedder.py --output embedder --lora     # adapters, merged at the end (pip install peft)
    python examples/train_embedder.py --output embedder --lora --decoder HuggingFaceTB/SmolLM2-135M-Instruct --batch 8

The pairs are functions of the standard library: the first sentence of a docstring is the question, and the code without
the docstring and without the function's name is the text to find. No module is both trained on and held out. The result
is a model of sentence-transformers and a self-contained repo.
"""

import argparse
import ast
import importlib.util
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy, normalize
from tqdm import tqdm
from transformers import set_seed

import blockformer
from blockformer.conversion.for_search import convert_for_search
from blockformer.data.corpus import gather
from blockformer.demo.search import EncoderMissing, encoder_folder

TEMPERATURE = 0.05
TRAINED_LENGTH, LENGTH = 64, 128
PROMPT = "Find: "
TOO_LITTLE = "no better than before: train for more steps"


def functions(text: str) -> Iterator[tuple[str, str]]:
    """(question, code) of each function with a docstring and more than one line of code, in one file's text."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not (said := ast.get_docstring(node)):
            continue
        question = " ".join(re.split(r"\.\s|\n\n", said)[0].split())
        node.body = node.body[1:]
        if len(question.split()) > 3 and node.body:
            code = re.sub(rf"\b{node.name}\b", "f", ast.unparse(node))
            if code.count("\n") > 1:
                yield question, code


def pairs(limit: int | None = None, held_out: int | None = None) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Pairs to train on, module by module, and a sample of those held out; each question and each code once."""
    corpus = gather()
    files = sorted(corpus.train + corpus.held_out, key=lambda file: file.name)
    random.Random(0).shuffle(files)  # nosec B311 # the same for everyone
    sides: tuple[list, list] = ([], [])
    seen: set[str] = set()
    for number, file in enumerate(files):
        for pair in functions(file.text):
            if seen.isdisjoint(pair):
                sides[number % 4 == 0].append(pair)
                seen.update(pair)
    random.Random(0).shuffle(sides[1])  # nosec B311
    return sides[0][:limit], sides[1][:held_out]


def contrast(encoder, data: list[tuple[str, str]], steps: int, size: int, learning_rate: float) -> None:
    """Each question is to be nearer to its own text than to the others of the batch (van den Oord et al., 2018).

    Half of a batch are neighbours in the data, mostly of one module: texts that are hard to tell apart. Texts are cut
    to half the length that they have in a search, for speed.

    Args:
        size: pairs in a batch.
    """
    weights = [weight for weight in encoder.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, steps)
    encoder.train().max_seq_length = TRAINED_LENGTH
    for _ in tqdm(range(steps), "contrasting", unit="step", leave=False):
        start = random.randrange(len(data))  # nosec B311 # a batch
        batch = dict.fromkeys(data[start : start + size // 2] + random.sample(data, min(size // 2, len(data))))  # nosec B311
        questions, texts = map(list, zip(*batch, strict=True))
        asked = encoder(encoder.preprocess(questions, prompt=encoder.prompts.get("query")))["sentence_embedding"]
        given = encoder(encoder.preprocess(texts))["sentence_embedding"]  # [B, C]
        scores = normalize(asked) @ normalize(given).T / TEMPERATURE  # [B, B]
        own = torch.arange(len(scores))
        (cross_entropy(scores, own) + cross_entropy(scores.T, own)).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    encoder.eval().max_seq_length = LENGTH


def recall(scores: torch.Tensor) -> list[float]:
    """How often the own text is the first, and among the first ten, of scores [questions, texts].

    Of texts with an equal score, half come before it.
    """
    own = scores.diagonal()[:, None]
    ranks = (scores > own).sum(1) + ((scores == own).sum(1) - 1) / 2
    return [(ranks < count).float().mean().item() for count in (1, 10)]


def by_model(encoder, data: list[tuple[str, str]]) -> torch.Tensor:
    """Scores of questions and texts by an embedder."""
    questions, texts = map(list, zip(*data, strict=True))
    asked = encoder.encode_query(questions, convert_to_tensor=True)
    return normalize(asked) @ normalize(encoder.encode_document(texts, convert_to_tensor=True)).T


def by_words(data: list[tuple[str, str]], k: float = 1.5, b: float = 0.75) -> dict[str, torch.Tensor]:
    """Scores by common words and parts of names, rare ones counting more: what a model must beat.

    Args:
        k: of BM25 (Robertson and Zaragoza, 2009): how much a word counts that occurs often in one text.
        b: of BM25: how much long texts are held back.
    """
    from sklearn.feature_extraction.text import CountVectorizer, TfidfTransformer  # sentence-transformers needs it

    questions, texts = ([re.sub("(?<=[a-z])(?=[A-Z])", " ", text) for text in side] for side in zip(*data, strict=True))
    counter = CountVectorizer(token_pattern="[a-z]+")
    given, asked = counter.fit_transform(texts), counter.transform(questions)
    weights = TfidfTransformer(sublinear_tf=True).fit(given)
    cosines = weights.transform(asked) @ weights.transform(given).T
    times, having = torch.tensor(given.toarray()).double(), torch.tensor(given.getnnz(0))
    length = times.sum(1, keepdim=True)
    rarity = torch.log(1 + (len(data) - having + 0.5) / (having + 0.5))
    saturated = times * (k + 1) / (times + k * (1 - b + b * length / length.mean()))
    found = torch.tensor(asked.toarray()).double() @ (rarity * saturated).T
    return {"common words (TF-IDF)": torch.tensor(cosines.toarray()), "common words (BM25)": found}


def main(command_line=None) -> None:
    """Take a model, convert, measure, train, measure, save, reload."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="the folder to make")
    parser.add_argument("--decoder", help="a folder or Hub id, made into an embedder (default: a trained encoder)")
    parser.add_argument("--steps", type=int, default=30, help="steps (default: 30)")
    parser.add_argument("--batch", type=int, default=32, help="pairs in a step (default: 32)")
    parser.add_argument("--lora", action="store_true", help="train adapters, and merge them")
    parser.add_argument("--limit", type=int, help="at most this many pairs to train on, for a quick look")
    parser.add_argument(
        "--held-out", type=int, default=500, help="at most this many pairs to measure on (default: 500)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the batches and the adapters (default: 0)")
    arguments = parser.parse_args(command_line)
    for package in ("sentence_transformers", *(["peft"] if arguments.lora else [])):
        if importlib.util.find_spec(package) is None:
            name = package.replace("_", "-")
            sys.exit(f"{name} is not installed: pip install {name}")
    from sentence_transformers import SentenceTransformer

    if arguments.batch < 4:
        sys.exit("--batch must be at least 4: a question is compared with the other texts of its batch")
    if arguments.output.exists():
        sys.exit(f"{arguments.output} exists: name another folder, or remove it")
    console, start = Console(), time.perf_counter()
    set_seed(arguments.seed)
    seen, held_out = pairs(arguments.limit, arguments.held_out)
    console.print(f"{len(seen):,} pairs to train on, {len(held_out):,} held out")
    with tempfile.TemporaryDirectory() as temporary:
        made, saved = Path(temporary) / "embedder", Path(temporary) / "saved"
        try:
            if arguments.decoder is None:
                report = blockformer.convert(encoder_folder(), made)
            else:
                options = {"use": "embedder", "bidirectional": True, "prompts": {"query": PROMPT}}
                report = convert_for_search(arguments.decoder, made, **options)
        except EncoderMissing as error:
            sys.exit(str(error))
        console.print(report.not_verified or f"converted: {report.parity}")
        encoder = SentenceTransformer(str(made), trust_remote_code=True, model_kwargs={"dtype": torch.float32})
        encoder.max_seq_length = LENGTH
        table = Table("recall on held-out modules", "first", "in the first 10")

        def add(name: str, scores: torch.Tensor) -> float:
            found = recall(scores)
            table.add_row(name, *(f"{share:.1%}" for share in found))
            return found[1]

        for name, scores in by_words(held_out).items():
            add(name, scores)
        before = add("as converted", by_model(encoder, held_out))
        if arguments.lora:
            from peft import LoraConfig, get_peft_model

            config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
            encoder[0].model = get_peft_model(encoder[0].model, config)
        contrast(encoder, seen, arguments.steps, arguments.batch, 1e-3 if arguments.lora else 1e-4)
        if arguments.lora:
            encoder[0].model = encoder[0].model.merge_and_unload()
        after = add("trained", by_model(encoder, held_out))
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
