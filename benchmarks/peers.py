"""What a CPU user exports to, and ours, on the same random weights.

They are llama.cpp, ONNX Runtime (GenAI too), OpenVINO and CTranslate2.

Optional: `pip install '.[peers]'`. A runtime that is not installed has no rows.
"""

from __future__ import annotations

import importlib.util
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import ctranslate
import genai
import gguf_model
import numpy as np
import seq2seq
import torch
import workloads
from rich.console import Console
from workloads import Row, Shape, check_same, interleaved, make_row

import blockformer

CONTEXTS = [16, 512, 2048]
PREFILLS = [512, 2048]
GROUP = 32
"""Inputs that share a scale in Q4_0."""


def rows(size, limits, console: Console, folder: Path) -> Iterator[Row]:
    """Every row whose runtime is installed.

    Args:
        size: a `Size` of run.py.
        limits: the machine's.
        folder: where the exported files may lie for a while.
    """
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
        if is_there(console, "llama.cpp", "llama_cpp", "gguf"):
            yield from _llama_rows(size, limits, console, place)
        if is_there(console, "ONNX Runtime", "onnxruntime", "onnx", "onnxscript"):
            yield from _encoder_rows(size, limits, console, place, "ONNX Runtime", [torch.float32])
        if is_there(console, "OpenVINO", "openvino", "onnx", "onnxscript"):
            yield from _encoder_rows(size, limits, console, place, "OpenVINO", [torch.float32, torch.bfloat16])
        if is_there(console, genai.PEER, "onnxruntime_genai", "onnx_ir"):
            yield from genai.rows(size, limits, place)
        if is_there(console, ctranslate.PEER, "ctranslate2"):
            yield from ctranslate.rows(size, limits, place)


def is_there(console: Console, name: str, *packages: str) -> bool:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        console.print(f"No rows of {name}: {', '.join(missing)} missing (pip install 'blockformer\\[peers]').")
    return not missing


# llama.cpp


def _llama_rows(size, limits, console: Console, folder: Path) -> Iterator[Row]:
    """In bfloat16, and in 4 bits with its own choice of head (6 bits) and with ours (bfloat16)."""
    shape, threads = size.decoder, torch.get_num_threads()
    contexts = [context for context in CONTEXTS if context <= max(context for context, _ in size.decodes)]
    prefills = [length for length in PREFILLS if length <= max(size.prefills)] or size.prefills
    room = max(*contexts, *prefills, 24) + size.tokens + 1
    path, low_path = folder / "plain.gguf", folder / "low.gguf"

    ours, official = workloads.make_pair(shape, torch.bfloat16)
    config, entries = ours.config, official.config.to_dict()
    gguf_model.write(path, entries, official.state_dict())
    ours.prepare_for_inference()
    work = _Work(shape, contexts, prefills, size, limits, console)
    yield from work.beside(ours, gguf_model.GgufModel(path, room, threads), "bfloat16", "llama.cpp")
    del ours

    ours, weights = _in_four_bits(config, official)
    del official
    gguf_model.write(path, entries, weights)
    del weights
    for peer, bfloat16_head in (("llama.cpp Q4_0, head bfloat16", True), ("llama.cpp Q4_0", False)):
        ours.prepare_for_inference()
        gguf_model.quantize(path, low_path, threads, bfloat16_head)
        yield from work.beside(ours, gguf_model.GgufModel(low_path, room, threads), "int4", peer)
    path.unlink()
    low_path.unlink()


@torch.no_grad()
def _in_four_bits(config, official) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Ours with the layers' matrices rounded as Q4_0 rounds, and the same weights in float32, by official names.

    Q4_0 rounds these to themselves: the same integers and scales on both sides.
    """
    from blockformer.model.awq_linear import QuantizedLinear

    low = {**config.to_dict(), "linear_bits": 4, "linear_group_size": GROUP}
    ours = blockformer.BlockformerDecoderForCausalLM(type(config).from_dict(low)).to(torch.bfloat16).eval()
    state = dict(official.state_dict())
    weights = {name: weight.float() for name, weight in state.items()}
    for name, module in ours.named_modules():
        if isinstance(module, QuantizedLinear):
            numbers, scales = round_weight(weights[f"{name}.weight"])
            weights[f"{name}.weight"] = ((numbers - 8) * scales[..., None].float()).flatten(1)
            del state[f"{name}.weight"]
            state[f"{name}.qweight"] = workloads.pack(numbers.flatten(1).t())
            state[f"{name}.scales"] = scales.t().contiguous()
            state[f"{name}.qzeros"] = workloads.pack(torch.full_like(scales.t(), 8))
    ours.load_state_dict({workloads.our_name(name): tensor for name, tensor in state.items()})
    return ours, weights


def round_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix [O, I] as integers from 0 to 15, [O, I / 32, 32], and float16 scales [O, I / 32]; 8 stands for zero."""
    groups = weight.unflatten(1, (-1, GROUP))
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))  # with its sign: the one that -8 stands for
    scales = (largest / -8).half().float()
    numbers = torch.where(scales == 0, 8.0, groups / scales + 8).round().clamp(0, 15)
    return numbers, scales.squeeze(-1).half()


@dataclass
class _Work:
    """What is timed against llama.cpp: decoding after each context and prefill of each length."""

    shape: Shape
    contexts: list[int]
    prefills: list[int]
    size: object
    limits: object
    console: Console

    def beside(self, ours, theirs: gguf_model.GgufModel, dtype: str, peer: str) -> Iterator[Row]:
        shape = self.shape
        self.console.print(f"{shape.name}: {dtype}, compared with {peer}")
        self._check_same(ours, theirs, peer)
        yield from self._decoding("decode, prepared", ours, theirs, dtype, peer)
        for length in self.prefills:
            ids = self._prompt(length)
            times = interleaved(
                _timed(lambda ids=ids: _prefill(ours, ids)),
                _timed(lambda ids=ids: (theirs.forget(), theirs.feed(ids[0].tolist()))),
                self.size.rounds,
            )
            products = 2 * self._layer_weights() * length
            scores = 2 * shape.layers * shape.heads * shape.head_dim * length**2
            limit = (products + scores) / (self.limits.gemm_gflops["bfloat16"] * 1e9)
            yield make_row(shape.name, "prefill, prepared", dtype, length, 1, times, limit, peer=peer)
        workloads.compiled((ours, None))
        yield from self._decoding("decode, compiled", ours, theirs, dtype, peer)
        theirs.close()

    def _decoding(self, work: str, ours, theirs: gguf_model.GgufModel, dtype: str, peer: str) -> Iterator[Row]:
        for context in self.contexts:
            ids = self._prompt(context)
            theirs.forget()
            theirs.feed(ids[0].tolist())
            times = interleaved(
                workloads.decoding(ours, ids, self.size.tokens),
                lambda context=context: _llama_steps(theirs, context, self.size.tokens),
                self.size.rounds,
            )
            limit = self._bytes_of_a_token(dtype, context) / (self.limits.read_gbs * 1e9)
            yield make_row(self.shape.name, work, dtype, context, 1, times, limit, peer=peer)

    def _prompt(self, length: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(length)
        return torch.randint(0, self.shape.vocab_size, (1, length), generator=generator)

    @torch.no_grad()
    def _check_same(self, ours, theirs: gguf_model.GgufModel, peer: str) -> None:
        if peer == "llama.cpp Q4_0":  # it rounds the head, too
            return
        ids = self._prompt(24)
        theirs.forget()
        found = torch.from_numpy(theirs.feed(ids[0].tolist()).copy())
        check_same(f"{self.shape.name} in {peer}", torch.bfloat16, [ours(ids).logits[0, -1], found])

    def _layer_weights(self) -> int:
        shape = self.shape
        attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
        return shape.layers * shape.hidden_size * (attention + 3 * shape.intermediate_size)

    def _bytes_of_a_token(self, dtype: str, context: int) -> float:
        """Weights and bfloat16 cache; of 4 bits with a scale of 2 bytes for each group."""
        shape = self.shape
        layers = self._layer_weights() * {"bfloat16": 2, "int4": 0.5 + 2 / GROUP}[dtype]
        cache = 4 * shape.layers * shape.kv_heads * shape.head_dim * (context + self.size.tokens / 2)
        return layers + 2 * shape.vocab_size * shape.hidden_size + cache


def _llama_steps(model: gguf_model.GgufModel, context: int, tokens: int) -> list[float]:
    """Seconds of each single-token step after the first `context` tokens, which the model holds."""
    model.forget(context)
    times, token = [], 1
    for _ in range(tokens - 1):
        start = time.perf_counter()
        token = int(model.feed([token]).argmax())
        times.append(time.perf_counter() - start)
    return times


@torch.no_grad()
def _prefill(model, ids) -> None:
    model(ids, logits_to_keep=1, use_cache=True)


def _timed(work: Callable[[], object]) -> Callable[[], list[float]]:
    def once() -> list[float]:
        start = time.perf_counter()
        work()
        return [time.perf_counter() - start]

    return once


# Encoders


def _encoder_rows(size, limits, console: Console, folder: Path, peer: str, dtypes: list[torch.dtype]) -> Iterator[Row]:
    """BERT by how full its batch is; the peer runs the export of transformers' own BERT."""
    ours, official = seq2seq.make_bert(size.layers)
    path = folder / "bert.onnx"
    if not path.exists():
        export(official, path)
    for dtype in dtypes:
        console.print(f"BERT, {size.layers} layers: {dtype}, compared with {peer}")
        ours.prepare_for_training()
        ours.to(dtype)
        ours.prepare_for_inference()
        session = onnx_runtime(path) if peer == "ONNX Runtime" else openvino_model(path, dtype)
        for fill in seq2seq.FILLS:
            pair = (ours, Exported(session))
            row = seq2seq.encode(pair, "BERT-base width", fill, size.rounds, limits.gemm_gflops, ", prepared")
            yield replace(row, peer=peer)
        del session


class Exported:
    """An exported encoder, called as a model is."""

    def __init__(self, run: Callable[[dict[str, np.ndarray]], np.ndarray]):
        self._run = run

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor):
        from transformers.modeling_outputs import BaseModelOutput

        states = self._run({"input_ids": input_ids.numpy(), "attention_mask": attention_mask.numpy()})
        return BaseModelOutput(last_hidden_state=torch.from_numpy(states))


def export(model: torch.nn.Module, path: Path, any_size: bool = False, dynamo: bool = True) -> None:
    """Write an encoder for batches of the benchmark's shape, or of any, as an ONNX file.

    Args:
        dynamo: False takes PyTorch's older exporter, which needs eager attention; the model keeps it.
    """

    class States(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids, attention_mask):
            return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    ids = torch.ones(seq2seq.ROWS, seq2seq.LENGTH, dtype=torch.long)
    mask = ids.clone()
    mask[0, -1] = 0  # an export that saw none could take the mask for needless
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    settings = {"input_names": ["input_ids", "attention_mask"], "output_names": ["states"], "verbose": False}
    with torch.no_grad():
        if any_size and dynamo:
            sizes = {0: torch.export.Dim("rows"), 1: torch.export.Dim("tokens")}
            settings["dynamic_shapes"] = {"input_ids": sizes, "attention_mask": sizes}
        elif any_size:
            names = ("input_ids", "attention_mask", "states")
            settings["dynamic_axes"] = {name: {0: "rows", 1: "tokens"} for name in names}
        if not dynamo:
            model.set_attn_implementation("eager")
        torch.onnx.export(States().eval(), (ids, mask), str(path), dynamo=dynamo, **settings)


def onnx_runtime(path: Path) -> Callable[[dict[str, np.ndarray]], np.ndarray]:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, inputs)[0]


def openvino_model(path: Path, dtype: torch.dtype) -> Callable[[dict[str, np.ndarray]], np.ndarray]:
    import openvino

    settings = {
        "INFERENCE_PRECISION_HINT": {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype],
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
    }
    model = openvino.Core().compile_model(str(path), "CPU", settings)
    return lambda inputs: model(inputs)[0].astype(np.float32)
