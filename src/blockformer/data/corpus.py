"""Real text that every machine has: the Python standard library's sources, split by file, tokenized, cut to blocks."""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
MINIMUM_BYTES = 200_000

# Tests repeat themselves, installed packages differ from machine to machine, and tables of data are not text.
_LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
)


class CorpusError(ValueError):
    """There is too little text."""


@dataclass(frozen=True)
class SourceFile:
    """One file: its path relative to the folder it was found in, and its text."""

    name: str
    text: str

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())


@dataclass(frozen=True)
class Corpus:
    """Training and held-out files; no file and no file's content is in both."""

    train: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]

    @property
    def train_bytes(self) -> int:
        return sum(file.num_bytes for file in self.train)

    @property
    def held_out_bytes(self) -> int:
        return sum(file.num_bytes for file in self.held_out)


def gather(folder: Path | None = None, max_bytes: int = 8_000_000, held_out_share: float = 0.04) -> Corpus:
    """Read Python sources below a folder and split them by file.

    The files are sorted by a hash of their relative path: the same on every machine, and spread over the whole
    library, so that a cap takes no particular corner of it.

    Args:
        folder: where to look; None takes the running Python's standard library.
        max_bytes: stop once this many bytes of UTF-8 text are gathered, held-out text included.
        held_out_share: the share of the gathered bytes that is held out, at least one file.

    Raises:
        CorpusError: fewer than 200,000 bytes of source are gathered, as on a Python without its sources.
    """
    folder = Path(folder or sysconfig.get_paths()["stdlib"])
    files, seen, total, fix = [], set(), 0, "install Python with its sources"
    for path in sorted(folder.rglob("*.py"), key=lambda path: _order(path.relative_to(folder))):
        if _LEFT_OUT.intersection(path.relative_to(folder).parts[:-1]):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if not text.strip() or text in seen:
            continue
        if total + len(text.encode()) > max_bytes:
            fix = f"allow more than {max_bytes:,}"
            break
        seen.add(text)
        files.append(SourceFile(path.relative_to(folder).as_posix(), text))
        total += files[-1].num_bytes
    if total < MINIMUM_BYTES:
        raise CorpusError(f"only {total:,} bytes of Python source from {folder}; {fix}.")
    return _split(files, held_out_share * total)


def _order(relative: Path) -> str:
    return hashlib.sha256(relative.as_posix().encode()).hexdigest()


def _split(files: Sequence[SourceFile], held_out_bytes: float) -> Corpus:
    """Hold out the first files until they reach the wanted number of bytes."""
    taken, count = 0, 0
    while taken < held_out_bytes and count < len(files) - 1:
        taken += files[count].num_bytes
        count += 1
    return Corpus(train=tuple(files[count:]), held_out=tuple(files[:count]))


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer: any text has tokens, and decoding gives its bytes back.

    Args:
        texts: the training documents.
        vocab_size: tokens in all, the 256 bytes and the 2 special tokens included.
        max_length: the context length that the tokenizer states, in tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def encode(files: Sequence[SourceFile], tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """All files as one row of token ids [N], each file between two end-of-text tokens."""
    end = tokenizer.eos_token_id
    ids = [end]
    # the length warning speaks of one sequence; these rows are cut to blocks afterwards
    for row in tokenizer([file.text for file in files], add_special_tokens=False, verbose=False)["input_ids"]:
        ids += row
        ids.append(end)
    return torch.tensor(ids)


class Blocks(Dataset):
    """Rows of `length` tokens out of one long row [N]; labels are the inputs, the model shifts them by one."""

    def __init__(self, ids: torch.Tensor, length: int, limit: int | None = None) -> None:
        count = min(len(ids) // length, limit or len(ids))
        self.rows = ids[: count * length].view(count, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


@dataclass(frozen=True)
class Score:
    """How well some predictor does on held-out text.

    Attributes:
        loss: nats per predicted token.
        bits_per_byte: bits per byte of the text, which does not depend on the tokenizer.
    """

    loss: float
    bits_per_byte: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @classmethod
    def of(cls, nats: float, tokens: int, num_bytes: int) -> Score:
        return cls(loss=nats / tokens, bits_per_byte=nats / math.log(2) / num_bytes)


@torch.no_grad()
def model_score(model: torch.nn.Module, ids: torch.Tensor, num_bytes: int, length: int, batch: int = 8) -> Score:
    """Score a causal language model on every token of a row but the first.

    Args:
        model: takes input ids [B, T] and gives `.logits` [B, T, V].
        ids: the token ids [N].
        num_bytes: bytes of the text behind them.
        length: predictions in one window; windows share one token, so no prediction is left out.
        batch: windows in one forward pass.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    full = (len(ids) - 1) // length
    pieces = []
    if full:
        pieces += ids[: full * length + 1].unfold(0, length + 1, length).split(batch)  # each [batch, length + 1]
    if full * length + 1 < len(ids):
        pieces.append(ids[None, full * length :])
    nats = 0.0
    for piece in pieces:
        piece = piece.to(device)
        logits = model(input_ids=piece[:, :-1]).logits.float()
        nats += torch.nn.functional.cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten(), reduction="sum").item()
    model.train(was_training)
    return Score.of(nats, len(ids) - 1, num_bytes)


def unigram_score(train_ids: torch.Tensor, ids: torch.Tensor, num_bytes: int, vocab_size: int) -> Score:
    """Score the token frequencies of the training text (plus one each) on the same tokens that `model_score` takes."""
    counts = torch.bincount(train_ids, minlength=vocab_size).double() + 1
    log_probabilities = (counts / counts.sum()).log()
    return Score.of(-log_probabilities[ids[1:]].sum().item(), len(ids) - 1, num_bytes)
