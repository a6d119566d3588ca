"""`blockformer doctor`: what is wrong with a checkpoint, on one screen or as JSON, and a mended one."""

import json
from typing import Annotated, Any

import typer

from .arguments import Cast, Force, LocalFilesOnly, Revision, ShardSize, Subfolder, reading_of


def doctor(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A folder, a file with weights, or a Hub id.")],
    against: Annotated[
        str | None,
        typer.Option(
            metavar="OFFICIAL",
            help="The base model: compare weights, config and tokenizer with it; merge an adapter into it.",
        ),
    ] = None,
    mend: Annotated[
        str | None, typer.Option(metavar="OUT", help="Write a complete checkpoint in the released layout.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Check names, shapes and settings only, not the values.")
    ] = False,
    family: Annotated[str | None, typer.Option(help="The official family; detected by default.")] = None,
    rename: Annotated[
        list[str] | None, typer.Option(metavar="OLD=NEW", help="Rename parts of tensor names; may be repeated.")
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Leave this tensor out, or all that match a pattern with *; may be repeated."
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change an entry of config.json; may be repeated."),
    ] = None,
    qkv: Annotated[
        str | None,
        typer.Option(
            metavar="ORDER", help="Order of rows in a joined query, key and value matrix: stacked or by-head."
        ),
    ] = None,
    gate_up: Annotated[
        str | None,
        typer.Option(metavar="ORDER", help="Order of rows in joined gate and up projections: gate-first or up-first."),
    ] = None,
    lora_scale: Annotated[
        float | None, typer.Option(help="Merge an adapter that is stored with the weights, with this scale.")
    ] = None,
    dtype: Cast = None,
    names: Annotated[
        str | None,
        typer.Option(
            "--map",
            metavar="NAMES.json",
            help="For weights of your own code: a file that maps its tensor names to a family's.",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES.json",
            help="Write a draft of the file for --map: what shapes and names show, and a question for everything else.",
        ),
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Safetensors with input_ids and logits of your own code, which the mended model must reproduce.",
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option(metavar="KEY", help="The key of the model in a pickled file, such as ema.")
    ] = None,
    tiktoken: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Whose rank list the tokenizer uses (llama3, llama3.1, qwen, qwen2, qwen2.5, qwen3), or a JSON file "
            "with pat_str and special_tokens.",
        ),
    ] = None,
    max_shard_size: ShardSize = "5GB",
    force: Force = False,
    revision: Revision = None,
    subfolder: Subfolder = None,
    local_files_only: LocalFilesOnly = False,
) -> None:
    """Find out what a checkpoint of any trainer is and what is wrong with it, and mend it.

    Reads safetensors, pickles, distributed checkpoints, FSDP shards and adapters, and runs none of their code.

    Exit status 0: healthy, 1: an error, 3: warnings only.
    """
    from blockformer.conversion import ConversionError
    from blockformer.doctor import Options, diagnose
    from blockformer.doctor import mend as write_mended
    from blockformer.doctor.drafting import draft as write_draft
    from blockformer.doctor.options import settings_from
    from blockformer.doctor.report import lines_of

    from ..files.errors import printable
    from .checkpoints import progress_bar

    if draft is not None and (mend is not None or names is not None):
        raise ConversionError("--draft writes a file of names: leave out --map and --mend, which read it")
    options = Options(
        settings=settings_from(list(setting or ())),
        family=family,
        renames=tuple(rename or ()),
        dropped=tuple(drop or ()),
        qkv=qkv,
        gate_up=gate_up,
        lora_scale=lora_scale,
        dtype=dtype,
        names=names,
        tiktoken=tiktoken,
        check=check,
        key=key,
    )
    reading = reading_of(revision, subfolder, None, local_files_only)
    if draft is not None:
        for line in write_draft(src, draft, against, options=options, **reading):
            print(printable(line))
        return
    needs_mend = {
        "--force": (force, "it replaces the folder"),
        "--check": (check is not None, "it runs the model"),
        "--tiktoken": (tiktoken is not None, "it makes the tokenizer"),
    }
    for flag, (is_set, what) in needs_mend.items():
        if is_set and mend is None:
            raise ConversionError(f"{flag} needs --mend: {what} that --mend writes")
    with progress_bar() as report_progress:
        if mend is None:
            found = diagnose(src, against, options=options, quick=quick, progress=report_progress, **reading)
        else:
            how: dict[str, Any] = {"force": force, "max_shard_size": max_shard_size, "progress": report_progress}
            found = write_mended(src, mend, against, options=options, **how, **reading)
    if as_json:
        print(json.dumps(found.as_json(), indent=1))
    else:
        for line in lines_of(found, mend):
            print(printable(line))
    if mend is None and found.status:
        raise SystemExit(found.status)
