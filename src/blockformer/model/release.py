"""Which release of Blockformer this code is of, and the format of the repos that it writes."""

VERSION = "0.1.0"
FORMAT = 1  # of names and meanings of weights and fields; one more once an earlier release would misread them
STAMP = {"blockformer_version": VERSION, "blockformer_format": FORMAT}
"""The entries of `config.json` that say so."""
