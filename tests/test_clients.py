"""Other people's tools: what they need of a model, and that the page of their results is whole."""

import inspect
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import page_blocks
import pytest
import torch
from client_scripts import SCRIPTS, accepted, environments, row, runner, suite
from example_files import EXAMPLES, load
from pairs import SIZES, assert_close, official_copy, pair, token_ids
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaForSequenceClassification,
)

import blockformer
from blockformer.demo.search import docstrings, encoder_folder
from blockformer.model.compat import CACHE

ROOT = EXAMPLES.parent
PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")


def rows_of(name):
    """The rows of a client's table on the page, cell by cell."""
    body = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- end of {name} -->", PAGE, re.S)[1]
    lines = [line for line in body.splitlines() if line.startswith("| ")]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[1:]]


def test_every_client_has_its_script_and_its_results():
    for name, client in runner.CLIENTS.items():
        assert (SCRIPTS / client.script).is_file(), name
        assert rows_of(name), name
    scripts = {path.name for path in SCRIPTS.glob("with_*.py")}
    assert scripts <= {client.script for client in runner.CLIENTS.values()}


def test_the_page_gives_the_reasons_of_the_accepted_differences():
    for name in runner.CLIENTS:
        wanted = {(entry.job, model): entry.reason for entry in accepted.ACCEPTED if entry.tool == name
                  for model in entry.models}  # fmt: skip
        for job, models, ours, theirs, result in rows_of(name):
            assert all((job, ours, theirs))
            if name == "common-suite":
                kind = next(kind for kind, text in runner.KINDS.items() if text == job)
                own = Counter(wanted.pop((test, model)) for test, model in list(wanted) if model == kind)
                assert (result == "the same") == (not own)
                said = re.findall(r"<br>(.+?) \((\d+) tests?\)", result)
                assert {reason: int(count) for reason, count in said} == own, kind
            else:
                for model in models.split(", "):
                    assert result == wanted.pop((job, model), "the same"), (name, job, model)
        assert not wanted, f"{name}: not on the page"


def test_each_difference_is_accepted_once_and_of_a_client():
    keys = [(entry.tool, entry.job, model) for entry in accepted.ACCEPTED for model in entry.models]
    assert len(set(keys)) == len(keys)
    assert {tool for tool, _, _ in keys} <= set(runner.CLIENTS)


@pytest.fixture
def run_main(tmp_path, monkeypatch):
    """What `main` returns and writes on the page for a client that prints certain rows."""

    def run(rows, entries, *arguments, quick=("x",), others=()):
        script, page = tmp_path / "tool.py", tmp_path / "clients.md"
        wanted = f"rows = {rows!r}\nprint(*map(json.dumps, rows if sys.argv[2:] == [] else rows[:1]), sep='\\n')"
        script.write_text(f"import json, sys\nnan = inf = float('inf')\n{wanted}")
        page.write_text("<!-- tool -->\nold\n<!-- end of tool -->")
        made = runner.Client(str(script), quick=list(quick))
        monkeypatch.setattr(runner, "CLIENTS", {**dict(others), "tool": made})
        monkeypatch.setattr(runner, "PAGE", page)
        monkeypatch.setattr(runner, "judge", lambda *given: judging_judge(*given, entries))
        monkeypatch.setattr(runner.subprocess, "run", without_models)
        monkeypatch.setattr("sys.argv", ["clients", *arguments])
        return runner.main(), page.read_text()

    judging_judge, plain_run = runner.judge, runner.subprocess.run

    def without_models(command, **settings):
        return None if "models.py" in str(command[1]) else plain_run(command, **settings)

    return run


def test_a_run_fails_on_what_is_not_accepted_and_leaves_the_page(run_main, capsys):
    entry = accepted.Accepted("tool", "train", ("gpt2",), "the tool: rounds", bound=0.2)
    rows = [row(), row(model="gpt2", difference=0.1)]
    status, page = run_main(rows, [entry])
    assert status == 0
    assert "| train | gpt2 | works | works | the tool: rounds |" in page
    assert run_main(rows, []) == (1, "<!-- tool -->\nold\n<!-- end of tool -->")
    assert "tool, train, gpt2: differs and is not accepted: difference 1.0e-01" in capsys.readouterr().out
    assert run_main([row(), row(model="gpt2")], [entry])[0] == 1
    assert "tool, train, gpt2: accepted, but no longer happens" in capsys.readouterr().out
    assert run_main([row(), row(model="gpt2", ours="Error: x")], [entry])[0] == 1
    assert run_main([row()], [entry])[0] == 1
    assert "tool, train, gpt2: accepted, but never run" in capsys.readouterr().out


def test_a_script_that_fails_fails_the_run_and_leaves_the_others(run_main, tmp_path, capsys):
    (tmp_path / "broken.py").write_text("raise ValueError('no network')")
    broken = ("broken", runner.Client(str(tmp_path / "broken.py"), quick=[]))
    status, page = run_main([row(), row(model="gpt2", difference=0.9)], [], others=[broken])
    said = capsys.readouterr().out
    assert status == 1
    assert "old" in page
    assert "broken.py ended with 1" in said
    assert "ValueError: no network" in said
    assert "tool, train, gpt2: differs and is not accepted" in said
    status, page = run_main([row()], [], others=[broken])
    assert status == 1
    assert "| train | llama | works | works | the same |" in page


def test_a_quick_run_is_judged_by_what_it_does(run_main):
    entry = accepted.Accepted("tool", "train", ("gpt2",), "the tool: rounds", bound=0.2)
    assert run_main([row(), row(model="gpt2", difference=0.9)], [entry], "--quick") == (
        0,
        "<!-- tool -->\nold\n<!-- end of tool -->",
    )
    assert run_main([row(difference=0.9), row(model="gpt2")], [entry], "--quick")[0] == 1
    assert run_main([row(model="gpt2")], [entry], "--quick")[0] == 1  # no longer happens
    assert run_main([row()], [entry], "--quick", quick=())[0] == 1  # a quick run that is the whole one
    assert run_main([row()], [entry], "--arguments", "llama")[0] == 0


def test_a_table_joins_what_is_alike_and_takes_the_place_of_the_old_one():
    rows = [row(model=model) for model in ("a", "b")] + [row("merge", "a", ours="Error: x|y; more of it")]
    page = "before\n<!-- tool -->\nold\n<!-- end of tool -->\nafter"
    text = runner.table("tool", rows, ["", "", "tool: it does not"])
    written = runner.put(page, "tool", text)
    assert written.splitlines() == [
        "before",
        "<!-- tool -->",
        "`tool` 1.2",
        "",
        "| job | models | Blockformer | transformers | results |",
        "|---|---|---|---|---|",
        "| train | a, b | works | works | the same |",
        r"| merge | a | Error: x\|y | works | tool: it does not |",
        "<!-- end of tool -->",
        "after",
    ]
    assert runner.put(written, "tool", text) == written
    with pytest.raises(SystemExit, match="no marks for other"):
        runner.put(page, "other", text)


def test_the_table_of_the_common_suite_counts_tests_and_those_that_differ():
    rows = [row("test_a", "bert"), row("test_b", "bert", ours="Error: x"), row("test_c", "bert", theirs="skipped: y")]
    rows += [row("test_d", "bert", ours="Error: x"), row("test_a", "gpt2")]
    lines = runner.table("common-suite", rows, ["", "ours: so", "", "ours: so", ""]).splitlines()[4:]
    bert, gpt2 = (runner.KINDS[kind] for kind in ("bert", "gpt2"))
    results = "the same, but<br>ours: so (2 tests)"
    assert lines == [
        f"| {bert} |  | 2 passed, 2 failed | 3 passed, 0 failed | {results} |",
        f"| {gpt2} |  | 1 passed, 0 failed | 1 passed, 0 failed | the same |",
    ]


def test_an_environment_is_made_again_when_its_requirements_change(tmp_path, monkeypatch):
    installed = []

    def create(folder):
        (folder / "lib" / "python3.11" / "site-packages").mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(environments, "ROOT", tmp_path)
    monkeypatch.setattr(environments.venv, "EnvBuilder", lambda **_: SimpleNamespace(create=create))
    monkeypatch.setattr(environments.subprocess, "run", lambda command, **_: installed.append(command[-1]))
    for requirement in ("trl==1.15", "trl==1.15", "trl==1.16", "trl==1.16"):
        environments.build("trl", [requirement])
    assert installed == ["trl==1.15", "trl==1.16"]
    environments.build("trl", ["trl==1.16"], fresh=True)
    assert installed[2:] == ["trl==1.16"]


def test_rows_of_a_script_that_fails_are_not_taken(tmp_path, monkeypatch):
    script = tmp_path / "tool.py"
    monkeypatch.setitem(runner.CLIENTS, "tool", runner.Client(str(script), models=False))
    script.write_text(f"print({json.dumps(row())!r})")
    assert runner.run("tool", sys.executable, tmp_path, []) == [row()]
    for text, message in ((script.read_text() + "\nraise ValueError('broken')", "broken"), ("", "ended with 0")):
        script.write_text(text)
        with pytest.raises(runner.ScriptFailed, match=message):
            runner.run("tool", sys.executable, tmp_path, [])


def test_the_common_suite_gives_a_row_for_what_one_side_runs():
    ours = {"test_a": "works", "test_b": "skipped: x", "test_c": "skipped: no experts", "test_d": "Error: x"}
    theirs = {"test_a": "works", "test_b": "skipped: y", "test_c": "works", "test_e": "works"}
    found = {each["job"]: (each["ours"], each["theirs"]) for each in suite_rows(ours, theirs)}
    assert found == {
        "test_a": ("works", "works"),
        "test_c": ("skipped: no experts", "works"),
        "test_d": ("Error: x", "not there"),
        "test_e": ("not there", "works"),
    }
    complaints = runner.judge("common-suite", suite_rows(ours, theirs), False, ()).complaints
    assert [complaint.split(": ")[0] for complaint in complaints] == [
        f"common-suite, {test}, bert" for test in ("test_c", "test_d", "test_e")
    ]


def suite_rows(ours, theirs):
    return suite.rows_of("bert", "5.23.0", ours, theirs)


def test_generation_tests_that_cannot_be_had_are_not_left_out_silently(tmp_path, monkeypatch):
    sources = tmp_path / "transformers-9.9"
    (sources / "tests").mkdir(parents=True)
    path = sources / "tests" / "generation" / "test_utils.py"
    monkeypatch.delenv("GENERATION_TESTS", raising=False)
    monkeypatch.setattr(
        suite, "ADDRESS", (tmp_path / "{version}" / "{name}").as_uri().replace("%7B", "{").replace("%7D", "}")
    )
    with pytest.raises(SystemExit, match="set GENERATION_TESTS to a copy"):
        suite.put_generation_tests(sources, "9.9", False)
    suite.put_generation_tests(sources, "9.9", True)
    assert path.read_text() == suite.NO_GENERATION
    origin = tmp_path / "9.9" / "generation" / "test_utils.py"
    origin.parent.mkdir(parents=True)
    origin.write_text("fetched")
    suite.put_generation_tests(sources, "9.9", False)
    origin.unlink()
    suite.put_generation_tests(sources, "9.9", False)
    assert path.read_text() == "fetched"
    (tmp_path / "copy.py").write_text("given")
    monkeypatch.setenv("GENERATION_TESTS", str(tmp_path / "copy.py"))
    suite.put_generation_tests(sources, "9.9", False)
    assert path.read_text() == "given"


# What a script says of two results, in a process of its own: it puts this package out of reach


def test_the_difference_of_results(fresh_numbers):
    same, small, other_text, other_count, shapes, nan = fresh_numbers
    assert same == [0.0, ""]
    assert small == [0.25, ""]
    assert other_text == [math.inf, "a / b"]
    assert other_count == [math.inf, "1 results / 2"]
    assert shapes[0] == math.inf
    assert nan == [math.inf, "not a number"]


@pytest.fixture(scope="module")
def fresh_numbers():
    """What `difference_of` says of some pairs."""
    program = """
import json, torch
from shared import difference_of
ones = torch.ones(3)
print(json.dumps([
    difference_of({"a": ones, "b": ["x", 2]}, {"b": ["x", 2.0], "a": ones}),
    difference_of([torch.tensor([4.0, 1.0]), 0.5], [torch.tensor([4.0, 2.0]), 0.25]),
    difference_of(["a", ones], ["b", ones]),
    difference_of([ones], [ones, ones]),
    difference_of([ones], [torch.ones(2)]),
    difference_of([ones, 1.0], [ones * float("nan"), 1.0]),
]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(SCRIPTS)},
    )
    return json.loads(done.stdout)


# PEFT

MILD = {"initializer_range": 0.2}


def classifiers(topology):
    """Ours and transformers' classifier of a topology with the same weights."""
    if topology == "decoder":
        ours, _ = pair("llama", **MILD)
        ours = blockformer.BlockformerDecoderForSequenceClassification(ours.config).eval()
        return ours, official_copy("llama", ours, LlamaForSequenceClassification)
    shared = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    settings = {**shared, "num_hidden_layers": 2, "pad_token_id": 0, "initializer_range": 0.2}
    theirs = BertForSequenceClassification(BertConfig(**settings)).eval()
    return theirs, settings


def answers(model, ids):
    """Loss, gradients of the prompts and logits of a classifier with trained prefixes."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    if CACHE == "cache" and "past_key_values" not in inspect.signature(model.forward).parameters:
        # PEFT 0.21 does not know that transformers 5.24 calls the cache of its own classes by another name.
        usual = model.forward
        model.forward = lambda *args, past_key_values=None, **named: usual(*args, cache=past_key_values, **named)
    adapted = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4))
    outputs = adapted(input_ids=ids, attention_mask=torch.ones_like(ids), labels=torch.tensor([0, 1]))
    outputs.loss.backward()
    prompts = [parameter.grad for name, parameter in adapted.named_parameters() if "prompt_encoder" in name]
    return [outputs.loss, prompts, outputs.logits]


@pytest.mark.parametrize("topology", ["decoder", "encoder"])
def test_prefix_tuning_of_a_classifier_gives_what_transformers_gives(topology, tmp_path):
    ids = token_ids(2, 9)
    if topology == "decoder":
        ours, theirs = classifiers(topology)
    else:
        theirs, _ = classifiers(topology)
        theirs.save_pretrained(tmp_path)
        ours = blockformer.from_official(tmp_path).eval()
    found, wanted = answers(ours, ids), answers(theirs, ids)
    assert found[1][0].abs().max() > 0
    assert_close(found, wanted)


# Exporters


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["bert", "qwen3", "t5"])
def test_an_export_with_open_sizes_names_its_inputs(preset):
    """What torch.onnx.export does first. A size is named by its input, so no input may hide in `**kwargs`."""
    example = load("export_onnx")
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    classes = {
        "bert": "EncoderModel",
        "qwen3": "DecoderForCausalLM",
        "t5": "EncoderDecoderForConditionalGeneration",
    }
    config = blockformer.preset(preset, num_attention_heads=2, **sizes)
    model = getattr(blockformer, f"Blockformer{classes[preset]}")(config).eval()
    arguments, open_sizes = example.arguments(model)
    # The exporter to ONNX takes names for open sizes, torch.export takes them open.
    open_sizes = {name: sizes and dict.fromkeys(sizes, torch.export.Dim.AUTO) for name, sizes in open_sizes.items()}
    program = torch.export.export(model, (), arguments, dynamic_shapes=open_sizes, strict=False).module()
    fixed = {name: value for name, value in arguments.items() if not isinstance(value, torch.Tensor)}
    for rows, length, padding in ((3, 11, 4), (1, 23, 0)):
        batch = example.inputs(model, rows, length, padding)
        with torch.no_grad():
            found, wanted = program(**batch, **fixed)[0], model(**batch)[0]
        real = batch["attention_mask"].bool() if preset == "bert" else slice(None)
        assert_close(found[real], wanted[real])


@pytest.mark.slow
def test_the_onnx_example_says_what_pytorch_says(tmp_path, capsys, monkeypatch):
    """Skipped where the extra `peers` is not installed; `make clients CLIENTS=onnx` has it."""
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = blockformer.preset("bert", num_attention_heads=2, **sizes)
    blockformer.export_model(blockformer.BlockformerEncoderModel(config), tmp_path / "repo")
    monkeypatch.setattr("sys.argv", ["export_onnx.py", str(tmp_path / "repo"), str(tmp_path / "encoder.onnx")])
    load("export_onnx").main()
    assert "of the largest result" in capsys.readouterr().out


@pytest.mark.slow
def test_the_block_on_onnx_exports_a_model_that_says_the_same(tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    monkeypatch.chdir(tmp_path)
    config = blockformer.preset("bert", num_attention_heads=2, **sizes)
    blockformer.export_model(blockformer.BlockformerEncoderModel(config), "my-encoder")
    found = page_blocks.run("clients.md", "# needs onnxscript")
    assert_close(found["program"](**found["batch"])[0], found["model"](**found["batch"])[0])


@pytest.mark.slow
def test_the_recipes_for_8_bits_keep_the_vectors(tmp_path, monkeypatch):
    """As docs/quantization.md has them, with a real trained encoder. `make extra-tests EXTRAS=int8` has the tools."""
    openvino = pytest.importorskip("openvino")
    pytest.importorskip("nncf")
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    texts = [each.text.strip().split("\n\n")[0].replace("\n", " ") for each in docstrings()[::20]]
    monkeypatch.chdir(tmp_path)
    blockformer.convert(encoder_folder(), "my-encoder")
    (tmp_path / "sample.txt").write_text("\n".join(texts[100:160]), encoding="utf-8")
    example = load("export_onnx")
    example.export(example.load("my-encoder"), "encoder.onnx")
    page = (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8")
    recipes = [body for body in re.findall(r"```python\n(.*?)```", page, re.S) if "encoder-int8" in body]
    assert len(recipes) == 2
    for recipe in recipes:
        exec(compile(recipe, "docs/quantization.md", "exec"), {})

    tokenizer, model = AutoTokenizer.from_pretrained("my-encoder"), AutoModel.from_pretrained("my-encoder").eval()
    session = onnxruntime.InferenceSession("encoder-int8.onnx")
    low = openvino.Core().compile_model("encoder-int8.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def cosines(run):
        batch = tokenizer(texts[:64], padding=True, return_token_type_ids=False, return_tensors="pt")
        mask = batch["attention_mask"][..., None]
        with torch.no_grad():
            states = model(**batch).last_hidden_state
        found = torch.from_numpy(run({name: tensor.numpy() for name, tensor in batch.items()}))
        return torch.cosine_similarity(*((each * mask).sum(1) / mask.sum(1) for each in (states, found)))

    for run, path, least in (
        (lambda inputs: session.run(None, inputs)[0], "encoder-int8.onnx", 0.98),
        (lambda inputs: low(inputs)[0], "encoder-int8.bin", 0.99),
    ):
        assert least < cosines(run).mean() < 1 - 1e-5
        assert (tmp_path / path).stat().st_size < 0.3 * sum(
            each.stat().st_size for each in (tmp_path / "my-encoder").glob("*.safetensors")
        )
