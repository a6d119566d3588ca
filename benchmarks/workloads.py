"""Pairs of models with the same weights, and the work that both are timed on, turn by turn."""

from __future__ import annotations

import copy
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    CompileConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.generation import StoppingCriteria, StoppingCriteriaList

import blockformer
from blockformer.model.awq_linear import SHIFTS, QuantizedLinear


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, the head tied to the embeddings, as Qwen3-0.6B has them by default; the weights are random.

    Attributes:
        family: whose layers it has, a key of `_MAKERS`.
        experts: how many a layer has, of which a token passes through 8; their width is 768.
    """

    name: str
    layers: int
    vocab_size: int
    hidden_size: int = 1024
    intermediate_size: int = 3072
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    family: str = "qwen3"
    experts: int = 0


@dataclass(frozen=True)
class Row:
    """One comparison; in seconds, or in bytes where it is of memory; ratio = the peer's / ours.

    Attributes:
        context, batch: 0 where the work has none.
        limit: what bandwidth, arithmetic or the tensors themselves need at least; 0 where none is known.
        unit: "seconds" or "bytes".
        peer: the other side of the comparison.
        ratio_min, ratio_median: of the best and of the median measurements.
    """

    shape: str
    work: str
    dtype: str
    context: int
    batch: int
    ours_min: float
    ours_median: float
    peer_min: float
    peer_median: float
    limit: float
    unit: str = "seconds"
    peer: str = "transformers"

    @property
    def ratio_min(self) -> float:
        return self.peer_min / self.ours_min

    @property
    def ratio_median(self) -> float:
        return self.peer_median / self.ours_median


def make_row(
    shape: str, work: str, dtype: torch.dtype, context: int, batch: int, measured, limit: float, **more: str
) -> Row:
    """A row of what was measured of (ours, the peer); `more` are its unit and peer."""
    mine, theirs = measured
    return Row(
        shape, work, str(dtype).removeprefix("torch."), context, batch,
        min(mine), statistics.median(mine), min(theirs), statistics.median(theirs), limit, **more,
    )  # fmt: skip


def make_pair(shape: Shape, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Our model and transformers' own with the same weights; both in eval mode.

    Raises:
        RuntimeError: they do not compute the same, so that timing them would compare nothing.
    """
    torch.manual_seed(0)
    pair = _MAKERS[shape.family](shape, dtype)
    ids = torch.randint(0, shape.vocab_size, (1, 24))
    check_same(shape.name, dtype, [model(ids).logits for model in pair])
    return pair


def _sizes(shape: Shape) -> dict[str, object]:
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    }


def _qwen3(shape: Shape, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel]:
    sizes = _sizes(shape)
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
    ours = blockformer.BlockformerDecoderForCausalLM(blockformer.preset("qwen3", **sizes)).to(dtype).eval()
    peer = Qwen3ForCausalLM(Qwen3Config(**sizes, rope_parameters=rope)).to(dtype).eval()
    peer.load_state_dict({official_name(name): tensor for name, tensor in ours.state_dict().items()})
    return ours, peer


def official_name(name: str) -> str:
    """Transformers' name of a tensor of Qwen3: the norms of a layer are called otherwise."""
    return name.replace("self_attn_pre_norm", "input_layernorm").replace("mlp_pre_norm", "post_attention_layernorm")


def our_name(name: str) -> str:
    """The way back of `official_name`."""
    return name.replace("input_layernorm", "self_attn_pre_norm").replace("post_attention_layernorm", "mlp_pre_norm")


def _gpt2(shape: Shape, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel]:
    config = GPT2Config(
        vocab_size=shape.vocab_size,
        n_embd=shape.hidden_size,
        n_inner=shape.intermediate_size,
        n_layer=shape.layers,
        n_head=shape.heads,
    )
    return converted(GPT2LMHeadModel(config).to(dtype))


def _qwen3_moe(shape: Shape, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel]:
    experts = {"num_experts": shape.experts, "num_experts_per_tok": min(8, shape.experts), "norm_topk_prob": True}
    config = Qwen3MoeConfig(**_sizes(shape), **experts, moe_intermediate_size=768)
    return converted(Qwen3MoeForCausalLM(config).to(dtype))


def _gemma3(shape: Shape, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel]:
    return converted(Gemma3ForCausalLM(Gemma3TextConfig(**_sizes(shape))).to(dtype))


def _states(shape: Shape) -> dict[str, object]:
    """Layers with a state, a key head for every two value heads; every fourth layer has keys."""
    sizes = {"linear_num_key_heads": shape.heads, "linear_num_value_heads": 2 * shape.heads}
    return {**_sizes(shape), **sizes, "linear_key_head_dim": 128, "linear_value_head_dim": 128}


def _qwen3_5(shape: Shape, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel]:
    return converted(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_states(shape))).to(dtype))


def _qwen3_next(shape: Shape, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel]:
    experts = {"num_experts": shape.experts, "num_experts_per_tok": min(8, shape.experts), "norm_topk_prob": True}
    experts |= {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
    return converted(Qwen3NextForCausalLM(Qwen3NextConfig(**_states(shape), **experts)).to(dtype))


def _bamba(shape: Shape, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel]:
    """State spaces of twice the width; the third layer of each four has keys."""
    heads = {"mamba_n_heads": 2 * shape.hidden_size // 64, "mamba_d_head": 64, "mamba_d_state": 128}
    heads["attn_layer_indices"] = list(range(2, shape.layers, 4))
    return converted(BambaForCausalLM(BambaConfig(**_sizes(shape), **heads)).to(dtype))


def _lfm2(shape: Shape, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel]:
    kinds = ["full_attention" if layer % 4 == 2 else "conv" for layer in range(shape.layers)]
    return converted(Lfm2ForCausalLM(Lfm2Config(**_sizes(shape), layer_types=kinds)).to(dtype))


_MAKERS = {
    "bamba": _bamba,
    "lfm2": _lfm2,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "qwen3_moe": _qwen3_moe,
    "gemma3_text": _gemma3,
    "qwen3_5_text": _qwen3_5,
    "qwen3_next": _qwen3_next,
}


def converted(peer: PreTrainedModel) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model of transformers, converted, and itself; both in eval mode."""
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        return blockformer.from_official(folder), peer.eval()


@torch.no_grad()
def check_same(name: str, dtype: torch.dtype, logits: list[torch.Tensor]) -> None:
    """Compare the logits of two models.

    Raises:
        RuntimeError: they differ by more than rounding.
    """
    left, right = (tensor.float() for tensor in logits)
    error = ((left - right).abs().max() / right.abs().max()).item()
    if error > (1e-5 if dtype == torch.float32 else 0.05):
        raise RuntimeError(f"{name} in {dtype}: logits differ by {error:.2g} of the largest; nothing is timed")


class _Clock(StoppingCriteria):
    """Never stops `generate`, but notes when each token is there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def decoding(model: PreTrainedModel, ids: torch.Tensor, tokens: int) -> Callable[[], list[float]]:
    """What writes `tokens` tokens by `generate()` after the prompt `ids` [B, T]: seconds of each but the first.

    The prompt's keys and values are computed once, here, and used again by every call; states, which cannot be taken
    back, from a copy.
    """
    with torch.no_grad():
        read = model(ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
    length = read.get_seq_length()
    has_states = any(hasattr(layer, "recurrent_states") for layer in read.layers)
    count = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens}

    def once() -> list[float]:
        clock = _Clock()
        cache = copy.deepcopy(read) if has_states else read
        if cache.get_seq_length() > length:
            cache.crop(length - cache.get_seq_length())
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            stopping_criteria=StoppingCriteriaList([clock]),
            **count,
        )
        return [later - earlier for earlier, later in itertools.pairwise(clock.times)]

    return once


PEER_COMPILED = "transformers, compiled"
"""The peer's name where its own step is compiled, over a static cache."""


def compiled_by_transformers(tokens: int) -> dict[str, object]:
    """What `generate()` of transformers takes for this: by default it compiles on GPUs only."""
    how = CompileConfig(mode="default")
    how._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": how, "max_new_tokens": tokens, "min_new_tokens": tokens}


def decoding_compiled(peer: PreTrainedModel, ids: torch.Tensor, tokens: int) -> Callable[[], list[float]]:
    """As `decoding`, by the step that transformers compiles; each call reads the prompt again, which is not counted."""

    def once() -> list[float]:
        clock = _Clock()
        peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([clock]),
            **compiled_by_transformers(tokens),
        )
        return [later - earlier for earlier, later in itertools.pairwise(clock.times)]

    return once


def interleaved(
    ours: Callable[[], list[float]], peer: Callable[[], list[float]], rounds: int, warm_up: bool = True
) -> tuple[list[float], list[float]]:
    """Time two pieces of work turn by turn, so that a disturbance meets both; one warm-up each."""
    mine, theirs = list[float](), list[float]()
    if warm_up:
        ours(), peer()
    for number in range(rounds):
        for work, times in ((ours, mine), (peer, theirs))[:: 1 if number % 2 else -1]:
            times += work()
    return mine, theirs


def prepared(pair) -> None:
    """Prepare ours for inference."""
    ours, _ = pair
    ours.prepare_for_inference()


def compiled(pair) -> None:
    """Prepare ours for inference with compiled steps."""
    ours, _ = pair
    ours.prepare_for_inference(compile=True)


def pack(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers from 0 to 15, [R, O] of any dtype -> AWQ's words, int32 [R, O / 8]."""
    pairs = numbers.to(torch.int32).unflatten(-1, (-1, 4, 2))
    shifts = torch.tensor(SHIFTS, dtype=torch.int32, device=numbers.device)
    return ((pairs[..., 0] | (pairs[..., 1] << 16)) << shifts).sum(-1, dtype=torch.int32)


@torch.no_grad()
def in_four_bits(pair, shape: Shape) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Ours with the layers' matrices rounded to 4 bits, in groups as AWQ has them; the peer gets the rounded ones.

    Raises:
        RuntimeError: they do not compute the same.
    """
    ours, peer = pair
    group = min(128, shape.hidden_size)
    config = type(ours.config).from_dict({**ours.config.to_dict(), "linear_bits": 4, "linear_group_size": group})
    low = type(ours)(config).to(peer.dtype).eval()
    theirs = peer.state_dict()
    state = {name: theirs[official_name(name)] for name in ours.state_dict()}
    for name, module in low.named_modules():
        if isinstance(module, QuantizedLinear):
            groups = state.pop(f"{name}.weight").float().t().unflatten(0, (-1, group))  # [I / G, G, O]
            least, largest = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
            scales = ((largest - least) / 15).half()
            zeros = (-least / scales).round()
            numbers = (groups / scales[:, None] + zeros[:, None]).round().clamp(0, 15)
            state[f"{name}.qweight"], state[f"{name}.qzeros"] = pack(numbers.flatten(0, 1)), pack(zeros)
            state[f"{name}.scales"] = scales
    low.load_state_dict(state)
    for name, module in low.named_modules():
        if isinstance(module, QuantizedLinear):
            peer.get_parameter(f"{name}.weight").copy_(module.dequantized(torch.float32).t())
    ids = torch.randint(0, shape.vocab_size, (1, 24))
    check_same(f"{shape.name} in 4 bits", peer.dtype, [model(ids).logits for model in (low, peer)])
    return low.prepare_for_inference(), peer


def weight_bytes(pair) -> int:
    """Bytes that a token reads of our weights; packed ones count as the peer's."""
    ours, peer = pair
    low = {name: module for name, module in ours.named_modules() if isinstance(module, QuantizedLinear)}
    plain = (
        value.nbytes * _used(peer, name)
        for name, value in peer.named_parameters()
        if name.removesuffix(".weight") not in low
    )
    return round(sum(plain)) + sum(value.nbytes for module in low.values() for value in module.buffers())


def _used(peer: PreTrainedModel, name: str) -> float:
    """The share of a parameter that one token uses: of the experts only the chosen ones."""
    is_expert = ".experts." in name
    return peer.config.num_experts_per_tok / peer.config.num_experts if is_expert else 1.0


def decode(
    pair,
    shape: Shape,
    context: int,
    batch: int,
    rounds: int,
    tokens: int,
    read_gbs: float,
    work: str = "decode",
    against: str = "transformers",
) -> Row:
    """Decoding `tokens` tokens after a prompt, by `generate()`; `against` is the row's peer."""
    ours, peer = pair
    ids = torch.randint(0, shape.vocab_size, (batch, context))
    theirs = decoding_compiled if against == PEER_COMPILED else decoding
    times = interleaved(decoding(ours, ids, tokens), theirs(peer, ids, tokens), rounds)
    cache = 2 * shape.layers * shape.kv_heads * shape.head_dim * (context + tokens / 2) * batch * peer.dtype.itemsize
    limit = (weight_bytes(pair) + cache) / (read_gbs * 1e9)
    return make_row(shape.name, work, peer.dtype, context, batch, times, limit, peer=against)


@torch.no_grad()
def prefill(pair, shape: Shape, context: int, rounds: int, gemm_gflops: dict[str, float], work: str = "prefill") -> Row:
    """One forward pass over a prompt, logits of the last position only, the cache filled."""
    ids = torch.randint(0, shape.vocab_size, (1, context))

    def once(model: PreTrainedModel) -> list[float]:
        start = time.perf_counter()
        model(ids, logits_to_keep=1, use_cache=True)
        return [time.perf_counter() - start]

    ours, peer = pair
    times = interleaved(lambda: once(ours), lambda: once(peer), rounds)
    layers = sum(value.numel() * _used(peer, name) for name, value in peer.named_parameters())
    layers -= peer.get_input_embeddings().weight.numel()
    # products with the weights, and the causal half of scores and weighted sum
    operations = 2 * layers * context + 2 * shape.layers * shape.heads * shape.head_dim * context**2
    limit = operations / (gemm_gflops[str(peer.dtype).removeprefix("torch.")] * 1e9)
    return make_row(shape.name, work, peer.dtype, context, 1, times, limit)
