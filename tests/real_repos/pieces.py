"""SentencePiece models, and the `tokenizer.json` made from them."""

import functools
import io
import json
import random
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from .byte_level import older, template
from .words import lines


@functools.cache
def trained(
    kind: str = "unigram",
    size: int = 420,
    *,
    unk: int = 0,
    bos: int = 1,
    eos: int = 2,
    pad: int = -1,
    named: tuple[tuple[str, str], ...] = (),
    control: tuple[str, ...] = (),
    user: tuple[str, ...] = (),
    exact: bool = False,
    dummy_prefix: bool = True,
    seed: int = 0,
) -> bytes:
    """A SentencePiece model.

    Args:
        kind: "unigram" or "bpe".
        size: the number of pieces.
        unk: the id of the unknown piece; -1 leaves one of the four out.
        bos: of the first piece of a text.
        eos: of the last.
        pad: of the padding.
        named: how those four are spelled where not as usual, such as ("pad", "[PAD]").
        control: further pieces that no text gives.
        user: pieces that are never cut.
        exact: whether text stays as it is and unknown characters become bytes, as in Llama.
        dummy_prefix: whether a space is put before the text.
        seed: another draws other lines of the text.
    """
    import sentencepiece

    text = list(lines())
    if seed:
        text = random.Random(seed).sample(text, len(text) // 2)
    exactly = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text),
        model_writer=model,
        model_type=kind,
        vocab_size=size,
        unk_id=unk,
        bos_id=bos,
        eos_id=eos,
        pad_id=pad,
        control_symbols=list(control),
        user_defined_symbols=list(user),
        character_coverage=0.985,
        add_dummy_prefix=dummy_prefix,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        **{f"{name}_piece": spelling for name, spelling in named},
        **(exactly if exact else {}),
    )
    return model.getvalue()


@functools.cache
def parsed(model: bytes) -> Any:
    """The model as a protobuf message."""
    from sentencepiece import sentencepiece_model_pb2

    message = sentencepiece_model_pb2.ModelProto()
    message.ParseFromString(model)
    return message


def scored(model: bytes) -> list[tuple[str, float]]:
    """Each piece and its score, in the order of their ids."""
    return [(piece.piece, piece.score) for piece in parsed(model).pieces]


@functools.cache
def merges_of(model: bytes) -> tuple[tuple[str, str], ...]:
    """The merges of a BPE model: each way to make a piece of two others, the best first."""
    score = dict(scored(model))
    place = {piece: index for index, (piece, _) in enumerate(scored(model))}
    found = [(piece[:cut], piece[cut:]) for piece in place for cut in range(1, len(piece))]
    pairs = [pair for pair in found if pair[0] in place and pair[1] in place]
    return tuple(sorted(pairs, key=lambda pair: (-score["".join(pair)], place[pair[0]], place[pair[1]])))


def precompiled(model: bytes) -> normalizers.Normalizer:
    """The normalizer that the model holds."""
    return normalizers.Precompiled(parsed(model).normalizer_spec.precompiled_charsmap)


def finished(tokenizer: Tokenizer, special: tuple[str, ...], wide: tuple[str, ...] = ("<mask>",)) -> dict[str, Any]:
    """The JSON of a tokenizer with its special tokens."""
    tokens = [AddedToken(token, special=True, normalized=False, lstrip=token in wide) for token in special]
    tokenizer.add_special_tokens(tokens)
    return older(json.loads(tokenizer.to_str()))


def unigram_json(
    model: bytes,
    pieces: list[tuple[str, float]],
    unk: int,
    special: tuple[str, ...],
    before: tuple[str, ...] = (),
    after: tuple[str, ...] = (),
    doubled: bool = False,
) -> dict[str, Any]:
    """`tokenizer.json` of a unigram model; with `doubled` two texts of a pair have two separators between them."""
    ids = {piece: index for index, (piece, _) in enumerate(pieces)}
    tokenizer = Tokenizer(models.Unigram(pieces, unk))
    tokenizer.normalizer = normalizers.Sequence([precompiled(model), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = template(ids, before, after)
    if doubled:
        from tokenizers.processors import TemplateProcessing

        pair = [*before, "$A", *after, *after, "$B", *after]
        known = [(token, ids[token]) for token in (*before, *after)]
        tokenizer.post_processor = TemplateProcessing([*before, "$A", *after], pair, known)
    return finished(tokenizer, special)


def bpe_json(
    model: bytes,
    ids: dict[str, int],
    special: tuple[str, ...],
    before: tuple[str, ...] = (),
    after: tuple[str, ...] = (),
    *,
    exact: bool = True,
    prefix: bool = True,
) -> dict[str, Any]:
    """`tokenizer.json` of a BPE model; `exact` ones leave the text as it is and fall back to bytes."""
    inside = {piece: index for piece, index in ids.items() if index < len(parsed(model).pieces) + 1}
    settings = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": exact}
    tokenizer = Tokenizer(models.BPE(inside, list(merges_of(model)), **settings))
    if exact:
        replace = normalizers.Replace(" ", "▁")
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
        strip = [decoders.Strip(" ", 1, 0)] if prefix else []
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        tokenizer.decoder = decoders.Sequence(steps)
    else:
        tokenizer.normalizer = precompiled(model)
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.post_processor = template(ids, before, after)
    return finished(tokenizer, special)
