"""Byte-level BPE tokenizers: `vocab.json` with `merges.txt`, `tokenizer.json`, or both."""

import functools
import json
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from .words import Words, added_tokens_decoder, lines

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""How Llama 3 and its followers split text before the merges."""
QWEN = LLAMA3.replace("{1,3}", "")
"""Qwen's differs in the digits, each of which stands by itself."""
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"  # noqa: RUF001


@functools.cache
def trained(first: tuple[str, ...], split: str | None) -> tuple[dict[str, int], tuple[tuple[str, str], ...]]:
    """Vocabulary and merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitter(split, False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    settings = {"vocab_size": 440, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(lines(), trainers.BpeTrainer(special_tokens=list(first), **settings))
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary = dict(sorted(model["vocab"].items(), key=lambda each: each[1]))
    return vocabulary, tuple(tuple(pair) for pair in model["merges"])


def splitter(split: str | None, digits: bool, prefix_space: bool = False) -> pre_tokenizers.PreTokenizer:
    """What cuts text into pieces: GPT-2's own expression, another, or single digits first."""
    if split is not None:
        parts = [pre_tokenizers.Split(Regex(split), "isolated")]
        return pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(prefix_space, use_regex=False)])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level]) if digits else byte_level


def template(ids: dict[str, int], before: tuple[str, ...], after: tuple[str, ...], second: int = 0) -> Any:
    """A post-processor that puts special tokens around; the second text of a pair has the type `second`."""
    one = [*before, "$A", *after]
    two = [*one, *(f"{token}:{second}" for token in before), f"$B:{second}", *(f"{token}:{second}" for token in after)]
    return processors.TemplateProcessing(
        single=one, pair=two, special_tokens=[(token, ids[token]) for token in dict.fromkeys((*before, *after))]
    )


def byte_level(
    first: tuple[str, ...] = (),
    last: tuple[str, ...] = (),
    *,
    split: str | None = None,
    digits: bool = False,
    prefix_space: bool = False,
    nfc: bool = False,
    slow: bool = True,
    fast: bool = True,
    inside: bool = False,
    before: tuple[str, ...] = (),
    after: tuple[str, ...] = (),
    plain: tuple[str, ...] = (),
    wide: tuple[str, ...] = (),
    roberta: bool = False,
    listed: bool = False,
    added: bool = False,
    config: dict[str, Any] | None = None,
    special_map: dict[str, Any] | None = None,
) -> Words:
    """A tokenizer of GPT-2, RoBERTa, Llama 3, Qwen and most others.

    Args:
        first: special tokens with the lowest ids.
        last: tokens after all others.
        split: the expression that cuts text; None is GPT-2's.
        digits: whether each digit stands by itself.
        prefix_space: whether a space is put before the text.
        nfc: whether text is normalized first.
        slow: whether there are `vocab.json` and `merges.txt`.
        fast: whether there is a `tokenizer.json`.
        inside: whether the last tokens stand in `vocab.json` too.
        before: special tokens before each text.
        after: and after it.
        plain: those of `last` that are not special.
        wide: special tokens that take the space at their left.
        roberta: whether texts stand between <s> and </s>, as in RoBERTa.
        listed: whether `tokenizer_config.json` lists the added tokens.
        added: whether `added_tokens.json` lists the last tokens.
        config: `tokenizer_config.json`.
        special_map: `special_tokens_map.json`.
    """
    vocabulary, merges = trained(first, split)
    outside = {token: len(vocabulary) + place for place, token in enumerate(last)}
    ids = {**vocabulary, **outside}
    written = ids if inside else vocabulary
    files: dict[str, Any] = {}
    if slow:
        files["vocab.json"] = json.dumps(written, ensure_ascii=False)
        files["merges.txt"] = "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges)
    if fast:
        tokenizer = Tokenizer(models.BPE(written, list(merges)))
        tokenizer.normalizer = normalizers.NFC() if nfc else None
        tokenizer.pre_tokenizer = splitter(split, digits, prefix_space)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        if roberta:
            ends = (("</s>", ids["</s>"]), ("<s>", ids["<s>"]))
            tokenizer.post_processor = processors.RobertaProcessing(*ends, add_prefix_space=prefix_space)
        elif before or after:
            tokenizer.post_processor = template(ids, before, after)
        for token in (*first, *last):
            known = AddedToken(token, special=token not in plain, normalized=False, lstrip=token in wide)
            (tokenizer.add_tokens if token in plain else tokenizer.add_special_tokens)([known])
        files["tokenizer.json"] = older(json.loads(tokenizer.to_str()))
    if added:
        files["added_tokens.json"] = outside
    if config is not None:
        known = {token: ids[token] for token in (*first, *last)}
        entries = {"added_tokens_decoder": added_tokens_decoder(known, plain)} if listed else {}
        files["tokenizer_config.json"] = {**entries, **config}
    if special_map is not None:
        files["special_tokens_map.json"] = special_map
    return Words(files, ids)


def older(entries: dict[str, Any]) -> dict[str, Any]:
    """A `tokenizer.json` as releases before tokenizers 0.20 wrote it: each merge is one string."""
    model = entries["model"]
    if "merges" in model:
        model["merges"] = [" ".join(pair) for pair in model["merges"]]
    return entries
