"""What `gpu.py` times: encoders, prompts, training steps and tokens, both libraries taking turns."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import transformers
from gpu_models import converted, project

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Time:
    """A piece of work, in milliseconds or megabytes: the best and the median, ours and transformers'."""

    work: str
    dtype: str
    unit: str
    ours: tuple[float, float]
    theirs: tuple[float, float]
    note: str = ""

    @property
    def ratio(self) -> float:
        return self.theirs[1] / self.ours[1]


def interleaved(ours: Callable[[], list[float]], theirs: Callable[[], list[float]], rounds: int):
    """Best and median of both, taking turns; one warm-up each."""
    times: tuple[list[float], list[float]] = ([], [])
    ours(), theirs()
    for number in range(rounds):
        for index in (0, 1) if number % 2 else (1, 0):
            times[index].extend((ours, theirs)[index]())
    return [(min(each), statistics.median(each)) for each in times]


def _timed(work: Callable[[], object]) -> Callable[[], list[float]]:
    def once() -> list[float]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return [1e3 * (time.perf_counter() - start)]

    return once


def encoders(tiny: bool) -> Iterator[Time]:
    """BERT-base by how full a batch is."""
    layers = 2 if tiny else 12
    torch.manual_seed(0)
    peer = transformers.BertModel(transformers.BertConfig(num_hidden_layers=layers), add_pooling_layer=False).eval()
    ours = converted(peer).eval()
    for label, dtype in DTYPES.items():
        ours, peer = ours.to("cuda", dtype), peer.to("cuda", dtype)
        ours.prepare_for_inference()
        for rows, length in ((4, 64),) if tiny else ((32, 128), (64, 256), (64, 512)):
            for fill in (0.4, 0.7, 1.0):
                ids = torch.randint(1000, 20000, (rows, length), device="cuda")
                ends = [round(length * min(1.0, fill * (0.5 + each / (rows - 1)))) for each in range(rows)]
                ends = [length] * rows if fill == 1 else ends
                mask = (torch.arange(length)[None] < torch.tensor(ends)[:, None]).long().cuda()
                works = [_timed(lambda m=model, i=ids, k=mask: _reading(m, i, k)) for model in (ours, peer)]
                share = f"{mask.float().mean().item():.0%}"
                yield Time(f"BERT-base, {rows} x {length}, {share} full", label, "ms", *interleaved(*works, 10))
        ours.prepare_for_training()


@torch.no_grad()
def _reading(model, ids, mask):
    return model(input_ids=ids, attention_mask=mask).last_hidden_state


def prompts(tiny: bool) -> Iterator[Time]:
    """A padded prompt of Qwen3-0.6B's shape, and a long one of Gemma 2's with soft caps."""
    rows, length = (4, 64) if tiny else (16, 1024)
    theirs = transformers.Qwen3ForCausalLM(_qwen3(2 if tiny else 28, 1000)).eval()
    mask = (torch.arange(length)[None] >= torch.linspace(0, 0.9 * length, rows)[:, None]).long().cuda()
    share = f"{mask.float().mean().item():.0%}"
    yield from _prompt(theirs, mask, f"Qwen3-0.6B, a prompt of {rows} x {length}, {share} full")
    layers, length = (2, 64) if tiny else (8, 8192)
    sizes = {"num_hidden_layers": layers, "vocab_size": 1000, "max_position_embeddings": length}
    config = transformers.Gemma2Config(**sizes, attn_implementation="eager")  # see `official_models`
    theirs = transformers.Gemma2ForCausalLM(config).eval()
    mask = torch.ones(1, length, dtype=torch.long, device="cuda")
    yield from _prompt(theirs, mask, f"Gemma 2 2B width, {layers} layers, a prompt of 1 x {length}")


def _prompt(theirs, mask, name: str) -> Iterator[Time]:
    """With the memory that it holds beyond the weights."""
    ours = converted(theirs).to("cuda", torch.bfloat16).eval().prepare_for_inference()
    theirs = theirs.to("cuda", torch.bfloat16)
    ids = torch.randint(3, 1000, mask.shape, device="cuda")

    @torch.no_grad()
    def read(model):
        model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1)

    works = [lambda model=model: read(model) for model in (ours, theirs)]
    yield Time(name, "bfloat16", "ms", *interleaved(*map(_timed, works), 5))
    yield Time(f"{name}, memory", "bfloat16", "MB", *map(_held, works))


def _held(work: Callable[[], object]) -> tuple[float, float]:
    """The most memory that a piece of work holds beyond what was there before, in megabytes."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return ((torch.cuda.max_memory_allocated() - before) / 1e6,) * 2


def _qwen3(layers: int, vocabulary: int):
    return transformers.Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        tie_word_embeddings=True, num_hidden_layers=layers, vocab_size=vocabulary,
    )  # fmt: skip


# Qwen3's shapes by the name of the size: width, inner width, heads, layers, and whether the head is the embeddings.
SHAPES = {"0.6B": (1024, 3072, 16, 28, True), "4B": (2560, 9728, 32, 36, True), "8B": (4096, 12288, 32, 36, False)}


def decoding(tiny: bool) -> Iterator[Time]:
    """Tokens of Qwen3's shapes and of encoder-decoders, ours compiled, transformers over a static cache or uncompiled.

    Whole calls of two lengths are timed; the difference is what the tokens cost, with all that the host does.
    """
    copy_rate = _copy_rate(tiny)
    yield Time("a copy in memory", "bfloat16", "GB/s", *2 * ((copy_rate, copy_rate),))
    for size in ("0.6B", "4B", "8B"):
        yield from _texts(size, ((1, 128),), copy_rate, tiny)
    yield from _translations(tiny)
    yield from _texts("0.6B", ((16, 2048), (1, 2048), (16, 128)), copy_rate, tiny)


def _texts(size: str, works, copy_rate: float, tiny: bool) -> Iterator[Time]:
    """Tokens of batches [rows, tokens of the prompt]."""
    theirs = _random(transformers.Qwen3ForCausalLM, _qwen3_of(size, tiny))
    ours = _same_weights(theirs).prepare_for_inference(compile=True)
    if size == "0.6B":
        theirs.generation_config.cache_implementation = "static"
    way = "compiled, against their static cache" if size == "0.6B" else "compiled, against eager"
    nbytes = sum(weight.nbytes for weight in theirs.parameters())
    for batch, context in works:
        ids = torch.randint(3, theirs.config.vocab_size, (batch, context), device="cuda")
        batches = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        both = [_writing(model, batches) for model in (ours, theirs)]
        found = interleaved(*both, 4)
        rate = nbytes / found[0][0] / 1e6
        note = f"weights at {rate:,.0f} GB/s, {rate / copy_rate:.0%} of the copy" if batch == 1 else ""
        yield Time(f"Qwen3-{size}, a token of {batch} x {context}, {way}", "bfloat16", "ms", *found, note)
    del ours, theirs
    gc.collect()
    torch.cuda.empty_cache()


def _translations(tiny: bool) -> Iterator[Time]:
    """Tokens of encoder-decoders."""
    sizes = {"num_layers": 2, "d_model": 64, "num_heads": 2, "d_ff": 64} if tiny else {
        "num_layers": 12, "d_model": 768, "num_heads": 12, "d_ff": 3072,
    }  # fmt: skip
    config = transformers.T5Config(**sizes, d_kv=sizes["d_model"] // sizes["num_heads"], decoder_start_token_id=0)
    theirs = _random(transformers.T5ForConditionalGeneration, config)
    ours = converted(theirs).to("cuda", torch.bfloat16).prepare_for_inference(compile=True)
    for batch, beams in ((1, 1), (16, 1), (1, 4), (16, 4)):
        ids = torch.randint(3, 1000, (batch, 64), device="cuda")
        batches = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "num_beams": beams}
        found = interleaved(*(_writing(model, batches) for model in (ours, theirs)), 3)
        work = f"T5-base, a token of {batch} sources of 64, {beams} beams, compiled, against eager"
        yield Time(work, "bfloat16", "ms", *found)


def hybrids(tiny: bool) -> Iterator[Time]:
    """Tokens and prompts of layers that keep a state, Qwen3.5-0.8B's and Bamba's widths, ours compiled."""
    yield from _hybrid("Qwen3.5-0.8B width, 12 layers", _qwen3_5(tiny), transformers.Qwen3_5ForCausalLM, tiny)
    yield from _hybrid("Bamba's width, 9 layers", _bamba(tiny), transformers.BambaForCausalLM, tiny)


def _hybrid(name: str, config, kind: type, tiny: bool) -> Iterator[Time]:
    theirs = _random(kind, config)
    ours = converted(theirs).to("cuda", torch.bfloat16).eval().prepare_for_inference(compile=True)
    ours.generation_config.eos_token_id = None
    ids = torch.randint(3, config.vocab_size, (1, 128), device="cuda")
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    found = interleaved(*(_writing(model, batch) for model in (ours, theirs)), 3)
    yield Time(f"{name}, a token of 1 x 128, compiled, against eager", "bfloat16", "ms", *found)
    for rows, length in ((2, 64),) if tiny else ((1, 2048), (8, 2048)):
        ids = torch.randint(3, config.vocab_size, (rows, length), device="cuda")
        works = [_timed(lambda m=model, i=ids: _prompted(m, i)) for model in (ours, theirs)]
        yield Time(f"{name}, a prompt of {rows} x {length}", "bfloat16", "ms", *interleaved(*works, 5))


@torch.no_grad()
def _prompted(model, ids):
    model(input_ids=ids, use_cache=True, logits_to_keep=1)


def _qwen3_5(tiny: bool):
    width, inner = (64, 96) if tiny else (1024, 3584)
    layers = 4 if tiny else 12
    types = ["linear_attention" if (index + 1) % 4 else "full_attention" for index in range(layers)]
    return transformers.Qwen3_5TextConfig(
        hidden_size=width, intermediate_size=inner, num_attention_heads=8, num_key_value_heads=2, head_dim=width // 4,
        linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=width // 8, num_hidden_layers=layers,
        linear_value_head_dim=width // 8, vocab_size=1000 if tiny else 151936, tie_word_embeddings=True,
        pad_token_id=0, layer_types=types,
    )  # fmt: skip


def _bamba(tiny: bool):
    width, inner = (64, 96) if tiny else (2048, 4096)
    layers = 3 if tiny else 9
    return transformers.BambaConfig(
        hidden_size=width, intermediate_size=inner, num_attention_heads=16, num_key_value_heads=4, mamba_d_state=128,
        mamba_n_heads=8 if tiny else 64, mamba_d_head=16 if tiny else 64, num_hidden_layers=layers, vocab_size=1000,
        attn_layer_indices=[layers // 2], pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip


def _random(kind: type, config):
    """A model of transformers' with random weights, made on the GPU."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = kind(config).eval()
        torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id = None
    return model


def _same_weights(theirs):
    """Ours of Qwen3's shape with the same weights, held once: only the norms have other names."""
    blockformer = project()
    sizes = theirs.config.to_dict()
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    names += ("num_hidden_layers", "vocab_size", "tie_word_embeddings")
    config = blockformer.preset("qwen3", **{name: sizes[name] for name in names})
    norms = {"input_layernorm": "self_attn_pre_norm", "post_attention_layernorm": "mlp_pre_norm"}
    weights = {}
    for name, weight in theirs.state_dict().items():
        for before, after in norms.items():
            name = name.replace(before, after)
        weights[name] = weight
    model = blockformer.BlockformerDecoderForCausalLM.from_pretrained(
        None, config=config, state_dict=weights, dtype=torch.bfloat16, device_map="cuda"
    ).eval()
    model.generation_config.eos_token_id = None
    return model


def _qwen3_of(size: str, tiny: bool):
    width, inner, heads, layers, is_tied = SHAPES[size]
    if tiny:
        width, inner, heads, layers = 64, 96, 2, 2
    return transformers.Qwen3Config(
        hidden_size=width, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=min(8, heads),
        head_dim=32 if tiny else 128, num_hidden_layers=layers, vocab_size=1000 if tiny else 151936,
        tie_word_embeddings=is_tied,
    )  # fmt: skip


def _copy_rate(tiny: bool) -> float:
    """GB/s that a copy within the GPU's memory reads and writes."""
    source = torch.empty(1 << (20 if tiny else 30), dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    times = [_timed(lambda: target.copy_(source))()[0] for _ in range(10)]
    return 2 * source.nbytes / min(times) / 1e6


def _writing(model, batch: dict, tokens: int = 64) -> Callable[[], list[float]]:
    """Milliseconds a token of a greedy text: of calls of two lengths the difference."""

    def call(count: int) -> float:
        return _timed(lambda: model.generate(**batch, do_sample=False, max_new_tokens=count, pad_token_id=0))()[0]

    def once() -> list[float]:
        short, long = (min(call(count) for _ in range(2)) for count in (8, 8 + tokens))
        return [(long - short) / tokens]

    return once


def training(tiny: bool) -> Iterator[Time]:
    """A step with a vocabulary of 151,936: its time, and the most memory that it holds beyond the weights."""
    rows, length = (2, 64) if tiny else (8, 1024)
    config = _qwen3(2 if tiny else 8, 151936)
    torch.manual_seed(0)
    peer = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    ours = converted(peer).to("cuda", torch.bfloat16).train().prepare_for_training()
    peer = peer.to("cuda").train()
    ids = torch.randint(3, config.vocab_size, (rows, length), device="cuda")

    def step(model):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    name = f"Qwen3 width, {config.num_hidden_layers} layers, a training step of {rows} x {length}"
    yield Time(name, "bfloat16", "ms", *interleaved(_timed(lambda: step(ours)), _timed(lambda: step(peer)), 5))
    yield Time(f"{name}, memory", "bfloat16", "MB", *(_held(lambda m=model: step(m)) for model in (ours, peer)))


WORKS: dict[str, Callable[[bool], Iterator[Time]]] = {
    "encoders": encoders, "prompts": prompts, "training": training, "decoding": decoding,
    "hybrids": hybrids,
}  # fmt: skip
