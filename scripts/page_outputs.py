"""Run the blocks of pages and write below each what it printed, where the page shows an output.

Usage: python scripts/page_outputs.py docs/publish.md ...

A block of `python` or `console` may be followed by one of `text` or `log`. `text` is what it prints everywhere; the
tests compare it, except for durations. `log` is what it printed here once: figures that differ from machine to machine.
"""

import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$(?:(\n\n?)```(text|log)\n(.*?)^```$)?", re.M | re.S)
STATUS = re.compile(r"^\(exit status .*\)$", re.M)
SECONDS = re.compile(r"\d+(\.\d+)? s\b")
ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
CHAT = "HuggingFaceTB/SmolLM2-135M-Instruct"
CHAT_FOLDER = "CHAT_MODEL"
"""The variable that names a folder with the real one; without it, a small Llama with random weights has its name."""


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, body) of what a page runs."""
    return [(found[1], found[2]) for found in BLOCK.finditer(text)]


def settled(output: str) -> str:
    """An output without what differs from run to run."""
    lines = (line.rstrip() for line in SECONDS.sub("1 s", output).strip("\n").splitlines())
    return "\n".join(lines) + "\n"


def statuses(output: str) -> list[str]:
    """The lines of an output that say how its commands failed."""
    return STATUS.findall(output)


def shown(text: str) -> list[tuple[str, str]]:
    """(`text`, `log` or "", output) below each block that a page runs."""
    return [(found[4] or "", found[5] or "") for found in BLOCK.finditer(text)]


def written(text: str, outputs: list[str]) -> str:
    """The page with these outputs in place of those that it shows."""
    remaining = iter(outputs)

    def block(found: re.Match) -> str:
        output = next(remaining)
        if not found[4] or not output:  # nothing is shown, or the block was left out
            return found[0]
        lines = "\n".join(line.rstrip() for line in output.strip("\n").splitlines())
        return f"```{found[1]}\n{found[2]}```{found[3]}```{found[4]}\n{lines}\n```"

    return BLOCK.sub(block, text)


def small_chat_model(folder: Path) -> Path:
    """A folder with a Llama of two layers, random, and a tokenizer of bytes with a chat template."""
    if folder.exists():
        return folder
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({sign: number for number, sign in enumerate([*signs, "<|im_end|>"])}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    named = dict.fromkeys(("eos_token", "pad_token"), "<|im_end|>")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **named).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(signs) + 1, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    ends = {"eos_token_id": len(signs), "pad_token_id": len(signs), "bos_token_id": len(signs)}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ends)).save_pretrained(folder)
    return folder


@contextlib.contextmanager
def reader(folder: Path, is_demo_short: bool = False) -> Iterator[Callable[[Path], list[str]]]:
    """A function that gives what the blocks of a page print.

    Each page has a process and a folder of its own, and all have one Hub on loopback. A block that fails is an
    AssertionError.

    Args:
        folder: for everything that they write.
        is_demo_short: `blockformer demo --quick` trains and searches less than it says (`tests/short_demo.py`).
    """
    tests = ROOT / "tests"
    if str(tests) not in sys.path:
        sys.path.insert(0, str(tests))
    from fork_server import ForkServer, program
    from hub_server import Hub

    from blockformer.demo.search import encoder_folder

    hub = Hub({"hf_ann": "ann"})
    settings = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_ann"}
    settings |= dict.fromkeys(("HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_PROGRESS_BARS"), "1")
    server = ForkServer(folder / "home", settings)

    def run(page: Path) -> list[str]:
        desk = Path(tempfile.mkdtemp(dir=folder))
        (desk / ENCODER).parent.mkdir(parents=True)
        (desk / ENCODER).symlink_to(encoder_folder())
        text = page.read_text(encoding="utf-8")
        if CHAT in text:
            (desk / CHAT).parent.mkdir()
            (desk / CHAT).symlink_to(os.environ.get(CHAT_FOLDER) or small_chat_model(folder / "chat"))
        (desk / "examples").symlink_to(ROOT / "examples")
        job = json.dumps(blocks(text))
        short = [tests] if is_demo_short else []
        said = json.loads(server.said(program("run_page"), job, *short, folder=desk, elsewhere=False))
        return [each.replace(hub.url, "https://huggingface.co").replace(f"{desk}/", "") for each in said]

    try:
        yield run
    finally:
        server.close()
        hub.stop()


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    with tempfile.TemporaryDirectory() as folder, reader(Path(folder)) as run:
        for page in map(Path, sys.argv[1:]):
            page.write_text(written(page.read_text(encoding="utf-8"), run(page)), encoding="utf-8")


if __name__ == "__main__":
    main()
