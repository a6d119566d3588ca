"""CTranslate2 compared with our compiled steps: a translator of Marian's base size, from the same weights.

CTranslate2's own converter reads a checkpoint's tokenizer, which writing has no use for; here tokens are numbers.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import seq2seq
import torch
import workloads
from workloads import Row, interleaved, make_row

PEER = "CTranslate2"
BATCHES = [(1, 1), (1, 4), (16, 1), (16, 4)]
"""Sentences, and beams of each."""
LENGTH = 40
_FIRST = 4  # tokens whose time is subtracted, with that of the encoder


def rows(size, limits, folder: Path) -> Iterator[Row]:
    """Writing by greedy search and with beams, in float32; the peer also with its weights in 8 bits.

    Args:
        size: a `Size` of run.py.
        limits: the machine's.
        folder: where the converted models may lie for a while.
    """
    ours, official = seq2seq.make_marian(size.marian_vocab_size)
    peers = {
        PEER: load(official, folder / "float32", "float32"),
        f"{PEER} int8": load(official, folder / "int8", "int8"),
    }
    _check_same(official, peers[PEER])
    ours.prepare_for_inference(compile=True)
    shape = f"Marian, Transformer-base width, vocabulary {size.marian_vocab_size:,}"
    weights = [*ours.model.decoder.layers.parameters(), ours.lm_head.weight]
    limit = sum(weight.nbytes for weight in weights) / (limits.read_gbs * 1e9)
    for peer, theirs in peers.items():
        for sentences, beams in BATCHES:
            ids = _sources(size.marian_vocab_size, sentences)
            times = interleaved(
                _step_of(lambda tokens, ids=ids, beams=beams: _write(ours, ids, beams, tokens), size.tokens),
                _step_of(
                    lambda tokens, ids=ids, beams=beams, theirs=theirs: _translate(theirs, ids, beams, tokens),
                    size.tokens,
                ),
                size.rounds,
            )
            work = f"{sentences} x {beams} beam{'s' if beams > 1 else ''}, compiled"
            yield make_row(shape, work, torch.float32, LENGTH, sentences, times, limit, peer=peer)


def load(official, folder: Path, precision: str):
    """A `ctranslate2.Translator` of a Marian model of transformers, with as many threads as PyTorch has."""
    import ctranslate2
    from ctranslate2.converters.transformers import MarianMTLoader

    loader, config = MarianMTLoader(), official.config
    with torch.no_grad():
        spec = loader.get_model_spec(copy.deepcopy(official))  # whose tensors are then written to
    words = [str(token) for token in range(config.vocab_size - 1)]  # the last one, padding, is left out
    loader.set_vocabulary(spec, words)
    end = words[config.eos_token_id]
    spec.config.eos_token, spec.config.decoder_start_token, spec.config.unk_token = end, end, words[1]
    spec.validate()
    spec.optimize(quantization=precision)
    folder.mkdir()
    spec.save(str(folder))
    return ctranslate2.Translator(str(folder), intra_threads=torch.get_num_threads(), compute_type=precision)


def _sources(vocab_size: int, sentences: int) -> torch.Tensor:
    """Tokens int [B, 40]; the last two of the vocabulary are left out: the padding, and what the peer does not have."""
    generator = torch.Generator().manual_seed(sentences)
    return torch.randint(5, vocab_size - 2, (sentences, LENGTH), generator=generator)


def _check_same(official, theirs) -> None:
    """Compare the scores of a text of transformers.

    Raises:
        RuntimeError: they differ by more than rounding.
    """
    ids = _sources(official.config.vocab_size, 2)
    start = official.config.decoder_start_token_id
    texts = _sources(official.config.vocab_size, 3)[:2]
    inputs = torch.cat([torch.full((2, 1), start), texts[:, :-1]], 1)
    with torch.no_grad():
        scores = official(input_ids=ids, decoder_input_ids=inputs).logits[..., :-1].log_softmax(-1)
    wanted = scores.gather(2, texts[:, :, None])[..., 0]
    found = theirs.score_batch(_words(ids), _words(texts))
    found = torch.tensor([each.log_probs[: texts.shape[1]] for each in found])
    workloads.check_same(f"Marian in {PEER}", torch.float32, [wanted, found])


def _words(ids: torch.Tensor) -> list[list[str]]:
    return [[str(token) for token in row] for row in ids.tolist()]


def _write(model, ids: torch.Tensor, beams: int, tokens: int) -> None:
    model.generate(ids, num_beams=beams, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens)


def _translate(translator, ids: torch.Tensor, beams: int, tokens: int) -> None:
    lengths = {"min_decoding_length": tokens, "max_decoding_length": tokens}
    translator.translate_batch(_words(ids), beam_size=beams, max_batch_size=0, **lengths)


def _step_of(write: Callable[[int], None], tokens: int) -> Callable[[], list[float]]:
    """Seconds a token of a text, without its first ones and the encoder."""

    def once() -> list[float]:
        start = time.perf_counter()
        write(_FIRST)
        middle = time.perf_counter()
        write(_FIRST + tokens)
        return [(time.perf_counter() - middle - (middle - start)) / tokens]

    return once
