"""Judging what other people's tools gave: what is accepted passes, anything else is named."""

import math

import pytest
from client_scripts import accepted, judging, row


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"bound": math.inf},
        {"bound": math.nan},
        {"bound": 0.0},
        {"bound": 0.1, "ours": "ValueError"},
        {"bound": 0.1, "reason": ""},
        {"bound": 0.1, "models": ()},
        {"bound": 0.1, "models": "llama"},
    ],
)
def test_an_entry_without_a_reason_or_a_bound_is_refused(wrong):
    with pytest.raises(ValueError, match="an entry has"):
        accepted.Accepted(**{"tool": "peft", "job": "LoRA", "models": ("llama",), "reason": "PEFT: so it is"} | wrong)


@pytest.fixture
def entries():
    """A difference within a bound, an error of ours, one of theirs, one of both."""
    make = accepted.Accepted
    return (
        make("peft", "train", ("llama", "gpt2"), "PEFT: it rounds", bound=0.2),
        make("peft", "merge", ("llama",), "PEFT: no", ours="ValueError: unknown type"),
        make("peft", "prefix", ("t5",), "PEFT: sizes", theirs="RuntimeError: Sizes"),
        make("peft", "prompt", ("bert",), "PEFT: longer", ours="ValueError: 56", theirs="ValueError: 56"),
        make("trl", "train", ("bert",), "TRL: another tool's", bound=0.2),
    )


AS_ACCEPTED = [
    row(difference=0.1),
    row(model="gpt2", difference=0.2),
    row("merge", ours="ValueError: unknown type 'blockformer_decoder'"),
    row("prefix", "t5", theirs="RuntimeError: Sizes of tensors"),
    row("prompt", "bert", ours="ValueError: 56 and 40", theirs="ValueError: 56 and 40"),
    row("merge", "bert", difference=9e-5),
    row("merge", "gpt2", theirs="skipped: not for this kind"),
]


def with_row(changed):
    """The accepted rows with one in the place of that of its job and model."""
    key = (changed["job"], changed["model"])
    rows = [changed if (each["job"], each["model"]) == key else each for each in AS_ACCEPTED]
    return rows if changed in rows else [*rows, changed]


def test_what_is_accepted_passes_and_keeps_its_reason(entries):
    judged = judging.judge("peft", AS_ACCEPTED, True, entries)
    assert judged.complaints == []
    assert judged.reasons == ["PEFT: it rounds"] * 2 + ["PEFT: no", "PEFT: sizes", "PEFT: longer", "", ""]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (row("merge", "bert", difference=2e-4), "peft, merge, bert: differs and is not accepted: difference 2.0e-04"),
        (row("merge", "bert", difference=math.nan), "peft, merge, bert: differs and is not accepted: difference nan"),
        (row("merge", "new", ours="Error: x"), "peft, merge, new: differs and is not accepted: ours: Error: x; theirs"),
        (row("merge", "bert", ours="skipped: no experts"), "peft, merge, bert: differs and is not accepted: ours: s"),
        (row("merge", "bert", theirs="Error: x"), "peft, merge, bert: differs and is not accepted: ours: works;"),
        (row(difference=math.inf, unequal="a / b"), "peft, train, llama: accepted up to 2.0e-01: a / b"),
        (row(difference=0.21), "peft, train, llama: accepted up to 2.0e-01: difference 2.1e-01"),
        (row(difference=math.nan), "peft, train, llama: accepted up to 2.0e-01: difference nan"),
        (row(ours="ValueError: x"), "peft, train, llama: ours is accepted with 'works', not with 'ValueError: x'"),
        (row("merge", ours="ValueError: other"), "peft, merge, llama: ours is accepted with 'ValueError: unknown"),
        (row("merge", difference=0.5), "peft, merge, llama: ours is accepted with 'ValueError: unknown"),
        (row("merge", ours="ValueError: unknown type", theirs="Error"), "peft, merge, llama: theirs is accepted with"),
        (row("prompt", "bert", ours="works", theirs="ValueError: 56"), "peft, prompt, bert: ours is accepted with"),
        (row(difference=1e-5), "peft, train, llama: accepted, but no longer happens: remove the entry"),
        (row("merge"), "peft, merge, llama: accepted, but no longer happens: remove the entry"),
        (row("prefix", "t5"), "peft, prefix, t5: accepted, but no longer happens: remove the entry"),
    ],
)  # fmt: skip
def test_anything_else_is_complained_of_by_name(entries, changed, message):
    rows = with_row(changed)
    judged = judging.judge("peft", rows, True, entries)
    assert [complaint[: len(message)] for complaint in judged.complaints] == [message]
    assert [each for each, reason in zip(rows, judged.reasons, strict=True) if reason is None] == [changed]


def test_only_a_whole_run_misses_what_it_did_not_do(entries):
    rows = AS_ACCEPTED[1:3]
    assert judging.judge("peft", rows, False, entries).complaints == []
    assert judging.judge("peft", rows, True, entries).complaints == [
        "peft, train, llama: accepted, but never run",
        "peft, prefix, t5: accepted, but never run",
        "peft, prompt, bert: accepted, but never run",
    ]
