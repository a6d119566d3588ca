"""A diagnosis as text, for one screen."""

from collections.abc import Iterator

from .finding import ERROR, Diagnosis, Finding

LONGEST = 12
"""Findings that are shown in full; of further ones only the sentence."""


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
        yield "healthy: names, shapes and settings are those of the released layout"
    elif not diagnosis.is_mendable:
        asked = any(
            each.severity == ERROR and "--" in each.remedy and not each.is_mended for each in diagnosis.findings
        )
        yield "not mendable as it is" + (": the options above settle what the tensors do not show" if asked else "")
    elif any(each.is_mended for each in diagnosis.findings):
        yield "mendable: --mend OUT writes a whole checkpoint; it would do this:"
        yield from (f"    {change}" for change in diagnosis.changes)


def _of_finding(finding: Finding, is_short: bool) -> Iterator[str]:
    first, *rest = finding.sentence.split("\n")
    yield f"{finding.severity:8}{first}"
    if is_short:
        return
    yield from (f"        {line}" for line in rest)
    if finding.remedy:
        yield f"        remedy: {finding.remedy}"
