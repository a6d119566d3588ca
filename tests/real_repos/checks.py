"""What must hold of a checkpoint that was converted in and back. The tests and the table use the same."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import blockformer
from blockformer.conversion import convert
from blockformer.files.config_file import with_floats

from .record import Record, make, readable
from .weights import config_class_of

TEXTS = (
    "A small boat sails along the river.",
    "def area(width, height):\n\treturn width * height  # in 2026",
    "Fluss, forêt, montaña: 3.14159",
    "",
    "  two  spaces ",
)
PAIRS = (("Where is the boat?", "It is on the river."), ("How old is it?", "42 years"))
OUTPUTS = "last_hidden_state logits start_logits end_logits prediction_logits seq_relationship_logits".split()
OWN = (".blockformer.json", ".gitattributes", "config.json")
"""The mark of a folder that we made, and files that no conversion carries or that are compared as JSON."""
WITHOUT_LAYOUT = ("t5gemma2",)
"""Families of texts that no official class has by themselves, so that they go back into their repo."""
TOLERANCE = 1e-5
"""The largest difference of outputs in float32, as a share of the largest output."""


@dataclass(frozen=True)
class Case:
    """A checkpoint in three folders: as on the Hub, converted, and converted back.

    Attributes:
        record: what it was made of.
        source: as on the Hub.
        ours: converted.
        back: converted back.
        notes: what the first conversion told.
    """

    record: Record
    source: Path
    ours: Path
    back: Path
    notes: tuple[str, ...]


def there_and_back(record: Record, folder: Path) -> Case:
    """Make a checkpoint in a folder and convert it both ways, each time with the usual comparison of the models."""
    source, ours, back = (folder / name for name in ("source", "ours", "back"))
    make(record, source)
    report = convert(source, ours)
    into = source if report.family in WITHOUT_LAYOUT else None
    for each in (report, convert(ours, back, to_official=True, into=into)):
        assert each.parity is not None
        assert each.parity.measured
        assert each.parity.passed
    return Case(record, source, ours, back, tuple(report.notes))


def tokenizer_of(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def ids_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What a tokenizer makes of texts, of pairs and, where it has a padding token, of a padded batch."""
    firsts, seconds = ([pair[place] for pair in PAIRS] for place in (0, 1))
    made = {"texts": tokenizer(list(TEXTS)).data, "pairs": tokenizer(firsts, seconds).data}
    if tokenizer.pad_token is not None:
        made["batch"] = tokenizer(list(TEXTS), padding=True, truncation=True, max_length=16).data
    return made


def assert_same_tokens(source: Path, other: Path) -> None:
    expected, found = ids_of(tokenizer_of(source)), ids_of(tokenizer_of(other))
    for name, entries in expected.items():
        assert found[name]["input_ids"] == entries["input_ids"], name
        assert found[name]["attention_mask"] == entries["attention_mask"], name


def load_official(record: Record, folder: Path) -> PreTrainedModel:
    """The official class with the weights of a folder, in float32."""
    kind = getattr(transformers, record.oracle_class)
    capped = record.config.get("attn_logit_softcapping") is not None
    settings: dict[str, Any] = {"attn_implementation": "eager"} if capped else {}
    entries = readable(record, entries_of(folder))
    own = config_class_of(kind, entries)
    if record.todays or own is not kind.config_class:
        settings["config"] = own(**entries)
    return kind.from_pretrained(folder, dtype=torch.float32, local_files_only=True, **settings).eval()


def our_model(folder: Path) -> PreTrainedModel:
    """Our model of a folder, without its code."""
    (name,) = entries_of(folder)["architectures"]
    return getattr(blockformer, name).from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def entries_of(folder: Path, name: str = "config.json") -> dict[str, Any]:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def probe(folder: Path) -> dict[str, Tensor]:
    """Two texts as the source's tokenizer cuts them, the shorter one padded at its right."""
    tokenizer = tokenizer_of(folder)
    whole = [tokenizer(text).input_ids for text in TEXTS[:2]]
    rows = [[*row[: count - 1], row[-1]] for row, count in zip(whole, (16, 24), strict=True)]
    pad = entries_of(folder).get("pad_token_id")
    pad = tokenizer.pad_token_id if pad is None else pad
    longest = max(map(len, rows))
    ids = [[*row, *[pad or 0] * (longest - len(row))] for row in rows]
    mask = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@torch.no_grad()
def outputs_of(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs at real tokens, or of whole rows."""
    found = model(**inputs)
    named = {name: found[name] for name in OUTPUTS if name in found}
    if "sop_logits" in found:
        named["seq_relationship_logits"] = found["sop_logits"]
    if "decoder_input_ids" in inputs:
        return named
    mask = inputs["attention_mask"].bool()
    return {name: each[mask] if each.shape[:2] == mask.shape else each for name, each in named.items()}


def difference(record: Record, source: Path, ours: Path) -> float:
    """The largest difference of an output, as a share of the largest output of its kind."""
    inputs = probe(source)
    theirs, own = load_official(record, source), our_model(ours)
    if theirs.config.is_encoder_decoder and "Classification" not in record.oracle_class:
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :7].flip(1)
    expected, found = outputs_of(theirs, inputs), outputs_of(own, inputs)
    if expected.keys() != found.keys() and len(expected) == len(found) == 1:
        found = dict(zip(expected, found.values(), strict=True))
    assert expected, "the official class gives no output that is compared"
    assert found.keys() == expected.keys(), f"ours gives {sorted(found)}, the official class {sorted(expected)}"
    shares = []
    for name, each in expected.items():
        assert found[name].shape == each.shape, f"{name}: {tuple(found[name].shape)} instead of {tuple(each.shape)}"
        assert each.std() > 1e-3, f"{name}: too even to show a difference"
        shares.append(((found[name] - each).abs().max() / each.abs().max()).item())
    return max(shares)


def stored(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder: those of safetensors files where there are any."""
    paths = sorted(folder.glob("*.safetensors"))
    if paths:
        return {name: tensor for path in paths for name, tensor in load_file(path).items()}
    paths = sorted(folder.glob("pytorch_model*.bin"))
    return {name: each for path in paths for name, each in torch.load(path, weights_only=True).items()}


def assert_same_tensors(source: Path, back: Path) -> None:
    expected, found = stored(source), stored(back)
    odd = sorted(found.keys() ^ expected.keys())
    assert not odd, f"only one has {', '.join(odd[:6])}"
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def assert_same_config(source: Path, back: Path) -> None:
    """All entries but `auto_map`, which names code: that is not carried, so neither is the entry.

    An Infinity, which no JSON has, comes back as transformers 5 writes it.
    """
    expected, found = with_floats(entries_of(source)), with_floats(entries_of(back))
    expected.pop("auto_map", None)
    changed = {name for name in expected.keys() | found.keys() if expected.get(name, ...) != found.get(name, ...)}
    assert not changed, f"config.json differs in {', '.join(sorted(changed))}"


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def is_weights(name: str) -> bool:
    return name.startswith(("model", "pytorch_model")) and name.endswith((".safetensors", ".bin", ".index.json"))


def assert_files_carried(record: Record, source: Path, ours: Path) -> None:
    """What travels with the weights is in our repo."""
    have = names_in(ours)
    models = {name for name in record.tokenizer().files if name.endswith((".model", ".spm", ".txt", "vocab.json"))}
    legal = {name for name in record.files if name.startswith(("LICENSE", "NOTICE", "USE_POLICY"))}
    settings = {name for name in names_in(source) if name.startswith("generation_config")}
    for name in sorted(models | legal | settings):
        assert name in have, f"{name} is not in our repo"
        assert (ours / name).read_bytes() == (source / name).read_bytes(), f"{name} has changed"
    kept = ours / "conversion/source/README.md"
    assert kept.exists(), "README.md is not in conversion/source"
    assert kept.read_bytes() == (source / "README.md").read_bytes(), "the README.md in conversion/source has changed"


def assert_others_named(case: Case) -> None:
    """Each file that does not come back is named in `conversion.json` and to the user, itself or by its folder."""
    left_out = entries_of(case.ours, "conversion.json").get("files", {}).get("left_out", {})
    named = {name for names in left_out.values() for name in names}
    told = "\n".join(case.notes)
    gone = names_in(case.source) - names_in(case.back)
    for name in sorted(name for name in gone if not (is_weights(name) or name in OWN)):
        names = {name, *(f"{part}/" for part in folders_of(name))}
        assert named & names, f"{name} is neither carried nor named in conversion.json"
        assert any(each in told for each in names), f"{name} is neither carried nor named in a note"


def folders_of(name: str) -> Iterator[str]:
    parts = name.split("/")
    return ("/".join(parts[:count]) for count in range(1, len(parts)))


def assert_files_given_back(record: Record, source: Path, back: Path) -> None:
    """What our repo has carried is in the official folder again, byte for byte."""
    have = names_in(back)
    wanted = {"README.md", *record.tokenizer().files}
    wanted |= {name for name in record.files if name.startswith(("LICENSE", "NOTICE", "USE_POLICY"))}
    wanted |= {name for name in names_in(source) if name.startswith("generation_config")}
    missing = wanted - have
    assert not missing, f"not given back: {', '.join(sorted(missing))}"
    shared = {name for name in have & names_in(source) if not (is_weights(name) or name in OWN)}
    same = {name for name in shared if (back / name).read_bytes() == (source / name).read_bytes()}
    changed = {name for name in shared - same if not name.endswith(".pt")}
    assert not changed, f"changed: {', '.join(sorted(changed))}"
    added = have - names_in(source) - {name for name in have if is_weights(name) or name in OWN}
    assert not added, f"added: {', '.join(sorted(added))}"


def same_outputs(case: Case) -> str:
    share = difference(case.record, case.source, case.ours)
    assert share < TOLERANCE, f"outputs differ by {share:.1e} of the largest"
    return f"< 1e-{math.floor(-math.log10(share))}" if share else "0"


CHECKS: dict[str, dict[str, Callable[[Case], str | None]]] = {
    "outputs": {"outputs": same_outputs},
    "tokens": {
        "tokens": lambda case: assert_same_tokens(case.source, case.ours),
        "tokens back": lambda case: assert_same_tokens(case.source, case.back),
    },
    "files": {
        "files carried": lambda case: assert_files_carried(case.record, case.source, case.ours),
        "files named": assert_others_named,
        "files back": lambda case: assert_files_given_back(case.record, case.source, case.back),
    },
    "back": {
        "tensors back": lambda case: assert_same_tensors(case.source, case.back),
        "config back": lambda case: assert_same_config(case.source, case.back),
    },
}
"""Column of the table -> name -> check. A check raises `AssertionError`, or gives what the table says for "yes"."""
