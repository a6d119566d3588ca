"""Encoders by how full a padded batch is, and encoder-decoders, against transformers on the same weights."""

from __future__ import annotations

import time

import torch
from transformers import (
    BertConfig,
    BertModel,
    DebertaV2Config,
    DebertaV2Model,
    MarianConfig,
    MarianMTModel,
    ModernBertConfig,
    ModernBertModel,
    MPNetConfig,
    MPNetModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from workloads import PEER_COMPILED, Row, check_same, compiled_by_transformers, converted, interleaved, make_row

ROWS, LENGTH = 16, 128
FILLS = {0.41: (8, 97), 0.71: (54, 128), 1.0: (128, 128)}
"""Share of real tokens in a batch -> the shortest and the longest of its evenly spread rows."""


def make_bert(layers: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Ours and transformers' BERT of base width, float32, evaluation mode."""
    torch.manual_seed(0)
    return converted(BertModel(BertConfig(num_hidden_layers=layers, vocab_size=8192), add_pooling_layer=False))


def make_modernbert(layers: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Ours and transformers' ModernBERT of base width: windows of 128 tokens in two layers of three."""
    torch.manual_seed(0)
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    return converted(ModernBertModel(ModernBertConfig(num_hidden_layers=layers, vocab_size=8192, **tokens)))


def make_deberta(layers: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Ours and transformers' DeBERTa-v3 of base width."""
    torch.manual_seed(0)
    distances = {"relative_attention": True, "position_buckets": 256, "max_relative_positions": -1}
    distances |= {"share_att_key": True, "norm_rel_ebd": "layer_norm", "pos_att_type": ["p2c", "c2p"]}
    sizes = {"num_hidden_layers": layers, "vocab_size": 8192, "type_vocab_size": 0, "position_biased_input": False}
    return converted(DebertaV2Model(DebertaV2Config(hidden_size=768, intermediate_size=3072, **sizes, **distances)))


def make_mpnet(layers: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Ours and transformers' MPNet of base width."""
    torch.manual_seed(0)
    return converted(MPNetModel(MPNetConfig(num_hidden_layers=layers, vocab_size=8192), add_pooling_layer=False))


ENCODERS = {"ModernBERT-base width": make_modernbert, "DeBERTa-v3-base width": make_deberta}
ENCODERS |= {"MPNet-base width": make_mpnet}


def make_t5(layers: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Ours and transformers' T5 of base width, float32, evaluation mode."""
    torch.manual_seed(0)
    sizes = {"d_model": 768, "d_ff": 3072, "num_layers": layers, "num_heads": 12, "vocab_size": 8192}
    return converted(T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, initializer_factor=0.2)))


def make_marian(vocab_size: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Ours and transformers' Marian of the original Transformer's base shape, float32, evaluation mode."""
    torch.manual_seed(0)
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {"layers": 6, "ffn_dim": 2048, "attention_heads": 8}.items()
    }
    last = vocab_size - 1
    tokens = {"pad_token_id": last, "decoder_start_token_id": last, "eos_token_id": 0, "forced_eos_token_id": 0}
    settings = {"d_model": 512, "activation_function": "swish", "scale_embedding": True, "vocab_size": vocab_size}
    return converted(MarianMTModel(MarianConfig(**sides, **tokens, **settings)))


def padding(fill: float) -> torch.Tensor:
    """A mask int64 [16, 128] of which that share is real, see `FILLS`."""
    lengths = torch.linspace(*FILLS[fill], ROWS).round()
    return (torch.arange(LENGTH)[None] < lengths[:, None]).long()


@torch.inference_mode()
def encode(pair, name: str, fill: float, rounds: int, gemm_gflops: dict[str, float], state: str = "") -> Row:
    """One forward pass of two encoders over a padded batch of 16 rows of 128.

    Raises:
        RuntimeError: the models do not compute the same, so that timing them would compare nothing.
    """
    ours, peer = pair
    mask = padding(fill)
    ids = torch.randint(5, ours.config.vocab_size, (ROWS, LENGTH))
    states = [model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()].float() for model in pair]
    error = (states[0] - states[1]).abs().max().item()
    if error > (1e-4 if ours.dtype == torch.float32 else 0.3):
        raise RuntimeError(f"states differ by {error:.2g}; nothing is timed")

    def once(model: PreTrainedModel) -> list[float]:
        start = time.perf_counter()
        model(input_ids=ids, attention_mask=mask)
        return [time.perf_counter() - start]

    times = interleaved(lambda: once(ours), lambda: once(peer), rounds)
    config = ours.config
    # Packed weights are not parameters, so the peer's are counted; an export has the plain model's.
    counted = peer if isinstance(peer, torch.nn.Module) else ours
    layers = getattr(counted, "encoder", counted)
    weights = sum(parameter.numel() for name, parameter in layers.named_parameters() if "embed" not in name)
    scores = 4 * config.num_hidden_layers * config.hidden_size * (mask.sum(1) ** 2).sum().item()
    work = 2 * weights * mask.sum().item() + scores
    limit = work / (gemm_gflops[str(ours.dtype).removeprefix("torch.")] * 1e9)
    name = f"{name}, {config.num_hidden_layers} layers"
    return make_row(name, f"encoder, {fill:.0%} full{state}", ours.dtype, LENGTH, ROWS, times, limit)


@torch.inference_mode()
def write(
    pair,
    name: str,
    beams: int,
    rounds: int,
    tokens: int,
    read_gbs: float,
    state: str = "",
    against: str = "transformers",
) -> Row:
    """Generate from a batch of 4 rows of 64, greedily or with beams; seconds a token, the encoder included.

    Args:
        against: the row's peer.

    Raises:
        RuntimeError: the models do not compute the same, so that timing them would compare nothing.
    """
    ours, peer = pair
    ids = torch.randint(5, ours.config.vocab_size - 1, (4, 64))  # the last may be the padding token
    check_same(name, ours.dtype, [model(input_ids=ids, decoder_input_ids=ids[:, :24]).logits for model in pair])
    arguments = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "num_beams": beams}

    theirs = arguments | (compiled_by_transformers(tokens) if against == PEER_COMPILED else {})

    def once(model: PreTrainedModel, arguments: dict[str, object]) -> list[float]:
        start = time.perf_counter()
        model.generate(ids, **arguments)
        return [(time.perf_counter() - start) / tokens]

    times = interleaved(lambda: once(ours, arguments), lambda: once(peer, theirs), rounds)
    item = next(ours.parameters()).element_size()
    weights = sum(parameter.numel() for parameter in [*ours.model.decoder.layers.parameters(), ours.lm_head.weight])
    name = f"{name}, {ours.config.num_hidden_layers} + {ours.config.decoder_layers} layers"
    work = ("greedy" if beams == 1 else f"beam {beams}") + state
    return make_row(name, work, ours.dtype, 64, 4, times, weights * item / (read_gbs * 1e9), peer=against)
