"""A diagnosis as text, for one screen."""

from collections.abc import Iterator

from .finding import Diagnosis, Finding

LONGEST = 12
"""Findings that are shown in full; of further ones only the sentence."""
ASKED = ("--rename", "--drop", "--set", "--qkv", "--gate-up", "--lora-scale", "--against", "--map", "--key")
"""Options for what the tensors do not show."""


def lines_of(diagnosis: Diagnosis, target: str | None = None) -> Iterator[str]:
    """The lines of a report.

    Args:
        diagnosis: what was found.
        target: the folder that was written, if one was.
    """
    yield f"{diagnosis.source}: {diagnosis.what}"
    for number, each in enumerate(diagnosis.findings):
        yield from _of_finding(each, is_short=number >= LONGEST)
    if target is not None:
        yield f"written: {target}"
        yield from (f"    {change}" for change in diagnosis.changes)
    elif diagnosis.is_healthy:
        yield "healthy: names, shapes and settings match the released layout"
    elif not diagnosis.is_mendable:
        remedies = [each.remedy for each in diagnosis.findings if each.is_open]
        is_asked = any(option in remedy for remedy in remedies for option in ASKED)
        yield "not mendable as it is" + (": the options above say what the tensors do not show" if is_asked else "")
    elif not diagnosis.changes and not any(each.is_mended for each in diagnosis.findings):
        yield "nothing for --mend to change: names and shapes match the released layout"
    else:
        yield "mendable: --mend OUT writes a whole checkpoint; it would do this:"
        yield from (f"    {change}" for change in diagnosis.changes or ["put the weights into model.safetensors"])


def _of_finding(finding: Finding, is_short: bool) -> Iterator[str]:
    first, *rest = finding.sentence.split("\n")
    yield f"{finding.severity:8}{first}"
    if is_short:
        return
    yield from (f"        {line.strip()}" for line in rest)
    if finding.remedy:
        yield f"        remedy: {finding.remedy}"
