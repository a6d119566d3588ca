"""The files next to the weights: which come along, which come back, and what they cannot make the converter do."""

import json
import os
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from blockformer import cli
from blockformer.conversion import ConversionError, convert, export_folder, from_official
from blockformer.conversion.loading import load_any
from blockformer.conversion.verify import Measured, Parity
from blockformer.files import side_files, tokenizers
from blockformer.summary import summarize

from ..conversion.oracles import edit_config, edit_tensors, entries_of, official_folder

CARD = """---
license: other
license_name: tiny-license
license_link: LICENSE.txt
language:
- en
- no
datasets: [wikipedia]
base_model: somebody/base
model-index: [{name: tiny, results: []}]
---

# The source's own card
"""
TEXTS = {
    "README.md": CARD,
    "LICENSE.txt": "You may.\n",
    "NOTICE": "By somebody.\n",
    "USE_POLICY.md": "Do no harm.\n",
    "generation_config_for_summarization.json": '{"max_length": 142}\n',
    "decision.json": '{"temperature": {"choice": 2.5}}\n',
    "decision_template.jinja": "{{ state }} {{ question.instructions }}",
    "eval_results.json": '{"accuracy": 1}\n',
}
LEFT = {
    "code, which is never carried": ["modeling_own.py", "scripts/run.sh"],
    "the model in another format": ["flax_model.msgpack", "onnx/model.onnx", "original/params.json", "tf_model.h5"],
    "other weights, which are not read": ["consolidated.safetensors", "pytorch_model.bin"],
    "the state of a training run": ["optimizer.pt", "runs/events.out.tfevents.1"],
    "pictures and documents": ["logo.png"],
    "bookkeeping of git and the Hub": [".gitattributes"],
    "not known to Blockformer": ["conversion/notes", "data.parquet"],
}


@pytest.fixture
def source(tmp_path, tiny_tokenizer):
    folder = tmp_path / "src"
    official_folder(folder, tokenizer=tiny_tokenizer)
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    for name in (name for names in LEFT.values() for name in names):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"stub")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tools.jinja").write_text("{{ tools }}")
    return folder


def files(folder):
    return {path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()}


def test_every_file_is_carried_kept_or_named(tmp_path, source):
    report = convert(source, tmp_path / "dst")
    assert {reason: sorted(names) for reason, names in report.left_out.items()} == LEFT
    record = entries_of(tmp_path / "dst", "conversion.json")["files"]
    assert record["left_out"] == report.left_out
    named = {name for names in report.left_out.values() for name in names}
    told = {*record["carried"], *record["stored"], *record["written"], *named}
    assert files(source) - told == {"config.json", "model.safetensors"}  # those are converted
    card = (tmp_path / "dst/README.md").read_text()
    for reason, names in LEFT.items():
        assert f"- {reason}: `" in card
        assert any(note.startswith(f"not carried, {reason}: ") for note in report.notes)
        assert all(f"`{name}`" in card for name in names)
    for name in TEXTS.keys() - {"README.md", "eval_results.json"}:
        assert (tmp_path / "dst" / name).read_text() == TEXTS[name]


def test_the_license_and_the_languages_stand_on_the_card(tmp_path, source):
    import yaml

    convert(source, tmp_path / "dst", verify=False)
    export_folder(tmp_path / "dst", tmp_path / "exported")
    for name in ("dst", "exported"):
        front = yaml.safe_load((tmp_path / name / "README.md").read_text().split("---\n")[1])
        assert front["license"] == "other"
        assert front["license_name"] == "tiny-license"
        assert front["language"] == ["en", "no"]  # the text, not YAML's False
        assert front["datasets"] == ["wikipedia"]
        assert front["base_model"] == "somebody/base"
        assert "model-index" not in front


@pytest.mark.parametrize(
    "card",
    [
        "",
        "# No front matter\n",
        "---\nlicense: [unclosed\n---\n",
        "---\n- a list\n---\n",
        "---\nlicense: {a: b}\n---\n",
        "---",
    ],
)
def test_a_card_that_says_nothing_is_no_error(tmp_path, source, card):
    (source / "README.md").write_text(card)
    convert(source, tmp_path / "dst", verify=False)
    assert "license" not in (tmp_path / "dst/README.md").read_text().split("---\n")[1]
    convert(tmp_path / "dst", tmp_path / "back", to_official=True, verify=False)
    assert (tmp_path / "back/README.md").read_text() == card


def test_the_way_back_gives_what_came(tmp_path, source):
    settings = entries_of(source, "tokenizer_config.json")
    (source / "tokenizer_config.json").write_text(
        json.dumps({**settings, "auto_map": {"AutoTokenizer": ["x.Y", None]}})
    )
    convert(source, tmp_path / "dst")
    assert "auto_map" not in entries_of(tmp_path / "dst", "tokenizer_config.json")
    export_folder(tmp_path / "dst", tmp_path / "exported")
    for name in ("dst", "exported"):
        report = convert(tmp_path / name, tmp_path / f"{name}-back", to_official=True)
        assert "tokenizers give the same ids" in report.notes
        back = tmp_path / f"{name}-back"
        assert files(back) - {".blockformer.json"} == files(source) - {
            name for names in LEFT.values() for name in names
        }
        for each in files(back) & files(source) - {"model.safetensors"}:
            assert (back / each).read_bytes() == (source / each).read_bytes(), each


def test_what_was_changed_in_the_repo_goes_back_as_it_is(tmp_path, source):
    convert(source, tmp_path / "dst", verify=False)
    path = tmp_path / "dst/tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": 77}))
    convert(tmp_path / "dst", tmp_path / "back", to_official=True)
    assert entries_of(tmp_path / "back", "tokenizer_config.json")["model_max_length"] == 77
    assert (tmp_path / "back/README.md").read_text() == CARD


def test_heads_of_bge_m3_come_back(tmp_path, source):
    heads = {"weight": torch.randn(3, 4), "bias": torch.randn(3)}
    torch.save(heads, source / "colbert_linear.pt")
    convert(source, tmp_path / "dst", verify=False)
    assert not list((tmp_path / "dst").rglob("*.pt"))
    convert(tmp_path / "dst", tmp_path / "back", to_official=True, verify=False)
    again = torch.load(tmp_path / "back/colbert_linear.pt", weights_only=True)
    assert all(torch.equal(again[name], heads[name]) for name in heads)


def pieces(path, **special):
    """Write a SentencePiece file; `special` are the ids of its special tokens."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="makes a SentencePiece model")
    lines = [line for line in Path(json.__file__).read_text().splitlines() if line.strip()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_prefix=str(path.with_suffix("")), vocab_size=150,
            hard_vocab_limit=False, minloglevel=2, **special,
        )  # fmt: skip
    path.with_suffix(".vocab").unlink()


def sentencepiece_folder(folder):
    torch.manual_seed(0)
    sizes = {"vocab_size": 160, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = transformers.MT5Config(**sizes, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    transformers.MT5ForConditionalGeneration(config).save_pretrained(folder)
    pieces(folder / "spiece.model", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)


def test_a_tokenizer_of_a_sentencepiece_file_loads_without_sentencepiece(tmp_path, fresh):
    sentencepiece_folder(tmp_path / "src")
    report = convert(tmp_path / "src", tmp_path / "dst")
    assert report.has_tokenizer
    assert "tokenizers give the same ids" in report.notes
    original = transformers.AutoTokenizer.from_pretrained(tmp_path / "src")
    text = "def dumps(obj, *, skipkeys=False):"
    assert len(set(original(text).input_ids)) > 5
    program = (
        "import sys; sys.modules['sentencepiece'] = None\nfrom transformers import AutoTokenizer\n"
        f"print(AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False)({text!r}).input_ids)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "dst")], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == original(text).input_ids
    convert(tmp_path / "dst", tmp_path / "back", to_official=True)
    assert (tmp_path / "back/spiece.model").read_bytes() == (tmp_path / "src/spiece.model").read_bytes()
    assert not (tmp_path / "back/tokenizer.json").exists()
    assert not (tmp_path / "back/tokenizer_config.json").exists()


@pytest.mark.parametrize(
    ("family", "cls", "name"),
    [("camembert", "CamembertModel", "sentencepiece.bpe.model"), ("llama", "LlamaForCausalLM", "tokenizer.model")],
)
def test_what_only_the_sentencepiece_file_says_stays_in_it(tmp_path, family, cls, name):
    """Which tokens are special, where no settings do: a `tokenizer.json` made of it is read otherwise."""
    official_folder(tmp_path / "src", family, cls, vocab_size=170)
    pieces(tmp_path / "src" / name)
    report = convert(tmp_path / "src", tmp_path / "dst", verify="quick")
    assert "tokenizers give the same ids" in report.notes
    assert not (tmp_path / "dst/tokenizer.json").exists()
    report = convert(tmp_path / "dst", tmp_path / "back", to_official=True, verify="quick")
    assert "tokenizers give the same ids" in report.notes
    made = [transformers.AutoTokenizer.from_pretrained(tmp_path / each) for each in ("src", "dst", "back")]
    for one in made[1:]:
        assert one("a <s> b </s>NOTUSED").input_ids == made[0]("a <s> b </s>NOTUSED").input_ids
        assert one.all_special_tokens == made[0].all_special_tokens


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json"])
def test_a_tokenizer_that_reads_bytes_needs_no_vocabulary(tmp_path, name):
    official_folder(tmp_path / "src", vocab_size=384)
    entries = entries_of(tmp_path / "src") if name == "config.json" else {}
    (tmp_path / "src" / name).write_text(json.dumps({**entries, "tokenizer_class": "ByT5Tokenizer"}))
    report = convert(tmp_path / "src", tmp_path / "dst")
    assert report.has_tokenizer
    assert "tokenizers give the same ids" in report.notes
    assert not any("cannot be loaded" in note for note in report.notes)
    made = transformers.AutoTokenizer.from_pretrained(tmp_path / "dst")
    assert made("héllo").input_ids == transformers.ByT5Tokenizer()("héllo").input_ids
    convert(tmp_path / "dst", tmp_path / "back", to_official=True)
    sources = (json.loads((tmp_path / each / name).read_text()) for each in ("src", "back"))
    assert next(sources) == next(sources)


def test_without_sentencepiece_such_a_tokenizer_is_refused(tmp_path, monkeypatch):
    official_folder(tmp_path / "src")
    (tmp_path / "src/spiece.model").write_bytes(b"model")
    monkeypatch.setattr(tokenizers, "_is_installed", lambda name: name != "sentencepiece")
    with pytest.raises(ConversionError, match=r"spiece.model: .*pip install sentencepiece protobuf"):
        convert(tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_a_tokenizer_for_some_releases_of_transformers_comes_along(tmp_path, source, tiny_tokenizer):
    present = source / "tokenizer.4.0.0.json"
    (source / "tokenizer.json").rename(present)
    older = json.loads(present.read_text())
    older["model"]["merges"] = []
    (source / "tokenizer.json").write_text(json.dumps(older))
    settings = {"fast_tokenizer_files": ["tokenizer.json", present.name]}
    (source / "tokenizer_config.json").write_text(json.dumps(entries_of(source, "tokenizer_config.json") | settings))
    report = convert(source, tmp_path / "dst", verify="quick")
    assert "tokenizers give the same ids" in report.notes
    made = transformers.AutoTokenizer.from_pretrained(tmp_path / "dst")
    assert made("def dumps(obj):").input_ids == tiny_tokenizer("def dumps(obj):").input_ids
    convert(tmp_path / "dst", tmp_path / "back", to_official=True, verify="quick")
    assert (tmp_path / "back" / present.name).read_bytes() == present.read_bytes()


LETTERS = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "h</w>": 4, "i</w>": 5, "h": 6, "hi</w>": 7}
SIZES_OF_A_STACK = {"layers": 1, "attention_heads": 4, "ffn_dim": 64}
WITHOUT_A_NAME = {
    "biogpt": ("BioGptForCausalLM", "BioGptTokenizer", ("vocab.json", "merges.txt")),
    "fsmt": ("FSMTForConditionalGeneration", "FSMTTokenizer", ("vocab-src.json", "vocab-tgt.json", "merges.txt")),
}


@pytest.mark.parametrize("family", WITHOUT_A_NAME)
def test_a_tokenizer_whose_package_is_missing_keeps_its_class(tmp_path, family, monkeypatch):
    """`AutoTokenizer` finds it by `model_type`, which is another one in our repo."""
    cls, kind, names = WITHOUT_A_NAME[family]
    stacks = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIZES_OF_A_STACK.items()}
    official_folder(tmp_path / "src", family, cls, **(stacks if family == "fsmt" else {}))
    for name in names:
        text = json.dumps(LETTERS) if name.endswith(".json") else "#version: 0.2\nh i</w> 9\n"
        (tmp_path / "src" / name).write_text(text)
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    report = convert(tmp_path / "src", tmp_path / "dst", verify=False)
    assert report.has_tokenizer
    assert any(f"names {kind}, which cannot be loaded here" in note for note in report.notes)
    assert entries_of(tmp_path / "dst", "tokenizer_config.json") == {"tokenizer_class": kind}
    for name in names:
        assert (tmp_path / "dst" / name).read_bytes() == (tmp_path / "src" / name).read_bytes()
    convert(tmp_path / "dst", tmp_path / "back", to_official=True, verify=False)
    assert not (tmp_path / "back/tokenizer_config.json").exists()
    assert {*names} < files(tmp_path / "back")


class MistralCommonBackend(transformers.PreTrainedTokenizerFast):
    """What `AutoTokenizer` takes for Mistral's models where mistral-common is installed."""


@pytest.fixture
def with_mistral_common(monkeypatch):
    usual = transformers.AutoTokenizer.from_pretrained

    def from_pretrained(folder, **options):
        is_theirs = entries_of(Path(folder))["model_type"] == "mistral"
        return MistralCommonBackend(vocab={}) if is_theirs else usual(folder, **options)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)


def test_nobody_needs_mistral_common_where_there_is_another_vocabulary(
    tmp_path, tiny_tokenizer, with_mistral_common, fresh
):
    official_folder(tmp_path / "src", "mistral", tokenizer=tiny_tokenizer)
    (tmp_path / "src/tekken.json").write_text("{}")
    report = convert(tmp_path / "src", tmp_path / "dst")
    assert "tokenizers give the same ids" in report.notes
    assert (
        "tokenizer: tokenizer.json is read; with mistral-common, the source's class reads tekken.json" in report.notes
    )
    assert entries_of(tmp_path / "dst", "tokenizer_config.json")["tokenizer_class"] == "PreTrainedTokenizerFast"
    program = (
        "import sys; from transformers import AutoTokenizer\n"
        "print(AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False)('a small word').input_ids)"
    )
    assert (
        json.loads(fresh(program, str(tmp_path / "dst"), folder=tmp_path)) == tiny_tokenizer("a small word").input_ids
    )
    convert(tmp_path / "dst", tmp_path / "back", to_official=True)
    assert files(tmp_path / "src") <= files(tmp_path / "back")
    assert entries_of(tmp_path / "back", "tokenizer_config.json") == entries_of(
        tmp_path / "src", "tokenizer_config.json"
    )


def test_a_vocabulary_for_mistral_common_only_keeps_its_class(tmp_path):
    official_folder(tmp_path / "src", "mistral")
    (tmp_path / "src/tekken.json").write_text("{}")
    report = convert(tmp_path / "src", tmp_path / "dst")
    assert report.has_tokenizer
    assert any("names MistralCommonBackend, which cannot be loaded here" in note for note in report.notes)
    assert entries_of(tmp_path / "dst", "tokenizer_config.json") == {"tokenizer_class": "MistralCommonBackend"}
    convert(tmp_path / "dst", tmp_path / "back", to_official=True)
    assert not (tmp_path / "back/tokenizer_config.json").exists()


def test_a_copy_that_gives_other_ids_is_refused_both_ways(tmp_path, source, monkeypatch):
    convert(source, tmp_path / "dst")
    monkeypatch.setattr(side_files, "rewritten", lambda settings, original: ({**settings, "model_max_length": 5}, []))
    (tmp_path / "dst/tokenizer_config.json").write_text(
        json.dumps(entries_of(source, "tokenizer_config.json") | {"x": 1})
    )
    for folder, to_official in ((source, False), (tmp_path / "dst", True)):
        with pytest.raises(ConversionError, match=r"in lengths and sides: .*\(SOURCE\)\.save_pretrained"):
            convert(folder, tmp_path / "out", to_official=to_official)
    assert not (tmp_path / "out").exists()


# --- trust ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text('{"token": "hf_secret"}')
    return path


@pytest.mark.parametrize(
    "name", ["generation_config.json", "README.md", "LICENSE.txt", "tokenizer.json", "modules.json"]
)
def test_a_link_that_leaves_the_source_is_never_read(tmp_path, source, secret, name):
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(secret)
    with pytest.raises(ConversionError, match="a link that leaves the folder"):
        convert(source, tmp_path / "dst", verify=False)
    assert not (tmp_path / "dst").exists()


def test_from_official_reads_no_linked_generation_settings(source, secret):
    (source / "generation_config.json").unlink()
    (source / "generation_config.json").symlink_to(secret)
    with pytest.raises(ConversionError, match="a link that leaves the folder"):
        from_official(source)


@pytest.mark.parametrize("name", ["conversion.json", "conversion/source/README.md", "conversion/unused.safetensors"])
@pytest.mark.parametrize("way", [export_folder, lambda a, b: convert(a, b, to_official=True, verify=False)])
def test_a_repo_that_links_out_is_neither_exported_nor_converted(tmp_path, source, secret, name, way):
    edit_tensors(source, **{"model.rotary_emb.inv_freq": torch.ones(3)})
    convert(source, tmp_path / "repo", verify=False)
    (tmp_path / "repo" / name).unlink()
    (tmp_path / "repo" / name).symlink_to(secret)
    with pytest.raises(ConversionError, match="a link that leaves the folder"):
        way(tmp_path / "repo", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("left", [5, "x", [1], None])
def test_a_record_of_what_was_left_out_holds_names(tmp_path, source, left):
    convert(source, tmp_path / "repo", verify=False)
    record = entries_of(tmp_path / "repo", "conversion.json")
    record["files"]["left_out"] = {"for a reason": left}
    (tmp_path / "repo/conversion.json").write_text(json.dumps(record))
    with pytest.raises(ConversionError, match=r"conversion\.json: damaged; delete it"):
        convert(tmp_path / "repo", tmp_path / "back", to_official=True, verify=False)
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("entry", ["stored", "pickled"])
@pytest.mark.parametrize("stored", [["../../out"], ["/tmp/out"], "x", [1]])
def test_names_in_a_record_are_no_paths(tmp_path, source, stored, entry):
    convert(source, tmp_path / "repo", verify=False)
    record = entries_of(tmp_path / "repo", "conversion.json")
    record["files"][entry] = stored
    (tmp_path / "repo/conversion.json").write_text(json.dumps(record))
    before = {path for path in tmp_path.rglob("*") if "repo" not in path.parts}
    with suppress(ConversionError):
        convert(tmp_path / "repo", tmp_path / "back", to_official=True, verify=False)
    outside = {path for path in tmp_path.rglob("*") if not {"repo", "back"} & {*path.parts}}
    assert outside == before
    assert not Path("/tmp/out").exists()


def test_the_index_of_a_repo_of_ours_cannot_lead_out(tmp_path, source, capsys):
    convert(source, tmp_path / "repo", verify=False)
    os.rename(tmp_path / "repo/model.safetensors", tmp_path / "w.safetensors")
    names = load_file(tmp_path / "w.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../w.safetensors")}
    (tmp_path / "repo/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConversionError, match="must name files in the same folder"):
        load_any(tmp_path / "repo")


def test_inspect_says_what_is_wrong_with_the_architectures(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": 5, "model_type": "llama"}')
    with pytest.raises(ConversionError, match="architectures is '5'; it must be a list"):
        summarize(tmp_path)


def test_a_large_modules_json_is_refused_unread(tmp_path, source):
    with open(source / "modules.json", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConversionError, match="longer than"):
        convert(source, tmp_path / "dst", verify=False)


def test_weights_under_another_name_are_refused(tmp_path, source):
    edit_config(source, transformers_weights="other.safetensors")
    for call in (lambda: from_official(source), lambda: convert(source, tmp_path / "dst", verify=False)):
        with pytest.raises(ConversionError, match=r"transformers_weights is 'other\.safetensors'; rename that file"):
            call()


def test_a_pickle_that_shrinks_is_an_error_and_no_crash(tmp_path):
    from blockformer.files.checkpoint import Checkpoint

    official_folder(tmp_path / "src")
    tensors = load_file(tmp_path / "src/model.safetensors")
    (tmp_path / "src/model.safetensors").unlink()
    torch.save(tensors, tmp_path / "src/pytorch_model.bin")
    first, *_, last = tensors
    with Checkpoint(tmp_path / "src") as checkpoint:
        checkpoint.read(first)
        os.truncate(tmp_path / "src/pytorch_model.bin", 4096)
        with pytest.raises(ConversionError, match="changed while it was read"):
            checkpoint.read(last)


# --- arguments and verification -------------------------------------------------------------------------------------


def test_the_former_name_of_dtype_counts(tmp_path):
    official_folder(tmp_path / "src")
    assert from_official(tmp_path / "src", torch_dtype=torch.bfloat16).dtype is torch.bfloat16
    assert from_official(tmp_path / "src", torch_dtype="auto").dtype is torch.float32
    with pytest.raises(ConversionError, match="contradict each other"):
        from_official(tmp_path / "src", dtype="float16", torch_dtype=torch.bfloat16)


def test_with_an_offload_folder_the_weights_are_written_there(tmp_path, monkeypatch):
    official_folder(tmp_path / "src")
    ids = torch.tensor([[5, 9, 2]])
    with torch.no_grad():
        expected = from_official(tmp_path / "src")(ids).logits
        placed = from_official(tmp_path / "src", device_map={"": "disk"}, offload_folder=str(tmp_path / "offload"))
        assert all(parameter.device.type == "meta" for parameter in placed.model.layers.parameters())
        torch.testing.assert_close(placed(ids).logits, expected)
    assert list((tmp_path / "offload").glob("blockformer-*/model.safetensors"))


def test_a_model_that_does_not_load_leaves_no_weights(tmp_path, source):
    offload = tmp_path / "offload"
    with pytest.raises(ConversionError, match="device_map is 'nonsense'; it must be one of auto, balanced"):
        from_official(source, offload_folder=offload, device_map="nonsense")
    assert not offload.exists()
    with pytest.raises(ValueError, match="nonsense"):
        from_official(source, offload_folder=offload, device_map="auto", attn_implementation="nonsense")
    assert not list(offload.iterdir())


def test_outputs_that_are_not_finite_verify_nothing(tmp_path, capsys):
    official_folder(tmp_path / "src")
    edit_tensors(tmp_path / "src", lambda tensors: {name: tensor * float("nan") for name, tensor in tensors.items()})
    report = convert(tmp_path / "src", tmp_path / "dst")
    assert not report.parity.passed
    assert "not finite" in report.not_verified
    assert any(note.startswith("not verified: ") for note in report.notes)
    assert (
        "**Not verified:** float32: the original's outputs are not finite" in (tmp_path / "dst/README.md").read_text()
    )
    with pytest.raises(SystemExit) as stop:
        cli.main(["convert", str(tmp_path / "src"), str(tmp_path / "again")])
    assert stop.value.code == 3
    assert "not verified" in capsys.readouterr().out


def test_nothing_measured_is_no_parity():
    assert not Parity().passed
    assert not Parity(notes=["no room"]).passed
    broken = Measured("float16", 0.0, 0.0, 0.0, 8, same_text=True, finite=False)
    assert not broken.passed
    assert not Parity([broken]).passed
    good = Measured("float32", 0.0, 10.0, 1e-4, 8, same_text=True)
    assert Parity([broken, good]).passed  # a range too small for the model; the sharp comparison counts


def test_safetensors_of_another_name_are_named(tmp_path, source):
    save_file({"x": torch.zeros(2)}, source / "model.fp16.safetensors")
    report = convert(source, tmp_path / "dst", verify=False)
    assert "model.fp16.safetensors" in report.left_out["other weights, which are not read"]


@pytest.mark.skipif(os.name != "posix", reason="other systems refuse such names")
@pytest.mark.parametrize("name", [b"a\nb.txt", b"a\x1b[31mb.txt", b"a\\b.txt", b"\xff.txt"])
def test_a_file_whose_name_is_not_plain_is_named_and_left_out(tmp_path, name):
    official_folder(tmp_path / "src", "bert", "BertModel")
    Path(os.fsdecode(os.fsencode(tmp_path / "src") + b"/" + name)).write_text("a note")
    shown = os.fsdecode(name).encode("utf-8", "backslashreplace").decode()
    notes = convert(tmp_path / "src", tmp_path / "dst", verify=False).notes
    assert [note for note in notes if "a name that not every system can have" in note and repr(shown) in note]
    assert entries_of(tmp_path / "dst", "conversion.json")["files"]["left_out"][side_files.ODD_NAME] == [shown]
    assert shown.isprintable() or shown not in (tmp_path / "dst/README.md").read_text()
    convert(tmp_path / "dst", tmp_path / "back", to_official=True, verify=False)
