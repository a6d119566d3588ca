"""Checkpoints as they lie on the Hub, converted in and back: tokens, outputs, files and every tensor."""

import pytest
from real_repos import RECORDS, checks, make

from blockformer.conversion import convert
from blockformer.conversion.families.registry import FAMILIES


def parameters():
    """The records; those that are not quick carry a mark."""
    return [
        pytest.param(record, id=record.name, marks=() if record.quick else pytest.mark.exhaustive) for record in RECORDS
    ]


@pytest.mark.parametrize("record", parameters())
def test_there_and_back(tmp_path, subtests, record):
    if record.pieces:
        pytest.importorskip("sentencepiece", reason="makes the SentencePiece files of this checkpoint")
    if record.family not in FAMILIES:
        pytest.skip(f"this transformers has no {record.family}")
    case = checks.Case(record, *(tmp_path / name for name in ("source", "ours", "back")))
    make(record, case.source)
    report = convert(case.source, case.ours)
    assert report.parity.passed
    convert(case.ours, case.back, to_official=True)
    for name, check in [pair for column in checks.CHECKS.values() for pair in column.items()]:
        with subtests.test(name):
            check(case)


def test_every_family_has_a_checkpoint():
    """One that is known only to newer transformers counts too."""
    missing = set(FAMILIES) - {record.family for record in RECORDS}
    assert not missing


def test_a_third_runs_every_time():
    quick = sum(record.quick for record in RECORDS)
    assert len(RECORDS) >= 60
    assert len(RECORDS) / 4 < quick < len(RECORDS) / 2
