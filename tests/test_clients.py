"""Other people's tools: what they need of a model, and that the page of their results is whole."""

import importlib.util
import json
import re

import pytest
import torch
from example_files import EXAMPLES, load
from pairs import SIZES, assert_close, official_model, pair, token_ids
from transformers import BertConfig, BertForSequenceClassification, LlamaForSequenceClassification

import blockformer

ROOT = EXAMPLES.parent
SCRIPTS = ROOT / "scripts" / "clients"
PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def runner():
    spec = importlib.util.spec_from_file_location("run_clients", SCRIPTS / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS.parent)
        patch.setitem(__import__("sys").modules, "run_clients", module)
        spec.loader.exec_module(module)
        yield module


def rows_of(name):
    """The rows of a client's table on the page, cell by cell."""
    body = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- end of {name} -->", PAGE, re.S)[1]
    lines = [line for line in body.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[1:]]


def test_every_client_has_its_script_and_its_results(runner):
    for name, client in runner.CLIENTS.items():
        assert (SCRIPTS / client.script).is_file(), name
        assert rows_of(name), name
    scripts = {path.name for path in SCRIPTS.glob("with_*.py")}
    assert scripts <= {client.script for client in runner.CLIENTS.values()}


def test_what_is_not_the_same_says_whose_fault_it_is(runner):
    for name in runner.CLIENTS:
        for job, _, ours, theirs, result in rows_of(name):
            assert job
            assert ours
            assert theirs
            assert result == "the same" or re.match(r"the same, but \w|[\w' -]+: \w", result), (name, job, result)


def test_a_table_joins_what_is_alike_and_takes_the_place_of_the_old_one(runner):
    row = {"client": "tool", "version": "1.2", "ours": "works", "theirs": "works", "same": True}
    rows = [{**row, "job": f"train: {model}", "note": f"largest difference {model}"} for model in ("a", "b")]
    rows.append({**row, "job": "merge: a", "ours": "Error: x|y", "same": False, "note": "tool: it does not"})
    page = "before\n<!-- tool -->\nold\n<!-- end of tool -->\nafter"
    written = runner.put(page, "tool", rows)
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
    assert runner.put(written, "tool", rows) == written
    with pytest.raises(SystemExit, match="no marks for other"):
        runner.put(page, "other", rows)


def test_rows_of_a_script_that_fails_are_not_taken(runner, tmp_path, monkeypatch, capsys):
    row = {"client": "tool", "version": "1", "job": "a", "ours": "works", "theirs": "works", "same": False, "note": ""}
    script = tmp_path / "tool.py"
    monkeypatch.setitem(runner.CLIENTS, "tool", runner.Client(str(script), models=True))
    script.write_text(f"print({json.dumps(row)!r})")
    assert runner.run("tool", runner.sys.executable, tmp_path, quick=False) == [row]
    assert "NOT EXPLAINED" in capsys.readouterr().out
    for text, message in ((script.read_text() + "\nraise ValueError('broken')", "broken"), ("", "ended with 0")):
        script.write_text(text)
        with pytest.raises(SystemExit, match=message):
            runner.run("tool", runner.sys.executable, tmp_path, quick=False)


# PEFT

MILD = {"initializer_range": 0.2}


def classifiers(topology):
    """Ours and transformers' classifier of a topology with the same weights."""
    if topology == "decoder":
        ours, _ = pair("llama", **MILD)
        ours = blockformer.BlockformerDecoderForSequenceClassification(ours.config).eval()
        return ours, official_model("llama", ours, LlamaForSequenceClassification)
    shared = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    settings = {**shared, "num_hidden_layers": 2, "pad_token_id": 0, "initializer_range": 0.2}
    theirs = BertForSequenceClassification(BertConfig(**settings)).eval()
    return theirs, settings


def answers(model, ids):
    """Loss, gradients of the prompts and logits of a classifier with trained prefixes."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
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
