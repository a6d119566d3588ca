"""The page of a source: a folder, a Hub id, a config or a preset."""

from blockformer.conversion.summary import summarize

from .build import page
from .facts import Facts


def page_of(src: str, text: str | None = None, beside: str | None = None, revision: str | None = None) -> str:
    """The HTML of a model's page.

    Args:
        src: a folder, a Hub id (a `revision` of it), a `config.json` or a preset.
        text: what the model reads on it; needs weights and a tokenizer.
        beside: a source to compare with, too.

    Raises:
        ConversionError: a source is none, or there is nothing to read the text with.
    """
    reference = None
    if beside is not None:
        other = summarize(beside)
        reference = (other.name.removeprefix("preset "), Facts(other.config))
    summary = summarize(src, revision)
    facts = Facts(summary.config)
    return page(facts, summary.name, summary.notes, reference)
