"""The command line answers at once: help and wrong arguments come before anything heavy is imported."""

import json
import subprocess
import sys

from blockformer.conversion.arguments import ARTICLES, FAMILIES
from blockformer.conversion.families import registry

# Runs each command line in one process and prints, for each, its status, what it says and what heavy modules are there.
EACH = """
import contextlib, io, json, sys
from blockformer.cli import main
heavy = "torch transformers numpy safetensors huggingface_hub blockformer.api".split()
for arguments in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main(arguments)
        except SystemExit as end:
            status = end.code or 0
    print(json.dumps([status, out.getvalue(), [name for name in heavy if name in sys.modules]]))
"""


def test_help_and_wrong_arguments_come_before_torch(tmp_path):
    for name in ("model", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "weights.pt").touch()
    model, there, new, weights = (str(tmp_path / name) for name in ("model", "there", "new", "weights.pt"))
    cases = [
        (["--help"], 0, "Make a self-contained repo"),
        (["--version"], 0, "."),
        *(
            ([command, "--help"], 0, "Example: ")
            for command in ("convert", "inspect", "doctor", "export", "lab", "demo")
        ),
        (["convert", "--help"], 0, "article-transformer"),
        (["nonsense"], 2, "No such command"),
        (["convert", "--nonsense"], 2, "No such option: --nonsense"),
        (["convert", model], 2, "Missing argument"),
        (["demo", "--minutes", "0"], 2, "--minutes"),
        (["convert", model, there], 1, "already exists"),
        (["convert", model, model, "--force"], 1, "is the source"),
        (["convert", f"{model}/nowhere", new], 1, "no such folder"),
        (["convert", model, new, "--to", "gguf"], 1, "--to must be one of"),
        (["convert", model, new, "--family", "qwen4"], 1, "Did you mean 'qwen3'?"),
        (["convert", model, new, "--dtype", "int3"], 1, "dtype must be one of"),
        (
            ["convert", model, new, "--dequantize", "bf16", "--dtype", "bf16"],
            1,
            "(--dequantize) cannot be combined with",
        ),
        (["convert", model, new, "--max-shard-size", "big"], 1, "'big'"),
        (["convert", weights, new, "--family", "article-gpt"], 1, "needs config (--config)"),
        (["export", f"{model}/nowhere", new], 1, "no such folder"),
        (["export", model, there], 1, "already exists"),
        (["inspect", f"{model}/nowhere/config.json"], 1, "no such file"),
        (["demo", "--output", model], 1, "holds files that the demo did not make"),
        (["lab", f"{model}/nowhere.yaml"], 1, "no such file"),
        (["lab", f"{model}/config.json", "--shard", "4/3"], 2, "--shard must be like 3/8"),
    ]
    command = [sys.executable, "-c", EACH, json.dumps([arguments for arguments, _, _ in cases])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for (arguments, status, message), line in zip(cases, done.stdout.splitlines(), strict=True):
        ended, said, heavy = json.loads(line)
        assert (ended, heavy) == (status, []), (arguments, said)
        assert message in " ".join(said.replace("│", " ").split()), arguments
        assert status != 1 or (said.startswith("error: ") and said.count("\n") == 1), said
    assert not (tmp_path / "new").exists()


def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "blockformer", "convert"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "blockformer convert" in done.stderr


def test_the_names_that_arguments_are_checked_against_are_those_that_there_are():
    assert sorted(FAMILIES) == sorted(registry.FAMILIES)
    assert sorted(ARTICLES) == sorted(registry.ARTICLES)
    assert all(registry.family_by_name(name).is_file == (name in ARTICLES) for name in [*FAMILIES, *ARTICLES])
