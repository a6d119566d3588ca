"""The arguments and options that several commands share."""

from typing import Annotated, Any

import typer

Source = Annotated[str, typer.Argument(metavar="SRC", help="A folder or a Hub id.")]
Target = Annotated[str, typer.Argument(metavar="DST", help="The folder to make.")]
ShardSize = Annotated[str, typer.Option(metavar="SIZE", help="Largest size of a weight file.")]
Force = Annotated[bool, typer.Option("--force", help="Replace a folder that Blockformer made and nobody changed.")]
StrictFinite = Annotated[
    bool, typer.Option("--strict-finite", help="Refuse NaN and infinite weights instead of reporting them.")
]
Revision = Annotated[str | None, typer.Option(metavar="NAME", help="For a Hub id: a branch, tag or commit.")]
Subfolder = Annotated[str | None, typer.Option(metavar="NAME", help="The folder inside SRC that holds the model.")]
Variant = Annotated[
    str | None, typer.Option(metavar="NAME", help="Read these weights: fp16 reads model.fp16.safetensors.")
]
LocalFilesOnly = Annotated[bool, typer.Option("--local-files-only", help="For a Hub id: read the local cache only.")]
Dtype = Annotated[str | None, typer.Option(help="Load the weights as float32, bfloat16 or float16.")]
Cast = Annotated[str | None, typer.Option(help="Cast the weights: float32, bfloat16 or float16.")]

Topology = Annotated[
    str | None,
    typer.Option(
        "--as",
        metavar="WHAT",
        help="Turn it into a decoder, an encoder or an encoder-decoder, which then needs training; or a decoder into a "
        "reranker or an embedder for sentence-transformers. 'decoder' undoes these two.",
    ),
]
Layers = Annotated[str | None, typer.Option(metavar="LIST", help="Keep these layers, such as 0,2,4 or 0-3,8-11.")]
KvHeads = Annotated[int | None, typer.Option(help="Pool key and value heads into this many.")]
Experts = Annotated[int | None, typer.Option(help="Copy feed-forward networks into this many experts.")]
Tokens = Annotated[
    str | None,
    typer.Option(
        metavar="NO,YES", help="For --as reranker: the score is the logit of the second token minus that of the first."
    ),
]
ChatTemplate = Annotated[
    str | None, typer.Option(metavar="FILE", help="For --as reranker: the chat template that formats a pair.")
]
Pooling = Annotated[
    str | None,
    typer.Option(help="For --as embedder: lasttoken (the default), or mean (the default with --bidirectional)."),
]
Bidirectional = Annotated[
    bool, typer.Option("--bidirectional", help="For --as embedder: let tokens see later ones too; needs training.")
]
Prompts = Annotated[
    list[str] | None,
    typer.Option("--prompt", metavar="NAME=TEXT", help="For --as embedder: a prefix for texts; may be repeated."),
]


def reading_of(
    revision: str | None, subfolder: str | None, variant: str | None, local_files_only: bool
) -> dict[str, Any]:
    """The options that say which files of a source are read; see `blockformer.conversion.options.Reading`."""
    given = {"revision": revision, "subfolder": subfolder, "variant": variant, "local_files_only": local_files_only}
    return {name: value for name, value in given.items() if value not in (None, False)}
