"""`SentenceTransformer.encode` over the standard library's docstrings, by a real trained encoder (6 layers x 384).

Its own way with everything around the encoder: texts sorted by length, batches of 32, the mean of the tokens' states.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import peers
import torch
from rich.console import Console
from workloads import Row, interleaved, make_row, prepared

import blockformer
from blockformer.demo.search import EncoderMissing, docstrings, encoder_folder

MODEL = "all-MiniLM-L6-v2"


class Session(torch.nn.Module):
    """An exported encoder in the place of the model that sentence-transformers calls."""

    def __init__(self, official: torch.nn.Module, run):
        super().__init__()
        self.config, self.encoder = official.config, peers.Exported(run)

    def forward(self, input_ids, attention_mask, **others):
        return self.encoder(input_ids, attention_mask)


def rows(size, console: Console) -> Iterator[Row]:
    """A row for each peer and each state of ours: seconds for all texts. None without the packages.

    Args:
        size: a `Size` of run.py.
        console: where missing tools are reported.

    Raises:
        RuntimeError: two encoders give other vectors, so that timing them would compare nothing.
    """
    if importlib.util.find_spec("sentence_transformers") is None:
        console.print("No rows of sentences: pip install sentence-transformers.")
        return
    try:
        folder = encoder_folder()
    except EncoderMissing as error:
        console.print(f"No rows of sentences: {error}")
        return
    from sentence_transformers import SentenceTransformer

    texts = [each.text for each in docstrings()]
    generator = torch.Generator().manual_seed(0)
    texts = [texts[place] for place in torch.randperm(len(texts), generator=generator)[: size.sentences]]
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        blockformer.convert(folder, place / "ours")
        ours, official = (SentenceTransformer(str(each), device="cpu") for each in (place / "ours", folder))
        runtimes = {"transformers": official}
        for peer, packages in (("ONNX Runtime", ["onnxruntime"]), ("OpenVINO", ["openvino"])):
            if peers.is_there(console, peer, *packages, "onnx", "onnxscript"):
                path = place / "encoder.onnx"
                if not path.exists():
                    with contextlib.redirect_stdout(io.StringIO()):
                        peers.export(official[0].model, path, any_size=True)
                run = peers.onnx_runtime(path) if peer == "ONNX Runtime" else peers.openvino_model(path, torch.float32)
                runtimes[peer] = SentenceTransformer(str(folder), device="cpu")
                runtimes[peer][0].model = Session(official[0].model, run)
        for state in ("", ", prepared"):
            if state:
                prepared((ours[0].model, None))
            for peer, other in runtimes.items():
                console.print(f"sentences{state}, compared with {peer}")
                yield _row(ours, other, texts, size, state, peer)


def _row(ours, other, texts: list[str], size, state: str, peer: str) -> Row:
    def encode(model, some: list[str]) -> torch.Tensor:
        return model.encode(some, convert_to_tensor=True, show_progress_bar=False)

    found, wanted = (encode(model, texts[:40]) for model in (ours, other))
    error = (found - wanted).abs().max().item()
    if error > 1e-4:
        raise RuntimeError(f"vectors differ by {error:.2g}; nothing is timed")

    def once(model) -> list[float]:
        start = time.perf_counter()
        encode(model, texts)
        return [time.perf_counter() - start]

    times = interleaved(lambda: once(ours), lambda: once(other), min(size.rounds, 3))
    return make_row(MODEL, f"{len(texts)} docstrings{state}", torch.float32, 0, 0, times, 0.0, peer=peer)
