"""Checkpoints as they lie on the Hub, converted in and back: tokens, outputs, files and every tensor."""

import json

import pytest
from real_repos import RECORDS, checks
from safetensors.torch import load_file, save_file

from blockformer.conversion.families.registry import FAMILIES
from blockformer.doctor import diagnose
from blockformer.doctor.finding import ERROR


def parameters():
    """The records; those that are not quick carry a mark."""
    return [
        pytest.param(record, id=record.name, marks=() if record.quick else pytest.mark.exhaustive) for record in RECORDS
    ]


@pytest.mark.parametrize("record", parameters())
def test_there_and_back(tmp_path, subtests, record):
    if record.pieces:
        for name in ("sentencepiece", "google.protobuf"):
            pytest.importorskip(
                name, reason=f"{name} makes and reads this checkpoint's SentencePiece files; install it"
            )
    if record.family not in FAMILIES:
        pytest.skip(f"this transformers has no {record.family}")
    case = checks.there_and_back(record, tmp_path)
    for name, check in [pair for column in checks.CHECKS.values() for pair in column.items()]:
        with subtests.test(name):
            check(case)
    with subtests.test("doctor finds no error"):
        assert [each.sentence for each in diagnose(case.source, quick=True).findings if each.severity == ERROR] == []


def test_every_family_has_a_checkpoint():
    """One that is known only to newer transformers counts too."""
    missing = set(FAMILIES) - {record.family for record in RECORDS}
    assert not missing


def test_a_third_runs_every_time():
    quick = sum(record.quick for record in RECORDS)
    assert len(RECORDS) >= 60
    assert len(RECORDS) / 4 < quick < len(RECORDS) / 2


def spoil_tokens(case):
    entries = checks.entries_of(case.ours, "tokenizer.json")
    vocabulary = entries["model"]["vocab"]
    vocabulary["."], vocabulary["?"] = vocabulary["?"], vocabulary["."]
    (case.ours / "tokenizer.json").write_text(json.dumps(entries))


def spoil_weights(folder):
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith(("query.weight", "q_proj.weight")))
    tensors[name][0] *= 1.01
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


FAULTS = {
    "outputs": lambda case: spoil_weights(case.ours),
    "tokens": spoil_tokens,
    "files carried": lambda case: (case.ours / "LICENSE").unlink(),
    "files back": lambda case: (case.back / "README.md").write_text("# Another\n"),
    "tensors back": lambda case: spoil_weights(case.back),
    "config back": lambda case: (case.back / "config.json").write_text("{}"),
    "files named": lambda case: (case.back / "vocab.txt").unlink(),
}


def test_each_check_sees_a_fault(tmp_path):
    (record,) = (record for record in RECORDS if record.name == "google-bert/bert-base-uncased")
    case = checks.there_and_back(record, tmp_path)
    by_name = {name: check for column in checks.CHECKS.values() for name, check in column.items()}
    blind = []
    for name, spoil in FAULTS.items():
        by_name[name](case)
        spoil(case)
        try:
            by_name[name](case)
        except AssertionError:
            continue
        blind.append(name)
    assert not blind
