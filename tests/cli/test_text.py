"""`blockformer chat` and `blockformer eval`, on small models with a real tokenizer."""

import io
import math
import sys
import types

import pytest
import torch
from sizes import TINY
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, Qwen3Config, Qwen3ForCausalLM

from blockformer.cli import main
from blockformer.conversion import convert

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


@pytest.fixture
def official(tiny_tokenizer, tmp_path):
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1, "max_position_embeddings": 96}
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=512, **TINY, head_dim=8, num_key_value_heads=2, initializer_range=0.3, **ends)
    )
    model.save_pretrained(tmp_path / "official")
    tiny_tokenizer.save_pretrained(tmp_path / "official")
    return tmp_path / "official", model.eval()


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    return ended.value.code or 0, capsys.readouterr()


def test_a_chat_writes_what_generate_writes_and_remembers(official, monkeypatch, capsys):
    folder, model = official
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    monkeypatch.setattr("sys.stdin", io.StringIO("def a\n\nand b\n/new\ndef a\n/quit\nnever read\n"))
    code, told = run(capsys, "chat", folder, "--greedy", "--max-new-tokens", 6, "--system", "be short")
    assert code == 0, told.err

    def answer(*said):
        roles = ["system", *["user", "assistant"] * len(said)]
        messages = [{"role": role, "content": text} for role, text in zip(roles, ("be short", *said), strict=False)]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    first = answer("def a")
    assert told.out == "".join(f"{each}\n" for each in (first, answer("def a", first, "and b"), first))


def test_without_a_template_a_line_is_gone_on_with(official, monkeypatch, capsys):
    folder, _ = official
    monkeypatch.setattr("sys.stdin", io.StringIO("import math\n"))
    code, told = run(capsys, "chat", folder, "--greedy", "--max-new-tokens", 3)
    assert code == 0, told.err
    assert told.out.startswith("import math")
    assert "no chat template" in told.err
    code, told = run(capsys, "chat", folder, "--system", "be short")
    assert code != 0
    assert "needs a tokenizer with a chat template" in " ".join(told.err.split())


def test_tasks_are_those_of_lm_eval(official, tmp_path, monkeypatch, capsys):
    folder, _ = official
    for command in (["eval", folder], ["eval", folder, folder / "config.json", "--tasks", "a"]):
        code, told = run(capsys, *command)
        assert code == 2
        assert "name text files, or tasks with --tasks" in told.err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, told = run(capsys, "eval", folder, "--tasks", "a")
    assert (code, told.err) == (1, "error: --tasks needs lm-eval, which is not installed: pip install lm-eval\n")
    monkeypatch.undo()

    def simple_evaluate(judged, tasks, limit):  # stands in for lm-eval
        assert (tasks, limit) == (["easy", str(tmp_path / "own.yaml")], 3)
        given = {name: judged.pop(name) for name in ("backend", "max_length")}
        assert given == {"backend": "causal", "max_length": 24}
        assert type(judged["pretrained"]).__name__ == "BlockformerDecoderForCausalLM"
        scores = {"alias": "easy", "sample_len": 3, "acc,none": 0.5, "acc_stderr,none": 0.25}
        return {"results": {"easy": scores, "own": {"exact_match,strict": 1.0, "exact_match_stderr,strict": "N/A"}}}

    package, files = types.ModuleType("lm_eval"), types.ModuleType("lm_eval.models.huggingface")
    package.simple_evaluate, files.HFLM, package.__spec__ = simple_evaluate, dict, object()
    modules = {"lm_eval": package, "lm_eval.models": types.ModuleType("lm_eval.models"), files.__name__: files}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.chdir(tmp_path)
    code, told = run(capsys, "eval", folder, "--tasks", "easy,own.yaml", "--limit", 3, "--length", 24)
    assert code == 0, told.err
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in told.out.splitlines() if line[0] == "│"]
    assert rows == [["easy", "acc", "0.5000", "0.2500"], ["own", "exact_match", "1.0000", ""]]


@torch.no_grad()
def test_the_figures_of_a_file_are_those_of_its_tokens(official, tmp_path, capsys):
    folder, model = official
    texts = {"a.txt": "for each in range(10):\n    print(each)\n" * 6, "b.txt": "é = 1\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    convert(folder, tmp_path / "ours")
    outputs = []
    for src in (folder, tmp_path / "ours"):
        code, told = run(capsys, "eval", src, tmp_path / "a.txt", tmp_path / "b.txt", "--length", 24)
        assert code == 0, told.err
        outputs.append(told.out)
    assert outputs[0] == outputs[1]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    nats, count = 0.0, 0
    for text in texts.values():
        ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
        for start in range(0, len(ids) - 1, 24):
            window = ids[start : start + 25]
            chances = model(window[None, :-1]).logits[0].log_softmax(-1)
            nats -= chances.gather(1, window[1:, None]).sum().item()
        count += len(ids) - 1
    size = sum(len(text.encode()) for text in texts.values())
    row = next(line for line in outputs[0].splitlines() if line.startswith("│ all"))
    told = [float(cell.replace(",", "")) for cell in row.strip("│").split("│")[1:]]
    assert told[0] == count
    # How a processor adds may change the last digit that is written.
    assert told[1:] == [
        pytest.approx(math.exp(nats / count), abs=0.02),
        pytest.approx(nats / math.log(2) / size, abs=2e-3),
    ]


def test_what_cannot_be_talked_to_or_measured_is_said(official, tmp_path, capsys):
    folder, _ = official
    encoder = BertForMaskedLM(BertConfig(vocab_size=64, **TINY))
    encoder.save_pretrained(tmp_path / "encoder")
    (tmp_path / "one.txt").write_text("a", encoding="utf-8")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    for arguments, named in (
        (("chat", tmp_path / "encoder"), "is not a causal language model"),
        (("eval", tmp_path / "encoder", tmp_path / "one.txt"), "is not a causal language model"),
        (("eval", folder, tmp_path / "none.txt"), "no such file"),
        (("eval", folder, tmp_path / "one.txt"), "at least two are needed"),
        (("eval", folder, tmp_path / "bytes.txt"), "not UTF-8 text"),
    ):
        code, told = run(capsys, *arguments)
        assert code == 1
        assert named in " ".join(told.err.split()), told.err
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    code, told = run(capsys, "chat", folder)
    assert code == 1
    assert "the model has no tokenizer" in " ".join(told.err.split())


def test_a_full_context_forgets_the_first_messages_and_the_chat_goes_on(official, monkeypatch, capsys):
    """A line that is too long by itself is said to be so, and the next one is answered."""
    folder, _ = official
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    lines = ["def a return b import c"] * 8 + ["import math " * 200, "def a"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    code, told = run(capsys, "chat", folder, "--greedy", "--max-new-tokens", 4, "--system", "be short")
    assert code == 0, told.err
    words = " ".join(told.err.split())
    assert "the context is full: the first 2 messages were dropped" in words
    assert "too long: the model reads 96 tokens, and this line has more" in words
    assert told.out.count("\n") >= 9
