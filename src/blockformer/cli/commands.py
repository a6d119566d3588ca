"""The commands: `blockformer convert | inspect | doctor | export | verify | upgrade | chat | eval | lab | demo`.

Errors are one sentence on stderr, with exit status 1 (2: a wrong command line, 3: converted, but could not be
compared, 130: Ctrl-C); `--debug`, before or after the command, shows the traceback. The module that does a
command's work is imported when the command runs.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .arguments import (
    Bidirectional,
    Cast,
    ChatTemplate,
    Dtype,
    Experts,
    Force,
    KvHeads,
    Layers,
    LocalFilesOnly,
    Pooling,
    Prompts,
    Revision,
    ShardSize,
    Source,
    StrictFinite,
    Subfolder,
    Target,
    Tokens,
    Topology,
    Variant,
    reading_of,
)
from .doctor import doctor
from .lab import lab
from .trust import upgrade, verify

app = typer.Typer(
    name="blockformer",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(name: str, epilog: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command. Ctrl-C ends it with status 130, as shells expect, with nothing unfinished left."""

    def registered(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr)
                raise SystemExit(130) from None

        return app.command(name, epilog=epilog)(run)

    return registered


def _show_version(wanted: bool) -> None:
    if wanted:
        import blockformer

        print(blockformer.__version__)
        raise typer.Exit


@app.callback()
def common(
    debug: Annotated[bool, typer.Option("--debug", help="Show an error's traceback; also after the command.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    block: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Register your own blocks from this file first; may be repeated."),
    ] = None,
) -> None:
    """Every classic Transformer, from one small set of blocks: convert, inspect, publish, train, compare, chat."""
    if block:
        import blockformer

        for file in block:
            blockformer.register(file)


@command(
    "convert",
    "Example: [bold]blockformer convert Qwen/Qwen3-0.6B qwen3 --dtype bfloat16[/bold]\n\n"
    "An article's weights: [bold]blockformer convert weights.pt gpt --family article-gpt --config settings.json[/bold]",
)
def convert(
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A folder, a Hub id, a checkpoint of training code (docs/doctor.md), or a weight file of an article's "
            "code (see --family).",
        ),
    ],
    dst: Target,
    to: Annotated[
        str,
        typer.Option(
            metavar="LAYOUT",
            help="'blockformer', 'official' (the way back), or the layout of training code: 'litgpt', 'torchtune', "
            "'torchtitan', 'nanochat', 'x-transformers'.",
        ),
    ] = "blockformer",
    family: Annotated[
        str | None,
        typer.Option(
            help="The official family; detected by default. For a state dict of a model that an article prints: "
            "article-gpt, article-encoder-decoder or article-transformer (docs/articles.md)."
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="The settings of a weight file, as JSON; needs --family.")
    ] = None,
    into: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="With --to official, for the text model of a checkpoint with a vision tower: that checkpoint. DST "
            "becomes a copy of it with this text model.",
        ),
    ] = None,
    dtype: Cast = None,
    dequantize: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE", help="Turn 4-bit weights into plain weights of this dtype; by default they stay in 4 bits."
        ),
    ] = None,
    max_shard_size: ShardSize = "5GB",
    verify: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="Run both models on the same input and compare: full, quick (one text), or none. By default full up "
            "to half a billion parameters, then quick. Exit status 3: nothing could be compared.",
        ),
    ] = None,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Short for --verify none.")] = False,
    revision: Revision = None,
    subfolder: Subfolder = None,
    variant: Variant = None,
    local_files_only: LocalFilesOnly = False,
    force: Force = False,
    strict_finite: StrictFinite = False,
    topology: Topology = None,
    layers: Layers = None,
    kv_heads: KvHeads = None,
    experts: Experts = None,
    tokens: Tokens = None,
    template: ChatTemplate = None,
    pooling: Pooling = None,
    bidirectional: Bidirectional = False,
    prompt: Prompts = None,
) -> None:
    """Convert an official checkpoint into a self-contained repo, or such a repo back.

    The target appears complete or not at all. No code of the source is ever run.
    """
    from .checkpoints import run_convert

    shape: dict[str, Any] = {"topology": topology, "layers": layers, "kv_heads": kv_heads, "experts": experts}
    shape |= {"tokens": tokens, "template": template, "pooling": pooling, "prompts": prompt or None}
    shape["bidirectional"] = bidirectional or None
    run_convert(
        src,
        dst,
        to=to,
        family=family,
        config=config,
        into=into,
        dtype=dtype,
        dequantize=dequantize,
        max_shard_size=max_shard_size,
        verify=verify,
        no_verify=no_verify,
        **reading_of(revision, subfolder, variant, local_files_only),
        force=force,
        strict_finite=strict_finite,
        shape={name: value for name, value in shape.items() if value is not None},
    )


@command(
    "inspect",
    "Example: [bold]blockformer inspect Qwen/Qwen3-14B[/bold]\n\n"
    'As a page: [bold]blockformer inspect Qwen/Qwen3-0.6B --html page.html --compare bert --text "I love tea."[/bold]',
)
def inspect(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A folder, a Hub id, a config.json or a preset.")],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one HTML page that shows the model, offline.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(metavar="TEXT", help="With --html: show this text passing through the model.")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="REF", help="With --html: mark where it differs from this model.")
    ] = None,
    beside: Annotated[str | None, typer.Option(hidden=True, help="The former name of --compare.")] = None,
    revision: Revision = None,
    subfolder: Subfolder = None,
    variant: Variant = None,
    local_files_only: LocalFilesOnly = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing page.")] = False,
) -> None:
    """Show settings, layers, parameters, memory and cache size of a model. Weights are only read for --text."""
    from .inspect import run_inspect, run_page

    if beside is not None:
        if compare is not None:
            raise typer.BadParameter("--beside is the former name of --compare: use one of them")
        compare = beside
    if html is None and (text is not None or compare is not None or force):
        raise typer.BadParameter("--text, --compare and --force need --html: add it, or leave them out")
    if variant is not None and text is None:
        raise typer.BadParameter("--variant chooses weights, which are only read for --text: add it, or leave it out")
    reading = reading_of(revision, subfolder, variant, local_files_only)
    if html is None:
        run_inspect(src, **reading)
    else:
        run_page(src, html, text, compare, force, **reading)


command(
    "doctor",
    "Example: [bold]blockformer doctor trainer-output/checkpoint-500 --against Qwen/Qwen3-0.6B[/bold]\n\n"
    "Mended: [bold]blockformer doctor checkpoint-500 --mend my-model[/bold]",
)(doctor)


@command("export", "Example: [bold]blockformer export trainer-output/checkpoint-500 my-repo[/bold]")
def export(
    src: Source,
    dst: Target,
    max_shard_size: ShardSize = "5GB",
    revision: Revision = None,
    subfolder: Subfolder = None,
    variant: Variant = None,
    local_files_only: LocalFilesOnly = False,
    force: Force = False,
    strict_finite: StrictFinite = False,
    sign: Annotated[str | None, typer.Option(metavar="KEY", help="Sign the repo with this private key (PEM).")] = None,
) -> None:
    """Make a self-contained repo of a saved Blockformer model, such as a Trainer checkpoint.

    Anyone can load it with trust_remote_code=True and no other package than PyTorch and transformers.
    """
    from .checkpoints import run_export

    kept = {"max_shard_size": max_shard_size, "force": force, "strict_finite": strict_finite}
    run_export(src, dst, sign, **kept, **reading_of(revision, subfolder, variant, local_files_only))


command("verify", "Example: [bold]blockformer verify somebody/their-repo[/bold]")(verify)
command("upgrade", "Example: [bold]blockformer upgrade my-repo[/bold]")(upgrade)


@command("chat", "Example: [bold]blockformer chat Qwen/Qwen3-0.6B[/bold]")
def chat(
    src: Source,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system prompt.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the most likely token; no sampling.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens in an answer.")] = 512,
    dtype: Dtype = None,
    revision: Revision = None,
    subfolder: Subfolder = None,
    variant: Variant = None,
    local_files_only: LocalFilesOnly = False,
) -> None:
    """Talk to a model, official or ours. Lines are formatted by its chat template if it has one."""
    from .text import run_chat

    reading = reading_of(revision, subfolder, variant, local_files_only)
    run_chat(src, dtype, system, greedy, max_new_tokens, **reading)


@command(
    "eval",
    "Example: [bold]blockformer eval Qwen/Qwen3-0.6B README.md[/bold]\n\n"
    "With lm-eval: [bold]blockformer eval Qwen/Qwen3-0.6B --tasks arc_easy --limit 100[/bold]",
)
def evaluate(
    src: Source,
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE", help="Texts in UTF-8.")] = None,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Tasks of lm-eval, or YAML files that define some: arc_easy,hellaswag."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Largest number of questions per task.")] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per window; by default the model's context.")
    ] = None,
    dtype: Dtype = None,
    revision: Revision = None,
    subfolder: Subfolder = None,
    variant: Variant = None,
    local_files_only: LocalFilesOnly = False,
) -> None:
    """Measure a causal language model, official or ours: perplexity and bits per byte on text files, or lm-eval tasks.

    Tasks need lm-eval (pip install lm-eval), which fetches their questions from the Hub.
    """
    from .text import run_eval, run_tasks

    if bool(files) == bool(tasks):
        raise typer.BadParameter("name text files, or tasks with --tasks")
    if limit is not None and not tasks:
        raise typer.BadParameter("--limit is for --tasks: leave it out, or add --tasks")
    reading = reading_of(revision, subfolder, variant, local_files_only)
    if tasks:
        run_tasks(src, tasks.split(","), dtype, length, limit, **reading)
    else:
        run_eval(src, files or [], dtype, length, **reading)


command(
    "lab",
    "Example: [bold]blockformer lab examples/lab/blocks.yaml --output blocks[/bold]\n\n"
    "Two processes that share a folder: [bold]... --output blocks --shard 1/2[/bold] and [bold]--shard 2/2[/bold]",
)(lab)


@command("demo", "Example: [bold]blockformer demo --output blockformer-demo[/bold]")
def demo(
    output: Annotated[Path, typer.Option(help="The folder to make.")] = Path("blockformer-demo"),
    minutes: Annotated[float, typer.Option(min=0.01, help="Train at most this long.")] = 2.0,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model and 200 steps, to see that it works.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write into OUTPUT even if the demo did not make it.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the text's order.")] = 0,
) -> None:
    """Train, publish, reload and convert a small model on real text, offline."""
    from rich.console import Console

    from ..demo import steps

    steps.prepare(output, force)
    steps.run_demo(output, steps.QUICK if quick else steps.Sizes(), minutes * 60, seed, Console())
