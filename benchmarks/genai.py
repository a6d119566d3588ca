"""ONNX Runtime GenAI compared with our compiled steps: decoding with the same random weights, in float32.

Its own builder makes the ONNX model of an official checkpoint, in a process of its own. It asks for a tokenizer, which
decoding has no use for; any will do.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import workloads
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from workloads import Row, check_same, interleaved, make_row

PEER = "ONNX Runtime GenAI"
CONTEXTS = [16, 512]


def rows(size, limits, folder: Path) -> Iterator[Row]:
    """Decoding one text with a small model, after a short and a longer prompt.

    Args:
        size: a `Size` of run.py.
        limits: the machine's.
        folder: where the exported files may lie for a while.
    """
    import onnxruntime_genai

    shape = size.small
    ours, official = workloads.make_pair(shape, torch.float32)
    model = onnxruntime_genai.Model(str(_build(official, folder)))
    ids = _prompt(shape, CONTEXTS[0])
    check_same(f"{shape.name} in {PEER}", torch.float32, [ours(ids).logits[0, -1], _generator(model, ids, 1)[1]])
    workloads.compiled((ours, official))
    for context in CONTEXTS:
        ids = _prompt(shape, context)
        times = interleaved(workloads.decoding(ours, ids, size.tokens), _decoding(model, ids, size.tokens), size.rounds)
        cache = 8 * shape.layers * shape.kv_heads * shape.head_dim * (context + size.tokens / 2)
        limit = (workloads.weight_bytes((ours, official)) + cache) / (limits.read_gbs * 1e9)
        yield make_row(shape.name, "decode, compiled", "float32", context, 1, times, limit, peer=PEER)


def _prompt(shape, length: int) -> torch.Tensor:
    return torch.randint(0, shape.vocab_size, (1, length), generator=torch.Generator().manual_seed(length))


def _build(official, folder: Path) -> Path:
    """The folder of the ONNX model of an official one, set to use as many threads as PyTorch does."""
    source, target = folder / "official", folder / "onnx"
    official.save_pretrained(source)
    words = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    names = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "a")
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(source)
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", source, "-o", target]
    options = ["-p", "fp32", "-e", "cpu", "-c", folder / "cache"]
    done = subprocess.run([*builder, *options], check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the builder of {PEER} failed:\n{done.stderr[-2000:]}")
    settings = json.loads((target / "genai_config.json").read_text())
    settings["model"]["decoder"]["session_options"]["intra_op_num_threads"] = torch.get_num_threads()
    (target / "genai_config.json").write_text(json.dumps(settings))
    return target


def _generator(model, ids: torch.Tensor, tokens: int):
    """A generator that has read a prompt [1, T], and the logits [V] after it."""
    import onnxruntime_genai

    options = onnxruntime_genai.GeneratorParams(model)
    length = ids.shape[1] + tokens
    options.set_search_options(max_length=length, min_length=length, do_sample=False)
    generator = onnxruntime_genai.Generator(model, options)
    generator.append_tokens(ids.numpy().astype(np.int32))
    return generator, torch.from_numpy(generator.get_logits())[0, -1]


def _decoding(model, ids: torch.Tensor, tokens: int) -> Callable[[], list[float]]:
    """What writes `tokens` tokens after a prompt: seconds of each but the first."""

    def once() -> list[float]:
        generator, _ = _generator(model, ids, tokens)
        generator.generate_next_token()
        times = []
        for _ in range(tokens - 1):
            start = time.perf_counter()
            generator.generate_next_token()
            times.append(time.perf_counter() - start)
        return times

    return once
