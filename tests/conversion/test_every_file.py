"""One odd folder through everything that writes a folder: each of its files arrives byte for byte, or is named."""

import json

import pytest
from checkpoint_files import contents

import blockformer
from blockformer.conversion import convert, export_folder
from blockformer.conversion.articles.transformer import EXTRA_CODE
from blockformer.conversion.reshaped import convert_reshaped

from .oracles import official_folder

ODD = {
    "notes.txt": "years",
    "data/notes.txt": "of work",
    "training.yaml": "lr: 1",
    "CHANGES.rst": "none",
    "results": "no ending",
    "LICENSE": "You may.",
    "legal/LICENSE": "You may that, too.",
    "modeling_own.py": "import os\n",
    "custom_generate/generate.py": "def generate(*args, **kwargs): pass\n",
    "custom_generate/requirements.txt": "torch",
    "scripts/run.sh": "true",
    "logo.png": "a picture",
    "assets/loss.svg": "<svg/>",
    "onnx/model.onnx": "a graph",
    "onnx/config.json": "{}",
    "openvino/openvino_model.xml": "<net/>",
    "tf_model.h5": "weights",
    "model.gguf": "GGUF",
    "pytorch_model.bin": "a second copy",
    "model.fp16.safetensors": "a third",
    "model.safetensors.index.json.bak": "{}",
    "data.parquet": "rows",
    "vectors.bin": "\0\1",
    "optimizer.pt": "state",
    "rng_state_0.pth": "state",
    "trainer_state.json": '{"log_history": []}',
    "runs/today/events.out.tfevents.1": "a curve",
    ".gitattributes": "*.bin filter=lfs",
    ".git/HEAD": "ref: refs/heads/main",
    ".cache/huggingface/download/config.json.metadata": "etag",
    ".env": "KEY=1",
    ".hidden/notes.json": "{}",
    "generation_config.json": '{"bos_token_id": 1, "eos_token_id": 2, "max_length": 77}',
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "conversion/notes.txt": "mine",
    "README.md": "# Mine",
    "model.sig": "{}",
}
CONVERTED = {"config.json", "model.safetensors", "tokenizer_config.json", ".blockformer.json"}


def make_odd(folder):
    for name, text in ODD.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def official(tmp_path, tiny_tokenizer):
    official_folder(tmp_path / "official", tokenizer=tiny_tokenizer)
    return make_odd(tmp_path / "official")


@pytest.fixture
def saved(tmp_path, tiny_tokenizer):
    """A folder as `Trainer` leaves it, without code."""
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = blockformer.preset("qwen3", **sizes, num_attention_heads=2, num_key_value_heads=2, head_dim=8)
    blockformer.BlockformerDecoderForCausalLM(config).save_pretrained(tmp_path / "saved")
    tiny_tokenizer.save_pretrained(tmp_path / "saved")
    return make_odd(tmp_path / "saved")


@pytest.fixture
def converted(tmp_path, official):
    """A repo of ours with a record of its source, in which everything odd lies again, and other than there."""
    convert(official, tmp_path / "converted", verify=False)
    make_odd(tmp_path / "converted")
    (tmp_path / "converted/notes.txt").write_text("more years")
    return tmp_path / "converted"


def to_ours(source, target):
    return convert(source, target, verify=False)


def to_official(source, target):
    return convert(source, target, to_official=True, verify=False)


def reshaped(source, target):
    return convert_reshaped(source, target, layers=[0])


WAYS = [
    ("official", to_ours), ("official", reshaped),
    ("saved", export_folder), ("saved", to_official), ("saved", reshaped),
    ("converted", export_folder), ("converted", to_official), ("converted", reshaped),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "write"), WAYS, ids=[f"{kind}-{write.__name__}" for kind, write in WAYS])
def test_every_file_arrives_or_is_named(kind, write, tmp_path, request):
    source, target = request.getfixturevalue(kind), tmp_path / "target"
    report = write(source, target)
    made, lost = contents(target), []
    named = {name for names in report.left_out.values() for name in names}
    assert all(any(repr(name) in note for note in report.notes) for name in named)
    own = CONVERTED | ({"conversion.json"} if kind == "converted" and write is not reshaped else set())
    own |= blockformer.publishing.code_files(blockformer.preset("qwen3")).keys()
    for name, content in contents(source).items():
        places = {name, f"conversion/source/{name}", name.removeprefix("conversion/source/")}
        whole = f"{name.split('/')[0]}/"
        if name not in own | named and whole not in named and not any(made.get(each) == content for each in places):
            lost.append(name)
    assert not lost
    assert not {name for name in made if name in named and made[name] == contents(source)[name]}


def test_an_upgrade_keeps_every_file_or_names_it(saved):
    (saved / "model.fp16.safetensors").unlink()  # whose names are read
    before = contents(saved)
    notes = blockformer.upgrade(saved).notes
    after = contents(saved)
    changed = {name for name in before if after.get(name) != before[name]}
    assert changed <= {"config.json", "model.sig", "README.md"}
    assert any("model.sig" in note for note in notes)


def test_an_export_has_the_code_of_the_release_that_was_there(saved, tmp_path):
    """The articles' Transformer writes with code of its own, which not every repo has."""
    ((name, path),) = EXTRA_CODE.items()
    (saved / name).write_bytes(path.read_bytes())
    report = export_folder(saved, tmp_path / "target")
    assert (tmp_path / "target" / name).read_bytes() == path.read_bytes()
    assert not any(repr(name) in note for note in report.notes)


def test_generation_settings_of_the_source_stay(official, tmp_path):
    reshaped(official, tmp_path / "target")
    assert json.loads((tmp_path / "target/generation_config.json").read_text())["max_length"] == 77
