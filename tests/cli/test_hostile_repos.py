"""A repo that means harm: templates and tokenizers that never end, and what is written to the terminal."""

import io
import json
import logging
import shutil
import sys
import unicodedata

import pytest
import torch
from sizes import ONE_LAYER
from transformers import Qwen3Config, Qwen3ForCausalLM

from blockformer.cli import main, template
from blockformer.cli.entry import printable_logs
from blockformer.conversion import ConversionError, convert
from blockformer.files.errors import printable

# Writes into the clipboard, clears the screen, sets the window's title; turns the direction of writing; goes back.
STEERING = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x1b]0;t\x1b\\\u202eevil\u2066\r\x9b31m\x08"
HARMFUL = {"\x1b", "\x07", "\x08", "\r", "\x9b", "\u202e", "\u2066"}


@pytest.fixture(scope="module")
def whole(tiny_tokenizer, tmp_path_factory):
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1, "max_position_embeddings": 96}
    config = Qwen3Config(vocab_size=512, **ONE_LAYER, head_dim=8, num_key_value_heads=2, initializer_range=0.3, **ends)
    folder = tmp_path_factory.mktemp("whole") / "model"
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def repo(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "repo")
    return tmp_path / "repo"


def change(path, **entries):
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | entries), "utf-8")


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    return ended.value.code or 0, capsys.readouterr()


def chat(monkeypatch, capsys, folder, *options):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    return run(capsys, "chat", folder, "--greedy", "--max-new-tokens", 12, *options)


TEMPLATES = {
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "it runs longer than",
    "{{ 10 ** (10 ** 9) }}": "it runs longer than",
    "{{ 'a' * 20000000000 }}": "it takes more than",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}": "it takes more than",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "SecurityError",
    "{{ namespace.__init__.__globals__ }}": "SecurityError",
    "{% include '/etc/passwd' %}": "TypeError",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "RecursionError",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "RecursionError",
    "{{ 1 // 0 }}": "ZeroDivisionError",
    "{% if %}": "TemplateSyntaxError",
    "{{ raise_exception('" + STEERING + "') }}": "TemplateError",
    "": "it writes nothing",
    "{% for i in range(99999) %}"
    + "a" * 99
    + "{% endfor %}": "9,899,901 characters, too many for the model's 96 tokens",
}


@pytest.mark.parametrize("text", TEMPLATES, ids=TEMPLATES.values())
def test_a_chat_template_that_fails_or_never_ends_is_one_error(repo, monkeypatch, capsys, text):
    monkeypatch.setattr(template, "SECONDS", 0.5)
    monkeypatch.setattr(template, "NBYTES", 1 << 26)
    (repo / "chat_template.jinja").write_text(text, "utf-8")
    code, told = chat(monkeypatch, capsys, repo)
    assert code == 1
    last = told.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert TEMPLATES[text] in last
    assert not HARMFUL & set(last)
    assert told.out == ""


def test_a_template_is_rendered_nowhere_else(repo, tmp_path, monkeypatch, capsys):
    (repo / "chat_template.jinja").write_text(next(iter(TEMPLATES)), "utf-8")
    (tmp_path / "text.txt").write_text("some words to read", "utf-8")
    monkeypatch.setattr("transformers.tokenization_utils_base.render_jinja_template", None)
    for command in (
        ["inspect", repo],
        ["inspect", repo, "--html", tmp_path / "page.html", "--text", "some words"],
        ["convert", repo, tmp_path / "ours"],
        ["eval", repo, tmp_path / "text.txt"],
    ):
        code, told = run(capsys, *command)
        assert code == 0, told.err


def never_end():
    try:
        while True:
            pass
    except TimeoutError:  # whoever catches it is stopped again
        while True:
            pass


def test_the_bounds_of_a_template_are_lifted_afterwards():
    with pytest.raises(TimeoutError), template.bounded(0.2, 1 << 26):
        never_end()
    if sys.platform == "linux":
        import resource

        before = resource.getrlimit(resource.RLIMIT_AS)
        with pytest.raises(MemoryError), template.bounded(60, 1 << 26):
            bytearray(1 << 28)
        assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert len(bytearray(1 << 28)) == 1 << 28


@pytest.mark.parametrize("with_template", [False, True])
def test_what_a_model_writes_does_not_steer_the_terminal(repo, monkeypatch, capsys, with_template):
    decoder = {"type": "Replace", "pattern": {"Regex": "[aeiou ]"}, "content": STEERING}
    kept = json.loads((repo / "tokenizer.json").read_text("utf-8"))["decoder"]
    change(repo / "tokenizer.json", decoder={"type": "Sequence", "decoders": [kept, decoder]})
    if with_template:
        (repo / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}", "utf-8")
    code, told = chat(monkeypatch, capsys, repo)
    assert code == 0, told.err
    assert r"\x1b]52;c;ZXZpbA==\x07" in told.out
    assert r"\u202eevil\u2066\r\x9b31m\x08" in told.out
    assert not HARMFUL & set(told.out)


def test_only_what_steers_is_escaped():
    text = "a\tb\nこんにちは\u3000世界 नमस्ते שלום مرحبا \u200f می\u200cخواهم 👩\u200d👩\u200d👧 ☕\ufe0f \u00a0 x\u00adx"  # noqa: RUF001
    assert printable(text) == text
    for code in range(0x110000):
        character = chr(code)
        direction = unicodedata.bidirectional(character)
        steers = unicodedata.category(character) in ("Cc", "Cs") and character not in "\t\n"
        steers |= direction in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
        assert (printable(character) != character) == steers, hex(code)
    assert printable("\udcff\x1b\u2028") == "\\udcff\\x1b\u2028"


def test_what_the_libraries_log_is_safe_too(monkeypatch):
    logger, out = logging.getLogger("transformers.some.module"), io.StringIO()
    handler = logging.StreamHandler(out)
    logger.addHandler(handler)
    before = logging.getLogRecordFactory()
    try:
        with printable_logs():
            logger.error("a key %s and %d", STEERING, 3)
    finally:
        logger.removeHandler(handler)
    assert out.getvalue().startswith(r"a key \x1b]52")
    assert not HARMFUL & set(out.getvalue())
    assert logging.getLogRecordFactory() is before


@pytest.mark.slow
def test_names_and_entries_of_a_repo_do_not_steer_the_terminal(repo, tmp_path, processes):
    """In a process of its own, which writes what the libraries say to the same terminal."""
    config = json.loads((repo / "config.json").read_text("utf-8"))
    hostile = {STEERING: STEERING, "task_specific_params": {STEERING: 1}, "_name_or_path": STEERING}
    hostile["rope_parameters"] = config["rope_parameters"] | {STEERING: 1}
    change(repo / "config.json", **hostile)
    change(repo / "tokenizer_config.json", tokenizer_class=STEERING, extra_special_tokens={"x": STEERING})
    change(repo / "generation_config.json", **{STEERING: STEERING})
    for name in (".py", ".txt", ".safetensors", ".bin"):
        (repo / f"{STEERING}{name}".replace("/", "")).write_text("x")
    (repo / "README.md").write_text(f"---\nlicense: {json.dumps(STEERING)}\n---\n{STEERING}", "utf-8")
    script = "import runpy; runpy.run_module('blockformer', run_name='__main__')"
    for command in (["inspect", repo], ["convert", repo, tmp_path / "ours"]):
        done = processes.run(script, *command, folder=tmp_path, elsewhere=False)
        assert done.returncode == 0, done.stderr
        said = done.stdout + done.stderr.replace("\r", "")  # the libraries' progress bars go back
        assert not HARMFUL & set(said), ascii(said)
    change(repo / "generation_config.json", cache_implementation=STEERING)
    done = processes.run(script, "convert", repo, tmp_path / "other", folder=tmp_path, elsewhere=False)
    assert done.returncode == 1
    assert not HARMFUL & set(done.stderr.replace("\r", "")), ascii(done.stderr)


REPEATED = {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 1000}
PADDED = {"type": "Prepend", "prepend": "x" * 1_000_000}
MANY = [{"SpecialToken": {"id": "x", "type_id": 0}}] * 500
TOKEN = {"x": {"id": "x", "ids": [1] * 500, "tokens": ["x"] * 500}}
ONE, BOTH = [{"Sequence": {"id": "A", "type_id": 0}}], [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
BOMBS = {
    "normalizer": {"type": "Sequence", "normalizers": [REPEATED] * 4},
    "decoder": {"type": "Sequence", "decoders": [REPEATED] * 4},
    "post_processor": {"type": "TemplateProcessing", "single": MANY + ONE, "pair": BOTH, "special_tokens": TOKEN},
}


@pytest.mark.parametrize("part", BOMBS)
def test_a_tokenizer_that_makes_a_text_huge_is_refused_before_it_reads_one(repo, tmp_path, monkeypatch, capsys, part):
    change(repo / "tokenizer.json", **{part: BOMBS[part]})
    monkeypatch.setattr("tokenizers.Tokenizer.from_file", None)
    monkeypatch.setattr("tokenizers.Tokenizer.from_str", None)
    for command in (["convert", repo, tmp_path / "ours"], ["chat", repo], ["eval", repo, repo / "config.json"]):
        code, told = run(capsys, *command)
        assert code == 1
        last = told.err.splitlines()[-1]
        assert f"tokenizer.json: its {part} may make a text" in last, told.err
        assert "remove" in last
    assert not (tmp_path / "ours").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["repo"]


def test_many_ways_to_lengthen_a_text_are_counted(repo):
    from blockformer.files.tokenizer_bounds import check_bounds

    regex = {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 40}
    nested = {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [regex]}, regex]}
    for part, entry in (
        ("normalizer", PADDED),
        ("normalizer", nested),
        ("model", {"type": "WordPiece", "continuing_subword_prefix": "#" * 2000}),
        ("post_processor", {"type": "TemplateProcessing", "single": ONE * 2000}),
        ("post_processor", {"type": "Sequence", "processors": [BOMBS["post_processor"]]}),
    ):
        change(repo / "tokenizer.json", **{part: entry})
        with pytest.raises(ConversionError, match=f"its {part} may make a text"):
            check_bounds(repo)
        change(repo / "tokenizer.json", **{part: None})
    usual = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    change(repo / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": usual}, decoder=[1, {"x": STEERING}])
    check_bounds(repo)
    with open(repo / "vocab.txt", "wb") as file:
        file.truncate((1 << 28) + 1)  # a sparse file
    with pytest.raises(ConversionError, match=r"vocab.txt: 256.0 MiB, .* at most; remove it"):
        check_bounds(repo)


DAMAGED = {
    "deep": '{"a":' + "[" * 200_000 + "]" * 200_000 + "}",
    "nested": '{"normalizer":' + '{"type":"Sequence","normalizers":[' * 300 + "]}" * 300 + "}",
    "a list": "[]",
    "bytes": "\x00\x1b",
    "no model": '{"version": "1.0", "model": {"type": "\\u001b[2J"}}',
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_tokenizer_is_one_error(repo, tmp_path, monkeypatch, capsys, text):
    (repo / "tokenizer.json").write_text(text, "utf-8")
    code, told = chat(monkeypatch, capsys, repo)
    assert code == 1
    last = told.err.splitlines()[-1]
    assert last.startswith(f"error: {repo}: the tokenizer cannot be loaded: ")
    assert not HARMFUL & set(last)
    report = convert(repo, tmp_path / "ours")  # carries it as it is, and says so
    assert any("the source's cannot be loaded" in note for note in report.notes)


PANICS = {
    "charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8AAAAA"}},
    "regex": {
        "pre_tokenizer": {
            "type": "Split", "pattern": {"Regex": "(?:.|..)+[^\\x00-\\xff]"}, "behavior": "Isolated", "invert": False,
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("entries", PANICS.values(), ids=PANICS)
def test_a_tokenizer_whose_rust_code_gives_up_is_one_error(repo, tmp_path, monkeypatch, capsys, entries):
    """Its error is no `Exception`; with a regular expression that blows up only some texts meet it."""
    change(repo / "tokenizer.json", **entries)
    (tmp_path / "text.txt").write_text("a" * 100, "utf-8")
    code, told = run(capsys, "eval", repo, tmp_path / "text.txt")
    assert code == 1
    last = told.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert "tokenizer" in last or "Regex" in last
    code, told = run(capsys, "convert", repo, tmp_path / "ours")
    assert code in (0, 1)
    assert "Traceback" not in told.err
