import json
import re

import pytest
import torch
from article_modules import GPT
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sizes import TINY
from transformers import Qwen3Config, Qwen3ForCausalLM

import blockformer
from blockformer.cli import main
from blockformer.cli.checkpoints import progress_bar
from blockformer.files.sizes import format_size
from blockformer.summary import describe, summarize

SIZES = {**TINY, "vocab_size": 99, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.4}
# The settings of Qwen/Qwen3-14B as its config.json has them.
QWEN3_14B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 17408,
    "max_position_embeddings": 40960,
    "max_window_layers": 40,
    "model_type": "qwen3",
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def call(*arguments, status=0):
    """Run the command line in this process and check how it ends."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert (ended.value.code or 0) == status


@pytest.fixture
def source(tmp_path, capsys):
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(tmp_path / "source")
    capsys.readouterr()  # the library's progress bar
    return tmp_path / "source"


def test_help_lists_the_commands(capsys):
    call("--help")
    out = capsys.readouterr().out
    assert all(name in out for name in ("convert", "inspect", "doctor", "export", "demo", "--debug"))
    call("--version")
    assert capsys.readouterr().out.strip() == blockformer.__version__


@pytest.mark.parametrize("command", ["convert", "inspect", "doctor", "export"])
def test_each_help_shows_an_example(capsys, command):
    call(command, "--help")
    out = capsys.readouterr().out
    assert re.search(rf"Example: blockformer {command} \S+", out)
    assert "SRC" in out


def test_convert_there_and_back(capsys, tmp_path, source):
    call("convert", source, tmp_path / "dst")
    out = capsys.readouterr().out
    assert f"{source} -> {tmp_path / 'dst'}: a self-contained repo" in out
    assert re.search(r"compared in float32: largest difference of logits at \d+ places .* the same greedy text", out)
    call("convert", tmp_path / "dst", tmp_path / "back", "--to", "official", "--no-verify")
    out = capsys.readouterr().out
    assert "the official qwen3 layout" in out
    assert "not compared" in out
    again = Qwen3ForCausalLM.from_pretrained(tmp_path / "back")
    original = Qwen3ForCausalLM.from_pretrained(source)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), original.parameters(), strict=True))


def test_the_options_of_convert_arrive(tmp_path, source):
    call("convert", source, tmp_path / "dst", "--dtype", "bfloat16", "--max-shard-size", "20KB", "--family", "qwen3")
    assert json.loads((tmp_path / "dst/config.json").read_text())["dtype"] == "bfloat16"
    assert len(list((tmp_path / "dst").glob("model-*.safetensors"))) > 1
    call("convert", source, tmp_path / "dst", "--no-verify", "--force", "--strict-finite")
    assert json.loads((tmp_path / "dst/config.json").read_text())["dtype"] == "float32"


def test_a_weight_file_is_converted_with_its_settings(capsys, tmp_path):
    settings = {
        **dict.fromkeys(("vocab_size", "max_seq_length", "embedding_dim", "n_heads"), 8),
        "n_layers": 1,
        "drop_rate": 0.0,
        "qkv_bias": False,
    }
    module = GPT(settings)
    torch.save({"model": module.state_dict(), "epoch": 1}, tmp_path / "weights.pt")
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    arguments = ["convert", tmp_path / "weights.pt", tmp_path / "dst", "--family", "article-gpt"]
    call(*arguments, status=1)
    error = capsys.readouterr().err
    assert error.startswith("error: the family 'article-gpt' needs config (--config)")
    assert error.count("\n") == 1
    call(*arguments, "--config", tmp_path / "settings.json", status=3)  # converted, with nothing to compare it with
    out = capsys.readouterr().out
    assert f"{tmp_path / 'weights.pt'} -> {tmp_path / 'dst'}: a self-contained repo" in out
    assert "note: not verified: not compared with the official model: MyGPTModel is an article's own code" in out
    model = blockformer.BlockformerDecoderForCausalLM.from_pretrained(tmp_path / "dst")
    assert torch.equal(model.lm_head.weight, module.out_head.weight)


def test_export_makes_a_repo_of_a_saved_model(capsys, tmp_path):
    config = blockformer.preset("qwen3", **SIZES)
    blockformer.BlockformerDecoderForCausalLM(config).save_pretrained(tmp_path / "checkpoint")
    call("export", tmp_path / "checkpoint", tmp_path / "repo")
    out = capsys.readouterr().out
    assert "a self-contained repo" in out
    with safe_open(tmp_path / "repo/model.safetensors", framework="pt") as file:
        nbytes = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 - no dict
    assert f"tensors, {format_size(nbytes)}, float32, " in out
    assert (tmp_path / "repo/README.md").exists()
    call("export", tmp_path / "checkpoint", tmp_path / "repo", status=1)
    assert "or replace it with --force" in capsys.readouterr().err
    assert (tmp_path / "repo/modeling_decoder.py").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "{source}", "{source}"], "is the source"),
        (["convert", "{source}", "{tmp}/dst", "--dtype", "int3"], "dtype must be one of"),
        (["convert", "{source}", "{tmp}/dst", "--to", "gguf"], "--to must be one of"),
        (["convert", "{source}", "{tmp}/dst", "--as", "encodr"], "--as must be one of decoder, encoder, "),
        (["convert", "{source}", "{tmp}/dst", "--as", "reranker"], 'tokens are missing; use ("no", "yes"), or'),
        (["--block", "{tmp}/nowhere.py", "inspect", "bert"], "nowhere.py: no such file; name the Python file"),
        (["convert", "{source}", "{tmp}/dst", "--to", "official"], "is not in Blockformer's layout"),
        (["convert", "{source}", "{tmp}/dst", "--family", "qwen4"], "no family is called 'qwen4'"),
        (["convert", "{source}", "{tmp}/dst", "--max-shard-size", "big"], "'big'"),
        (["convert", "{tmp}/nowhere", "{tmp}/dst"], "no such folder"),
        (
            ["convert", "{source}", "{tmp}/dst", "--config", "{source}/config.json"],
            "config (--config) is only for an article's weight file",
        ),
        (["convert", "{source}/model.safetensors", "{tmp}/dst"], "give config (--config) and family (--family)"),
        (["export", "{source}", "{tmp}/dst"], "`blockformer convert` makes a repo of it"),
        (["inspect", "{tmp}/nowhere/config.json"], "no such file"),
        (["inspect", "{tmp}/nowhere"], "no such folder"),
        (["inspect", "qwen4"], "Did you mean the preset 'qwen3'?"),
    ],
)
def test_an_error_is_one_line_without_a_traceback(capsys, tmp_path, source, arguments, message):
    call(*(argument.format(source=source, tmp=tmp_path) for argument in arguments), status=1)
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert captured.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_debug_shows_the_traceback_wherever_it_stands(tmp_path):
    for arguments in (["--debug", "inspect", str(tmp_path / "x")], ["inspect", str(tmp_path / "x"), "--debug"]):
        with pytest.raises(ValueError, match="no such folder"):
            main(arguments)


def test_an_unexpected_error_is_named_and_not_dumped(capsys, monkeypatch, source):
    def broken(*args):
        raise ZeroDivisionError("nobody\nthought of it")

    monkeypatch.setattr("blockformer.summary.config_of", broken)
    call("inspect", source, status=1)
    assert capsys.readouterr().err == "error: ZeroDivisionError: nobody (--debug shows more)\n"


def test_a_wrong_command_line_is_status_2(capsys):
    call("convert", status=2)
    call("convert", "a", "b", "--nonsense", status=2)
    assert "--nonsense" in capsys.readouterr().err


def test_ctrl_c_is_status_130(capsys, monkeypatch, source):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("blockformer.summary.config_of", interrupted)
    call("inspect", source, status=130)
    assert capsys.readouterr().err == "interrupted\n"


def test_inspect_shows_the_seed_articles_layer_tree(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_14B))
    call("inspect", tmp_path)
    out = capsys.readouterr().out
    for part in (
        "14,768,307,200 parameters",
        "(0-39): 40 x Layer(",
        "(q_proj): Linear(in_features=5120, out_features=5120, bias=False)",
        "(k_proj): Linear(in_features=5120, out_features=1024, bias=False)",
        "(v_proj): Linear(in_features=5120, out_features=1024, bias=False)",
        "(o_proj): Linear(in_features=5120, out_features=5120, bias=False)",
        "(q_norm): RMSNorm(128,",
        "(k_norm): RMSNorm(128,",
        "(gate_proj): Linear(in_features=5120, out_features=17408, bias=False)",
        "(up_proj): Linear(in_features=5120, out_features=17408, bias=False)",
        "(down_proj): Linear(in_features=17408, out_features=5120, bias=False)",
        "(embed_tokens): Embedding(151936, 5120",
        "(lm_head): Linear(in_features=5120, out_features=151936, bias=False)",
        "weights in float32: 59,073,228,800 bytes (55.0 GiB)",
        "weights in bfloat16: 29,536,614,400 bytes (27.5 GiB)",
        "weights in int8: 14,768,307,200 bytes (13.8 GiB)",
        "cache in bfloat16: 163,840 bytes per token (160.0 KiB)",
    ):
        assert part in out, part
    assert not re.search(r"\(1\): Layer", out)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text", "bamba"])
def test_inspect_says_how_many_bytes_of_state_a_text_takes(capsys, name):
    call("inspect", name)
    summary = describe(blockformer.preset(name))
    out = capsys.readouterr().out
    for dtype in ("float32", "bfloat16"):
        assert f"state in {dtype}: {summary.state[dtype]:,} bytes per text of any length" in out
    assert summary.state["float32"] > summary.state["bfloat16"]
    assert not describe(blockformer.preset("qwen3")).state


def test_the_numbers_of_a_summary_are_those_of_the_model(tmp_path):
    config = blockformer.preset("qwen3", **SIZES, tie_word_embeddings=True)
    summary = describe(config)
    model = blockformer.BlockformerDecoderForCausalLM(config)
    assert summary.parameters == sum(parameter.numel() for parameter in model.parameters())
    ids = torch.arange(10)[None]
    cache = model(ids, use_cache=True).past_key_values
    stored = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    assert summary.cache["float32"] * ids.shape[1] == stored


def test_inspect_takes_folders_config_files_presets_and_both_layouts(capsys, tmp_path, source):
    call("inspect", source / "config.json")
    call("convert", source, tmp_path / "dst", "--no-verify")
    capsys.readouterr()
    call("inspect", tmp_path / "dst")
    out = capsys.readouterr().out
    assert "qk_norm" in out
    parameters = summarize(source).parameters
    assert f"{parameters:,} parameters" in out
    call("inspect", "mistral")
    out = capsys.readouterr().out
    assert out.startswith("preset mistral: ")
    assert "8 of 8 layers keep only the last 4,096 tokens" in out
    call("inspect", "qwen9", status=1)


def test_inspect_names_what_is_nearly_a_field_of_an_official_config(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_14B, "hiden_act": "relu", "of_another_tool": 1}))
    call("inspect", tmp_path)
    note = "note: config.json: settings that qwen3 does not use: "
    assert f"{note}'hiden_act' (did you mean 'hidden_act'?), 'of_another_tool'\n" in capsys.readouterr().out


def test_sizes_are_for_persons():
    assert [format_size(n) for n in (0, 1023, 1024, 1536, 5 << 30, 3 << 40)] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "1.5 KiB",
        "5.0 GiB",
        "3.0 TiB",
    ]


def test_a_log_without_a_terminal_says_what_is_done_and_how_long_the_rest_takes(capsys, monkeypatch):
    clock = iter([0, 1, 2, 12, 22, 122, 722])
    monkeypatch.setattr("blockformer.cli.checkpoints.QUIET_SECONDS", -1)
    monkeypatch.setattr("blockformer.cli.checkpoints.time.monotonic", lambda: next(clock))
    with progress_bar() as report_progress:
        report_progress("looking", 0, 0)
        report_progress("writing weights", 0, 2048)
        report_progress("writing weights", 1024, 2048)
        report_progress("comparing 1 of 2: original model, float32", 100, 600)
        report_progress("comparing 1 of 2: original model, float32", 200, 600)
        report_progress("comparing 2 of 2: converted model, float32", 300, 600)
    assert capsys.readouterr().err.splitlines() == [
        "1 s: looking",
        "2 s: writing weights 0%, no estimate yet",
        "12 s: writing weights 50%, ~10 s left",
        "22 s: comparing 1 of 2: original model, float32 17%, no estimate yet",
        "122 s: comparing 1 of 2: original model, float32 33%, ~3 min left",
        "722 s: comparing 2 of 2: converted model, float32 50%, ~12 min left",
    ]


def test_a_terminal_has_room_for_bar_estimate_and_elapsed_time(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "80")
    clock = iter([0, 100, 140])
    with progress_bar() as report_progress:
        monkeypatch.setattr("blockformer.cli.checkpoints.time.monotonic", lambda: next(clock))
        for done in (0, 500, 900):
            report_progress("comparing 2 of 4: converted model, bfloat16", done, 1000)
    shown = capsys.readouterr().err
    assert re.search(r"model, bfloat16 \S+ 90%, ~16 s left 0:00:\d\d", re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown))


def test_the_progress_bar_takes_known_and_unknown_amounts(capsys):
    with progress_bar() as report_progress:
        report_progress("looking", 0, 0)
        report_progress("writing", 5, 10)
    assert capsys.readouterr().err == ""  # no terminal, no bar


def test_the_command_in_a_process_of_its_own(processes, tmp_path):
    script = "import runpy; runpy.run_module('blockformer', run_name='__main__')"  # python -m blockformer
    done = processes.run(script, "inspect", "/nowhere/at/all", folder=tmp_path, elsewhere=False)
    assert done.returncode == 1
    assert done.stderr == "error: /nowhere/at/all: no such folder\n"


def test_doctor_reports_mends_and_ends_with_its_status(capsys, tmp_path, source):
    weights = load_file(source / "model.safetensors")
    save_file(
        {f"module.{name}": each for name, each in weights.items()}, source / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(source), "--quick"])
    out = capsys.readouterr().out
    assert ended.value.code == 1
    assert "error   names begin with 'module.', which DistributedDataParallel or DeepSpeed puts there" in out
    assert "mendable: --mend OUT writes a whole checkpoint" in out
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(source), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (ended.value.code, found["status"], found["healthy"]) == (1, 1, False)
    assert found["findings"][0]["kind"] == "prefix"
    call("doctor", source, "--mend", tmp_path / "out", "--dtype", "bfloat16", "--set", "rope_theta=500")
    out = capsys.readouterr().out
    assert f"written: {tmp_path / 'out'}" in out
    assert "config.json: rope_theta set to 500" in out
    assert "25 tensors written, read again and compared" in out
    again = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(again[name], each.bfloat16()) for name, each in weights.items())
    for arguments, named in (
        (["--force"], "--force needs --mend"),
        (["--set", "a"], "--set must be like NAME=VALUE"),
        (["--qkv", "rows"], "--qkv must be one of stacked, by-head"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["doctor", str(source), *arguments])
        assert ended.value.code == 1
        assert named in capsys.readouterr().err
