"""WordPiece tokenizers: `vocab.txt`, with or without `tokenizer.json`."""

import functools
import json
from typing import Any

from tokenizers import BertWordPieceTokenizer

from .words import Words, lines

SPECIAL = ("[PAD]", "[unused0]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SPECIAL_MAP = {f"{name[1:-1].lower()}_token": name for name in SPECIAL if "unused" not in name}
MPNET = ("<s>", "<pad>", "</s>", "<unk>", "[UNK]")
MPNET_MAP = {
    "bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "mask_token": "<mask>", "pad_token": "<pad>",
    "sep_token": "</s>", "unk_token": "[UNK]",
}  # fmt: skip

RESIDUES = "<cls> <pad> <eos> <unk> L A G V S E R T I D P K Q N F Y M H W C X B U Z O . - <null_1> <mask>".split()


@functools.cache
def trained(lower: bool, first: tuple[str, ...]) -> tuple[str, ...]:
    """The words in the order of their ids."""
    tokenizer = BertWordPieceTokenizer(lowercase=lower)
    settings = {"vocab_size": 440, "limit_alphabet": 160, "show_progress": False}
    tokenizer.train_from_iterator(lines(), special_tokens=list(first), **settings)
    return (*first, *sorted(tokenizer.get_vocab().keys() - {*first}))  # the trainer's order is another in each process


def word_pieces(
    *,
    lower: bool = True,
    fast: bool = True,
    config: dict[str, Any] | None = None,
    special_map: dict[str, Any] | None = None,
    padded_to: int | None = None,
    mpnet: bool = False,
) -> Words:
    """A tokenizer of BERT, or of MPNet, which has RoBERTa's special tokens and a mask at the end.

    Args:
        lower: whether letters are made small.
        fast: whether there is a `tokenizer.json`.
        config: `tokenizer_config.json`.
        special_map: `special_tokens_map.json`.
        padded_to: a length that `tokenizer.json` cuts and pads to.
        mpnet: whether it is MPNet's.
    """
    words = (*trained(lower, MPNET), "<mask>") if mpnet else trained(lower, SPECIAL)
    ids = {word: index for index, word in enumerate(words)}
    files: dict[str, Any] = {"vocab.txt": "".join(f"{word}\n" for word in words)}
    if fast:
        begin, end, pad, mask = ("<s>", "</s>", "<pad>", "<mask>") if mpnet else ("[CLS]", "[SEP]", "[PAD]", "[MASK]")
        names = {"unk_token": "[UNK]", "sep_token": end, "cls_token": begin, "pad_token": pad, "mask_token": mask}
        made = BertWordPieceTokenizer(vocab=ids, lowercase=lower, **names)
        if mpnet:
            from tokenizers.processors import RobertaProcessing

            made._tokenizer.post_processor = RobertaProcessing((end, ids[end]), (begin, ids[begin]), True, False)
        if padded_to:
            made.enable_truncation(padded_to)
            made.enable_padding(pad_id=ids[pad], pad_token=pad, length=padded_to)
        files["tokenizer.json"] = json.loads(made.to_str())
    if config is not None:
        files["tokenizer_config.json"] = config
    if special_map is not None:
        files["special_tokens_map.json"] = special_map
    return Words(files, ids)


def amino_acids() -> Words:
    """The tokenizer of proteins: a list of letters, which only Python code reads."""
    names = {f"{name}_token": f"<{name}>" for name in ("cls", "eos", "mask", "pad", "unk")}
    files = {
        "vocab.txt": "\n".join(RESIDUES),
        "special_tokens_map.json": names,
        "tokenizer_config.json": {**names, "model_max_length": 1024, "tokenizer_class": "EsmTokenizer"},
    }
    return Words(files, {token: index for index, token in enumerate(RESIDUES)})
