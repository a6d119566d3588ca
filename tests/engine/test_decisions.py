"""What is measured once on a machine: where answers are kept, and for whom."""

import json

import pytest
import torch
from sizes import STRONG

import blockformer
from blockformer import preset
from blockformer.engine import measure


@pytest.fixture
def decisions(monkeypatch, tmp_path):
    """A file of decisions, and no answer in this process."""
    monkeypatch.setenv("BLOCKFORMER_DECISIONS", str(tmp_path / "decisions.json"))
    monkeypatch.setattr(measure, "_verdicts", {})
    return tmp_path / "decisions.json"


def ask(answer, question="x", threads=2):
    """What is answered to a process that measures this."""
    before = torch.get_num_threads()
    for known in (measure._verdicts, *measure._with_other_threads.values()):
        known.clear()
    torch.set_num_threads(threads)
    try:
        return measure.is_measured(question, lambda: answer)
    finally:
        torch.set_num_threads(before)


def test_what_one_process_has_measured_all_of_them_do(decisions):
    assert ask(True)
    assert ask(False)
    assert not ask(False, threads=1)  # another question
    assert not ask(True, threads=1)
    assert ask(True, "y")
    kept = json.loads(decisions.read_text())
    assert sorted(kept.values(), key=len) == [{"x": False}, {"x": True, "y": True}]
    assert all("threads, torch " in machine for machine in kept)
    one = next(machine for machine in kept if " 2 threads" in machine)
    decisions.write_text(json.dumps({one: {"x": False}}))  # a person decides
    assert not ask(True)


def test_a_process_asks_anew_for_another_number_of_threads(decisions, monkeypatch):
    monkeypatch.setattr(measure, "_with_other_threads", {})
    before = torch.get_num_threads()
    try:
        for threads, answer, kept in ((2, True, True), (1, False, False), (2, False, True), (1, True, False)):
            torch.set_num_threads(threads)
            assert measure.is_measured("threads", lambda answer=answer: answer) is kept
            assert measure.verdicts()["threads"] is kept
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def test_a_file_of_decisions_that_is_named_decides_for_this_process(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "_file", [])
    monkeypatch.setattr(measure, "_verdicts", {})
    model = blockformer.BlockformerEncoderModel(preset("bert", **STRONG))
    file = tmp_path / "decisions.json"
    model.prepare_for_inference(decisions=file)
    assert measure.decisions_file() == file
    kept = json.loads(file.read_text())[measure.machine()]
    assert measure.is_measured("onednn", lambda: pytest.fail("it is known")) is kept["onednn"]
    for answer in (True, False):
        other = tmp_path / f"{answer}.json"
        other.write_text(json.dumps({measure.machine(): {"x": answer}}))
        model.prepare_for_inference(decisions=str(other))
        assert measure.is_measured("x", lambda: pytest.fail("it is known")) is answer
    for damaged in ("{", "[]", '{"machine": 1}', "no"):
        file.write_text(damaged)
        with pytest.raises(ValueError, match=r"decisions\.json is not a file of decisions"):
            model.prepare_for_inference(decisions=file)
        assert file.read_text() == damaged
    with pytest.raises(ValueError, match="cannot be read"):
        model.prepare_for_inference(decisions=tmp_path)
    assert measure.decisions_file() == other


def test_a_damaged_file_of_decisions_is_written_anew(decisions):
    for damaged in ("", "{", "[]", '{"machine": 1}'):
        decisions.write_text(damaged)
        assert ask(True)
        assert ask(False)
    decisions.unlink()
    decisions.mkdir()
    assert not ask(False)
    assert ask(True)
