"""How much of everything the benchmark runs: in short, in full, or in shapes of no interest."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import workloads

GPT2 = workloads.Shape(
    "GPT-2", layers=12, vocab_size=50257, hidden_size=768, heads=12, kv_heads=12, head_dim=64, family="gpt2"
)


@dataclass(frozen=True)
class Size:
    """How much of everything is run.

    Attributes:
        gemma: a decoder with windows in most layers; `experts` one with experts. Both have the first two of `decodes`.
        hybrids: decoders most of whose layers keep a state; they have the first two of `decodes`.
        small: a decoder whose weights take less time than what surrounds them.
        decodes: context and batch of each row of decoding, for `decoder`; `gpt2` has the first two, `small` the first.
        prefill: what is timed on whole prompts.
        prefills: lengths of the prompts.
        rounds, tokens: turns that count, and tokens that each turn of `generate()` writes.
        layers, text_tokens: of BERT and T5, and of what an encoder-decoder writes.
        encoder_layers: of ModernBERT, DeBERTa and MPNet.
        sentences: how many docstrings are embedded.
        int8_rounds: turns that count of each way to run an encoder in 8 bits.
        steps: rows and length of a training step, by dtype.
        step_rounds: turns of a training step that count, by dtype; in bfloat16 also of processes whose memory is taken.
        loads: small float32 checkpoints that are loaded.
        files: the bfloat16 checkpoint that is loaded and converted.
    """

    decoder: workloads.Shape
    small: workloads.Shape
    gpt2: workloads.Shape
    gemma: workloads.Shape
    experts: workloads.Shape
    hybrids: list[workloads.Shape]
    decodes: list[tuple[int, int]]
    prefill: workloads.Shape
    prefills: list[int]
    rounds: int
    tokens: int
    layers: int
    encoder_layers: int
    sentences: int
    int8_rounds: int
    text_tokens: int
    marian_vocab_size: int
    training: workloads.Shape
    steps: dict[torch.dtype, tuple[int, int]]
    step_rounds: dict[torch.dtype, int]
    loads: list[workloads.Shape]
    files: workloads.Shape
    file_rounds: int
    limits: dict[str, int]


SMALL_SIZES = {"vocab_size": 1000, "heads": 4, "kv_heads": 2}
LOADS = [
    workloads.Shape("2 layers x 64", layers=2, hidden_size=64, intermediate_size=256, head_dim=16, **SMALL_SIZES),
    workloads.Shape("48 layers x 128", layers=48, hidden_size=128, intermediate_size=512, head_dim=32, **SMALL_SIZES),
    GPT2,
]
STEPS = {torch.float32: (2, 512), torch.bfloat16: (6, 512)}
WHOLE = workloads.Shape("Qwen3-0.6B", layers=28, vocab_size=151936)
SMALL = workloads.Shape(
    "6 layers x 256",
    layers=6,
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=1024,
    heads=8,
    kv_heads=4,
    head_dim=32,
)
GEMMA_SIZES = {"hidden_size": 1152, "intermediate_size": 6912, "heads": 4, "kv_heads": 1, "head_dim": 256}
GEMMA = workloads.Shape("Gemma-3-1B", layers=26, vocab_size=262144, family="gemma3_text", **GEMMA_SIZES)
FEW_GEMMA = workloads.Shape("Gemma-3-1B width, 6 layers", 6, 32768, family="gemma3_text", **GEMMA_SIZES)
MOE_SIZES = {"hidden_size": 2048, "heads": 32, "kv_heads": 4, "family": "qwen3_moe"}
FEW_EXPERTS = workloads.Shape("Qwen3-30B-A3B width, 2 layers of 32 experts", 2, 32768, experts=32, **MOE_SIZES)
STATE_SIZES = {"layers": 4, "vocab_size": 32768, "head_dim": 256}
HYBRIDS = [
    workloads.Shape(
        "Qwen3.5-0.8B width, 4 layers",
        heads=8,
        kv_heads=2,
        intermediate_size=3584,
        family="qwen3_5_text",
        **STATE_SIZES,
    ),
    workloads.Shape(
        "Qwen3-Next width, 4 layers of 32 experts",
        hidden_size=2048,
        heads=16,
        kv_heads=2,
        family="qwen3_next",
        experts=32,
        **STATE_SIZES,
    ),
    workloads.Shape(
        "Mamba-2 of width 1,024, 4 layers",
        heads=8,
        kv_heads=2,
        intermediate_size=4096,
        family="bamba",
        **{**STATE_SIZES, "head_dim": 128},
    ),
    workloads.Shape(
        "LFM2-350M width, 4 layers",
        intermediate_size=6656,
        family="lfm2",
        **{**STATE_SIZES, "head_dim": 64},
    ),
]
EXPERTS = workloads.Shape("Qwen3-30B-A3B width, 4 layers of 128 experts", 4, 32768, experts=128, **MOE_SIZES)
SHORT = Size(
    decoder=WHOLE,
    small=SMALL,
    gpt2=GPT2,
    gemma=FEW_GEMMA,
    experts=FEW_EXPERTS,
    hybrids=HYBRIDS,
    decodes=[(16, 1), (512, 1), (2048, 1)],
    prefill=workloads.Shape("Qwen3-0.6B width, 6 layers", layers=6, vocab_size=32768),
    prefills=[512, 2048],
    rounds=5,
    tokens=12,
    layers=4,
    encoder_layers=8,
    sentences=1000,
    int8_rounds=30,
    text_tokens=24,
    marian_vocab_size=8192,
    training=workloads.Shape("Qwen3-0.6B width, 2 layers", layers=2, vocab_size=151936),
    steps=STEPS,
    step_rounds={torch.float32: 2, torch.bfloat16: 1},
    loads=LOADS,
    files=WHOLE,
    file_rounds=2,
    limits={},
)
FULL = replace(
    SHORT,
    gemma=GEMMA,
    experts=EXPERTS,
    decodes=[*SHORT.decodes, (8192, 1), (512, 8)],
    prefill=WHOLE,
    tokens=24,
    layers=12,
    encoder_layers=12,
    marian_vocab_size=58101,
    training=WHOLE,
    step_rounds={torch.float32: 3, torch.bfloat16: 2},
    file_rounds=5,
)
TINY_SIZES = {"layers": 1, "vocab_size": 512, "hidden_size": 64, "heads": 4, "head_dim": 16}
TINY_DECODER = workloads.Shape("Tiny", kv_heads=2, intermediate_size=128, **TINY_SIZES)
TINY_GPT2 = workloads.Shape("Tiny GPT-2", kv_heads=4, intermediate_size=128, family="gpt2", **TINY_SIZES)
TINY_GEMMA = workloads.Shape("Tiny Gemma", kv_heads=2, intermediate_size=128, family="gemma3_text", **TINY_SIZES)
TINY_EXPERTS = workloads.Shape("Tiny experts", kv_heads=2, family="qwen3_moe", experts=4, **TINY_SIZES)
TINY_HYBRID = workloads.Shape(
    "Tiny hybrid", kv_heads=2, intermediate_size=128, family="qwen3_5_text", **{**TINY_SIZES, "layers": 4}
)
TINY = Size(
    decoder=TINY_DECODER,
    small=TINY_DECODER,
    gpt2=TINY_GPT2,
    gemma=TINY_GEMMA,
    experts=TINY_EXPERTS,
    hybrids=[TINY_HYBRID],
    decodes=[(16, 1), (16, 2)],
    prefill=TINY_DECODER,
    prefills=[16],
    rounds=1,
    tokens=3,
    layers=1,
    encoder_layers=2,
    sentences=8,
    int8_rounds=1,
    text_tokens=3,
    marian_vocab_size=512,
    training=TINY_DECODER,
    steps={torch.float32: (2, 16), torch.bfloat16: (2, 16)},
    step_rounds={torch.float32: 1, torch.bfloat16: 1},
    loads=[TINY_GPT2],
    files=TINY_DECODER,
    file_rounds=1,
    limits={"size": 64, "read_bytes": 2**20},
)
