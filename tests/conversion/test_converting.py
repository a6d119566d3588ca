"""Conversions there and back: every bit, dtype and file, what is verified, and what a failure leaves."""

import copy
import json
import os
import shutil
import stat

import pytest
import torch
import transformers
from pairs import assert_close
from safetensors.torch import load_file, save_file
from sizes import TINY
from transformers import AutoTokenizer

import blockformer
from blockformer.conversion import ConversionError, convert, export_folder, from_official
from blockformer.conversion.families.registry import FAMILIES
from blockformer.conversion.probes import probes, run
from blockformer.conversion.verify import Measured, compare, verify
from blockformer.files.tokenizers import TEXTS

from .oracles import (
    SPECIAL,
    assert_verified,
    edit_config,
    edit_tensors,
    fingerprint,
    in_our_names,
    official_folder,
    official_model,
    stored,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture
def source(tmp_path, tiny_tokenizer):
    """An official Qwen3 checkpoint with a tokenizer."""
    official_folder(tmp_path / "source", tokenizer=tiny_tokenizer, vocab_size=512)
    return tmp_path / "source"


def logits(model, length=24):
    """Logits of random tokens, the whole model in evaluation mode."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(model.config.vocab_size, (2, length), generator=generator)
    with torch.no_grad():
        return model(ids).logits


def text(model, length=6):
    ids = torch.arange(2 * length).reshape(2, length) * 7 % model.config.vocab_size
    return model.generate(ids, max_new_tokens=10, do_sample=False, pad_token_id=0).tolist()


@pytest.mark.parametrize(
    ("family", "tied", "dtype", "shards"),
    [(family, tied, "float32", tied) for family in SPECIAL for tied in (False, True)]
    + [(family, False, "bfloat16", True) for family in SPECIAL]
    + [("qwen3", True, "float16", False), ("qwen3", False, "float32", True)],
)
def test_there_and_back_every_bit_is_the_same(tmp_path, family, tied, dtype, shards):
    src, dst, back = (tmp_path / name for name in ("src", "dst", "back"))
    model = official_folder(src, family, dtype=DTYPES[dtype], shards=shards, tie_word_embeddings=tied)
    before = fingerprint(src)
    report = convert(src, dst, max_shard_size="60KB" if shards else "5GB", verify=False)
    assert (report.family, report.dtypes) == (family, [dtype])
    convert(dst, back, to_official=True, max_shard_size="60KB" if shards else "5GB", verify=False)
    assert len(list(dst.glob("*.safetensors"))) > 1 or not shards
    assert fingerprint(src) == before

    assert in_our_names(stored(src)) == stored(dst)
    assert stored(back) == stored(src)
    assert ("lm_head.weight" in stored(dst)) == (not tied)
    assert json.loads((back / "config.json").read_text()) == json.loads((src / "config.json").read_text())

    official_class = getattr(transformers, FAMILIES[family].heads[0].official)
    ours = blockformer.BlockformerDecoderForCausalLM.from_pretrained(dst)
    again = official_class.from_pretrained(back)
    assert ours.dtype == again.dtype == DTYPES[dtype]
    expected = official_class.from_pretrained(src)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    for name, tensor in in_our_names(model.state_dict()).items():
        assert torch.equal(ours.state_dict()[name], tensor)
    assert torch.equal(logits(again), logits(expected))
    if dtype == "float32":
        assert_close(logits(ours), logits(expected))
        assert text(ours) == text(expected)
        assert text(ours)[0] != text(ours)[1]


@pytest.mark.versions
@pytest.mark.parametrize("family", SPECIAL)
def test_verification_measures_and_the_card_says_so(tmp_path, family, tiny_tokenizer):
    official_folder(tmp_path / "src", family, tokenizer=tiny_tokenizer, vocab_size=512)
    report = convert(tmp_path / "src", tmp_path / "dst")
    (measured,) = report.parity.measured
    assert measured.dtype == "float32"
    assert measured.max_difference <= 1e-5 * max(1.0, measured.max_logit)
    assert measured.max_logit > 2
    assert measured.same_text
    assert measured.positions > 100
    assert "tokenizers give the same ids" in report.notes
    card = (tmp_path / "dst" / "README.md").read_text()
    assert str(measured) in card
    assert f"`{family}` family" in card
    back = convert(tmp_path / "dst", tmp_path / "back", to_official=True)
    assert back.family == family
    assert_verified(back)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_smaller_dtypes_are_compared_in_their_own_and_in_float32(tmp_path, dtype):
    official_folder(tmp_path / "src", dtype=DTYPES[dtype])
    report = convert(tmp_path / "src", tmp_path / "dst")
    assert [measured.dtype for measured in report.parity.measured] == [dtype, "float32"]
    assert all(measured.passed and measured.max_logit > 2 for measured in report.parity.measured)


def test_a_cast_is_done_once_said_in_the_config_and_verified(tmp_path):
    official_folder(tmp_path / "src")
    report = convert(tmp_path / "src", tmp_path / "dst", dtype="bfloat16")
    assert_verified(report)
    assert json.loads((tmp_path / "dst/config.json").read_text())["dtype"] == "bfloat16"
    official = load_file(tmp_path / "src/model.safetensors")
    want = {name: tensor.bfloat16() for name, tensor in in_our_names(official).items()}
    found = load_file(tmp_path / "dst/model.safetensors")
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)
    convert(tmp_path / "dst", tmp_path / "back", to_official=True, verify=False)
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(ConversionError, match="dtype must be one of float32, bfloat16, float16"):
        convert(tmp_path / "src", tmp_path / "other", dtype="int8")


def test_every_tensor_keeps_its_own_dtype(tmp_path):
    official_folder(tmp_path / "src", dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "src/model.safetensors")
    mixed = {name: t.float() if "norm" in name else t for name, t in tensors.items()}
    save_file(mixed, tmp_path / "src/model.safetensors")
    report = convert(tmp_path / "src", tmp_path / "dst")
    assert report.dtypes == ["bfloat16", "float32"]
    convert(tmp_path / "dst", tmp_path / "back", to_official=True, verify=False)
    assert in_our_names(stored(tmp_path / "src")) == stored(tmp_path / "dst")
    assert stored(tmp_path / "back") == stored(tmp_path / "src")


def test_a_stored_copy_of_a_tied_head_stays_stored_and_must_be_equal(tmp_path):
    official_folder(tmp_path / "src", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "src/model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "src/model.safetensors")
    convert(tmp_path / "src", tmp_path / "dst")
    convert(tmp_path / "dst", tmp_path / "back", to_official=True)
    assert in_our_names(stored(tmp_path / "src")) == stored(tmp_path / "dst")
    assert stored(tmp_path / "back") == stored(tmp_path / "src")
    tensors["lm_head.weight"][3, 3] += 1
    save_file(tensors, tmp_path / "src/model.safetensors")
    with pytest.raises(ConversionError, match=r"ties these tensors[\s\S]*lm_head\.weight"):
        convert(tmp_path / "src", tmp_path / "dst2")
    with pytest.raises(ConversionError, match=r"lm_head\.weight"):
        from_official(tmp_path / "src")


def test_the_repo_is_complete(tmp_path, source):
    convert(source, tmp_path / "dst")
    names = {path.name for path in (tmp_path / "dst").iterdir()}
    assert {
        "README.md",
        "config.json",
        "conversion.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_decoder.py",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= names
    entries = json.loads((tmp_path / "dst/config.json").read_text())
    assert entries["architectures"] == ["BlockformerDecoderForCausalLM"]
    assert entries["auto_map"] == blockformer.BlockformerDecoderConfig.auto_classes
    for code in entries["auto_map"].values():
        assert f"{code.split('.')[0]}.py" in names
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "dst").iterdir() if path.is_file()}
    umask = os.umask(0)
    os.umask(umask)
    assert set(modes.values()) == {0o666 & ~umask}


def test_tokenizer_and_generation_settings_come_along(tmp_path, source, tiny_tokenizer):
    generation = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [0, 2], "pad_token_id": 1}
    (source / "generation_config.json").write_text(json.dumps({**generation, "_from_model_config": True}))
    (source / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "TokenizersBackend"
    settings["auto_map"] = {"AutoTokenizer": ["evil.Tokenizer", None]}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    (source / "evil.py").write_text("raise SystemExit('run')")
    (source / "train.txt").write_text("private")
    report = convert(source, tmp_path / "dst")
    assert (tmp_path / "dst/generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
    card = (tmp_path / "dst/README.md").read_text()
    assert "| `temperature` | 0.6 |" in card
    assert "_from_model_config" not in card
    assert not (tmp_path / "dst/evil.py").exists()
    assert not (tmp_path / "dst/train.txt").exists()
    assert any("auto_map is dropped" in note for note in report.notes)
    copied = json.loads((tmp_path / "dst/tokenizer_config.json").read_text())
    assert copied["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "auto_map" not in copied
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "dst")
    words = "def f(x): return x"
    assert tokenizer(words).input_ids == tiny_tokenizer(words).input_ids
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    convert(tmp_path / "dst", tmp_path / "back", to_official=True)
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    model = blockformer.BlockformerDecoderForCausalLM.from_pretrained(tmp_path / "dst")
    assert model.generation_config.temperature == 0.6


def test_the_class_of_tokenizer_that_the_library_really_takes_is_named(tmp_path, tiny_tokenizer):
    """transformers takes `Qwen2Tokenizer` for `model_type` qwen2, whatever tokenizer_config.json says."""
    official_folder(tmp_path / "src", "qwen2", tokenizer=tiny_tokenizer, vocab_size=512)
    taken = type(AutoTokenizer.from_pretrained(tmp_path / "src")).__name__
    convert(tmp_path / "src", tmp_path / "dst")
    assert type(AutoTokenizer.from_pretrained(tmp_path / "dst")).__name__ == taken

    ours = blockformer.BlockformerDecoderForCausalLM.from_pretrained(tmp_path / "dst")
    blockformer.export_model(ours, tmp_path / "native", tokenizer=tiny_tokenizer)
    refused = False
    try:
        convert(tmp_path / "native", tmp_path / "back", to_official=True)
    except ConversionError as error:
        refused = "ids of texts" in str(error) and "AutoTokenizer loads it as" in str(error)
        convert(tmp_path / "native", tmp_path / "back", to_official=True, verify=False)
    texts = list(TEXTS)
    same = AutoTokenizer.from_pretrained(tmp_path / "back")(texts).input_ids == tiny_tokenizer(texts).input_ids
    assert refused != same


def test_the_way_back_gives_the_very_config_also_old_spellings_and_unknown_entries(tmp_path):
    official_folder(tmp_path / "src", "qwen2")
    edit_config(
        tmp_path / "src",
        rope_parameters=...,
        rope_theta=10000.0,
        dtype=...,
        torch_dtype="float",  # another name of float32
        transformers_version="4.37.0",
        unheard_of={"a": 1},
    )
    report = convert(tmp_path / "src", tmp_path / "dst")
    assert any("'unheard_of'" in note for note in report.notes)
    convert(tmp_path / "dst", tmp_path / "back", to_official=True)
    entries = json.loads((tmp_path / "src/config.json").read_text())
    assert json.loads((tmp_path / "back/config.json").read_text()) == entries
    convert(tmp_path / "dst", tmp_path / "half", to_official=True, dtype="float16", verify=False)
    assert json.loads((tmp_path / "half/config.json").read_text()) == {**entries, "torch_dtype": "float16"}


@pytest.mark.parametrize(
    ("form", "word"),
    [({"traits": ["no_prefix"]}, "no_prefix"), ({"traits": ["both biases"]}, "both biases"), ({"spelt": 1}, "spelt")],
)
def test_an_unknown_word_about_the_source_is_refused(tmp_path, form, word):
    """It may say what the names are: then they would come back otherwise. One of another family is no better."""
    official_folder(tmp_path / "official")
    convert(tmp_path / "official", tmp_path / "ours", verify=False)
    record = json.loads((tmp_path / "ours/conversion.json").read_text())
    assert record["form"]["traits"] == []
    (tmp_path / "ours/conversion.json").write_text(json.dumps({**record, "form": {**record["form"], **form}}))
    with pytest.raises(ConversionError, match=rf"conversion\.json: form: '{word}' means nothing .* of qwen3"):
        convert(tmp_path / "ours", tmp_path / "back", to_official=True, verify=False)
    assert not (tmp_path / "back").exists()


def test_the_record_has_a_version_and_those_without_one_are_read(tmp_path):
    official_folder(tmp_path / "official")
    convert(tmp_path / "official", tmp_path / "ours", verify=False)
    path = tmp_path / "ours/conversion.json"
    record = json.loads(path.read_text())
    assert record["version"] == 1
    path.write_text(json.dumps({**record, "version": 2}))
    with pytest.raises(ConversionError, match=r"conversion\.json: version is 2, and this release reads 1 at most: pip"):
        convert(tmp_path / "ours", tmp_path / "back", to_official=True)
    old = {name: value for name, value in record.items() if name != "version"}
    path.write_text(json.dumps({**old, "form": {**old["form"], "traits": ["4 bits"]}}))
    convert(tmp_path / "ours", tmp_path / "back", to_official=True, verify=False)
    assert stored(tmp_path / "back") == stored(tmp_path / "official")
    path.write_text(json.dumps({**record, "form": {**old["form"], "traits": ["4 bits"]}}))
    with pytest.raises(ConversionError, match="form: '4 bits' means nothing"):
        convert(tmp_path / "ours", tmp_path / "again", to_official=True, verify=False)


def test_a_changed_model_goes_back_with_its_new_settings_and_the_unknown_entries(tmp_path):
    official_folder(tmp_path / "src", "qwen2")
    edit_config(tmp_path / "src", unheard_of=1)
    convert(tmp_path / "src", tmp_path / "dst", verify=False)
    model = blockformer.BlockformerDecoderForCausalLM.from_pretrained(tmp_path / "dst")
    model.resize_token_embeddings(230)
    model.save_pretrained(tmp_path / "dst")
    convert(tmp_path / "dst", tmp_path / "back", to_official=True)
    entries = json.loads((tmp_path / "back/config.json").read_text())
    assert (entries["vocab_size"], entries["unheard_of"], entries["model_type"]) == (230, 1, "qwen2")


@pytest.mark.parametrize("family", SPECIAL)
def test_a_native_model_needs_no_memory_to_become_official(tmp_path, family):
    official_folder(tmp_path / "src", family)
    convert(tmp_path / "src", tmp_path / "dst", verify=False)
    ours = blockformer.BlockformerDecoderForCausalLM.from_pretrained(tmp_path / "dst")
    ours.save_pretrained(tmp_path / "native")
    report = convert(tmp_path / "native", tmp_path / "back", to_official=True)
    assert report.family == family
    official = getattr(transformers, FAMILIES[family].heads[0].official).from_pretrained(tmp_path / "back")
    assert_close(logits(ours), logits(official))


def test_another_family_can_be_asked_for_and_is_checked(tmp_path):
    official_folder(tmp_path / "src", "llama", attention_bias=False, mlp_bias=False)
    convert(tmp_path / "src", tmp_path / "dst", verify=False)
    assert_verified(convert(tmp_path / "dst", tmp_path / "mistral", to_official=True, family="mistral"))
    assert json.loads((tmp_path / "mistral/config.json").read_text())["model_type"] == "mistral"
    with pytest.raises(ConversionError, match=r"'qwen3' cannot express this config[\s\S]*qk_norm must be True"):
        convert(tmp_path / "dst", tmp_path / "qwen3", to_official=True, family="qwen3")
    with pytest.raises(ConversionError, match=r"no family is called 'lama'.*Did you mean 'llama'"):
        convert(tmp_path / "dst", tmp_path / "lama", to_official=True, family="lama")


@pytest.mark.versions
@pytest.mark.parametrize("family", SPECIAL)
@pytest.mark.parametrize("tied", [False, True])
def test_from_official_gives_the_model_and_writes_nothing(tmp_path, family, tied, monkeypatch):
    model = official_folder(tmp_path / "src", family, shards=True, tie_word_embeddings=tied)
    before = fingerprint(tmp_path)
    monkeypatch.chdir(tmp_path)
    ours = blockformer.from_official(tmp_path / "src")
    assert fingerprint(tmp_path) == before
    assert type(ours) is blockformer.BlockformerDecoderForCausalLM
    assert not ours.training
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied
    assert_close(logits(ours), logits(model))
    assert text(ours) == text(model)
    half = blockformer.from_official(str(tmp_path / "src"), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_model_knows_where_it_came_from(tmp_path):
    """By the config's name other libraries find the tokenizer; PEFT looks for a config of ours at the model's name."""
    peft = pytest.importorskip("peft")
    source, repo = tmp_path / "src", tmp_path / "dst"
    official_folder(source)
    convert(source, repo, verify=False)
    settings = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    for folder, name in ((source, None), (repo, str(repo))):
        model = from_official(folder)
        assert (model.config.name_or_path, model.name_or_path) == (str(folder), name or "")
        adapted = peft.get_peft_model(model, settings)
        adapted.save_pretrained(tmp_path / "adapter")
        again = peft.PeftModel.from_pretrained(from_official(folder), tmp_path / "adapter").eval()
        assert torch.equal(logits(again), logits(adapted.eval()))
        assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == name


def test_from_official_takes_what_from_pretrained_takes(tmp_path):
    model = official_folder(tmp_path / "src")
    places = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    rest = {f"model.layers.{layer}": "disk" for layer in range(1, model.config.num_hidden_layers)}
    ours = from_official(
        tmp_path / "src",
        dtype="auto",
        attn_implementation="eager",
        device_map={**places, **rest},
        offload_folder=tmp_path / "offloaded",
    )
    assert ours.config._attn_implementation == "eager"
    assert ours.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    assert_close(logits(ours), logits(model))
    with pytest.raises(TypeError, match="device_maps"):
        from_official(tmp_path / "src", device_maps="cpu")


def test_from_official_is_as_strict_as_convert(tmp_path):
    official_folder(tmp_path / "src")
    tensors = load_file(tmp_path / "src/model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = tensors["model.norm.weight"].long()
    save_file(tensors, tmp_path / "src/model.safetensors")
    with pytest.raises(ConversionError, match=r"model\.norm\.weight[\s\S]*layers\.1\.mlp\.up_proj"):
        from_official(tmp_path / "src")


def test_a_model_in_the_wrong_layout_is_told_so(tmp_path):
    official_folder(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "dst", verify=False)
    with pytest.raises(ConversionError, match="in Blockformer's layout already"):
        convert(tmp_path / "dst", tmp_path / "again")
    with pytest.raises(ConversionError, match="not in Blockformer's layout"):
        convert(tmp_path / "src", tmp_path / "again", to_official=True)


def test_another_task_has_no_official_layout(tmp_path):
    sizes = {name: value for name, value in SIZES_OF_OURS.items() if name != "num_key_value_heads"}
    config = blockformer.preset("roberta", **sizes)
    blockformer.BlockformerEncoderForNextSentencePrediction(config).save_pretrained(tmp_path / "src")
    with pytest.raises(ConversionError, match="BlockformerEncoderForNextSentencePrediction"):
        convert(tmp_path / "src", tmp_path / "dst", to_official=True)


SIZES_OF_OURS = {**TINY, "vocab_size": 99, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    "name",
    [
        "BlockformerDecoderModel",
        "BlockformerDecoderForCausalLM",
        "BlockformerDecoderForSequenceClassification",
        "BlockformerDecoderForTokenClassification",
        "BlockformerDecoderForQuestionAnswering",
    ],
)
def test_a_saved_model_of_any_task_becomes_a_repo(tmp_path, name, tiny_tokenizer):
    torch.manual_seed(0)
    model = getattr(blockformer, name)(blockformer.preset("qwen3", **SIZES_OF_OURS))
    model.save_pretrained(tmp_path / "src")
    for path in (tmp_path / "src").glob("*.py"):
        path.unlink()
    tiny_tokenizer.save_pretrained(tmp_path / "src")
    report = export_folder(tmp_path / "src", tmp_path / "dst", max_shard_size="20KB")
    assert report.tensors == len(stored(tmp_path / "dst"))
    assert stored(tmp_path / "dst") == in_our_names(stored(tmp_path / "src"))
    assert len(list((tmp_path / "dst").glob("*.safetensors"))) > 1
    assert (tmp_path / "dst/modeling_decoder.py").exists()
    assert (tmp_path / "dst/README.md").read_text().count(name) >= 1
    again = getattr(blockformer, name).from_pretrained(tmp_path / "dst")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_a_source_without_a_tokenizer_is_said_and_its_card_runs(tmp_path):
    official_folder(tmp_path / "src")
    report = convert(tmp_path / "src", tmp_path / "dst", verify="quick")
    assert not report.has_tokenizer
    assert "compared on one text only (quick); a full comparison takes longer" in report.notes
    (measured,) = report.parity.measured
    assert (measured.dtype, measured.same_text) == ("float32", None)
    card = (tmp_path / "dst/README.md").read_text(encoding="utf-8")
    code = card.partition("```python\n")[2].partition("```")[0]
    assert "AutoTokenizer" not in code
    exec(code.replace('folder = "."', f"folder = {str(tmp_path / 'dst')!r}"), {})
    with pytest.raises(ConversionError, match="verify must be one of auto, quick, full, none, not 'much'"):
        convert(tmp_path / "src", tmp_path / "other", verify="much")


def test_a_misspelt_field_of_an_official_config_is_named(tmp_path):
    official_folder(tmp_path / "src")
    edit_config(tmp_path / "src", hiden_act="relu", of_another_tool=1)
    report = convert(tmp_path / "src", tmp_path / "dst", verify=False)
    told = "'hiden_act' (did you mean 'hidden_act'?), 'of_another_tool'"
    assert any(told in note for note in report.notes), report.notes
    with pytest.warns(UserWarning, match=r"'hiden_act' \(did you mean 'hidden_act'\?\)$"):
        from_official(tmp_path / "src")


def test_what_transformers_4_wrote_into_all_configs_is_not_called_misspelt(tmp_path):
    official_folder(tmp_path / "src")
    edit_config(tmp_path / "src", tie_encoder_decoder=False, is_decoder=False, use_bfloat16=False, tf_legacy_loss=False)
    from_official(tmp_path / "src")  # a warning fails the test


def test_export_is_strict(tmp_path):
    model = blockformer.BlockformerDecoderForCausalLM(blockformer.preset("qwen3", **SIZES_OF_OURS))
    model.save_pretrained(tmp_path / "src")
    tensors = load_file(tmp_path / "src/model.safetensors")
    tensors["model.layers.7.extra"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "src/model.safetensors")
    with pytest.raises(ConversionError, match=r"layers\.7\.extra[\s\S]*model\.norm\.weight"):
        export_folder(tmp_path / "src", tmp_path / "dst")
    official_folder(tmp_path / "official")
    with pytest.raises(ConversionError, match="`blockformer convert` makes a repo of it"):
        export_folder(tmp_path / "official", tmp_path / "dst")
    edit_config(tmp_path / "src", architectures=["__builtins__"])
    with pytest.raises(ConversionError, match="which is not a model of Blockformer"):
        export_folder(tmp_path / "src", tmp_path / "dst")


def test_progress_is_told_up_to_the_end(tmp_path):
    official_folder(tmp_path / "src", shards=True)
    told = []
    report = convert(tmp_path / "src", tmp_path / "dst", progress=lambda *step: told.append(step))
    writing = [(done, total) for step, done, total in told if step == "writing weights"]
    assert writing == sorted(writing)
    assert writing[-1] == (report.nbytes, report.nbytes)
    assert any("comparing 2 of 2: converted model" in step for step, _, _ in told)


@pytest.mark.parametrize("family", ["qwen3", "bert", "t5"])
def test_a_comparison_says_how_far_it_is_inside_each_pass(tmp_path, family):
    official_folder(tmp_path / "src", family)
    told = []
    convert(tmp_path / "src", tmp_path / "dst", dtype="bfloat16", progress=lambda *step: told.append(step))
    comparing = [(step, done, total) for step, done, total in told if step.startswith("comparing") and total]
    assert len({total for _, _, total in comparing}) == 1  # known once the first model is loaded
    done = [done for _, done, _ in comparing]
    assert done == sorted(done)
    assert done[0] == 0
    assert done[-1] == comparing[-1][2]
    runs = {step for step, _, _ in comparing}
    assert len(runs) == 4
    for run_of in runs:
        assert len({done for step, done, _ in comparing if step == run_of}) > 20


def _broken(model):
    """The same model with one number changed."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] += 0.05
    return model


def test_a_single_wrong_number_fails_the_verification():
    model = official_model("qwen3")
    inputs = probes(model.config)
    same, other = run(model, inputs), run(_broken(model), inputs)
    assert compare(torch.float32, same, run(copy.deepcopy(model), inputs)).passed
    assert not compare(torch.float32, same, other).passed
    with pytest.raises(ConversionError, match="does not compute what the original computes"):
        verify(lambda dtype: model, lambda dtype: _broken(model), model.config, torch.float32, 1)


def test_a_difference_leaves_no_target(tmp_path, monkeypatch):
    official_folder(tmp_path / "src")
    import blockformer.conversion.verify as module

    real = module.run

    def run_wrongly(model, inputs, *rest):
        ours = isinstance(model, blockformer.BlockformerDecoderForCausalLM)
        return real(_broken(model) if ours else model, inputs, *rest)

    monkeypatch.setattr(module, "run", run_wrongly)
    with pytest.raises(ConversionError, match="does not compute"):
        convert(tmp_path / "src", tmp_path / "dst")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_the_limit_in_16_bits_is_the_same_in_both_directions():
    theirs, ours, exact = (([torch.tensor([1.0, value])], [], "logits") for value in (2.3, 2.05, 2.0))
    there = compare(torch.bfloat16, theirs, ours, (theirs, exact))
    back = compare(torch.bfloat16, ours, theirs, (theirs, exact))
    assert there.limit == back.limit == pytest.approx(0.6)
    assert there.passed
    assert back.passed
    assert not compare(torch.bfloat16, ([torch.tensor([1.0, 3.0])], [], "logits"), theirs, (theirs, exact)).passed


def test_one_value_may_be_far_off_in_16_bits_where_all_together_are_as_exact():
    exact, noise = torch.zeros(2000), torch.randn(2000, generator=torch.Generator().manual_seed(0)) / 20
    results = {"exact": exact, "theirs": noise, "ours": noise.roll(7).where(exact.new_ones(2000).cumsum(0) > 1, 0.6)}
    results |= {
        "wrong": results["ours"] + 0.3 * results["ours"].sign(),
        "nan": results["ours"] / results["ours"].sign().relu(),
    }
    of = {name: ([values], [], "logits") for name, values in results.items()}
    named = (of["theirs"], of["exact"])
    assert compare(torch.float16, of["theirs"], of["ours"], named).passed
    assert compare(torch.float16, of["ours"], of["theirs"], named).passed
    for name in ("wrong", "nan"):
        assert not compare(torch.float16, of["theirs"], of[name], named).passed


def test_a_wrong_text_fails_in_float32_only():
    good = Measured("float32", 0.0, 10.0, 1e-4, 8, same_text=True)
    from blockformer.conversion.verify import Parity

    assert Parity([good]).passed
    assert not Parity([Measured("float32", 0.0, 10.0, 1e-4, 8, same_text=False)]).passed
    assert Parity([Measured("bfloat16", 0.1, 10.0, 0.3, 8, same_text=False), good]).passed
    assert not Parity([Measured("bfloat16", 0.4, 10.0, 0.3, 8, same_text=True), good]).passed


def test_too_little_memory_skips_the_comparison_and_says_so(tmp_path, monkeypatch):
    import blockformer.conversion.verify as module

    official_folder(tmp_path / "src", dtype=torch.bfloat16)
    monkeypatch.setattr(module, "available_memory", lambda: 1000)
    report = convert(tmp_path / "src", tmp_path / "dst")
    assert report.parity.measured == []
    assert not report.parity.passed
    assert report.not_verified.startswith("not compared in bfloat16")
    assert any(note.startswith("not verified: not compared in bfloat16") for note in report.notes)
    card = (tmp_path / "dst/README.md").read_text()
    assert "**Not verified:** not compared in bfloat16" in card
    assert "not compared in float32" in card


def test_probes_fit_small_models():
    config = official_model("qwen3", max_position_embeddings=16, vocab_size=5).config
    for probe in probes(config):
        assert probe.input_ids.max() < 5
        assert probe.input_ids.shape[1] <= 16
    padded = probes(config)[-1]
    assert padded.attention_mask[0, 0] == 0
    assert padded.attention_mask[:, -1].all()


def test_not_a_number_is_reported_kept_or_refused(tmp_path):
    official_folder(tmp_path / "src")
    tensors = load_file(tmp_path / "src/model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    tensors["lm_head.weight"][0, :2] = float("inf")
    save_file(tensors, tmp_path / "src/model.safetensors")
    report = convert(tmp_path / "src", tmp_path / "dst")
    (note,) = [note for note in report.notes if "NaN" in note]
    assert "'model.norm.weight': 1 of 64" in note
    assert "'lm_head.weight': 2 of" in note
    assert not report.parity.measured[0].finite
    assert stored(tmp_path / "dst") == in_our_names(stored(tmp_path / "src"))
    with pytest.raises(ConversionError, match=r"NaN or infinite[\s\S]*model\.norm\.weight"):
        convert(tmp_path / "src", tmp_path / "strict", strict_finite=True)
    assert not (tmp_path / "strict").exists()
    with pytest.warns(UserWarning, match="NaN or infinite values in 2 tensors"):
        from_official(tmp_path / "src")


def test_a_cast_that_overflows_is_reported(tmp_path):
    official_folder(tmp_path / "src")
    tensors = load_file(tmp_path / "src/model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e6
    save_file(tensors, tmp_path / "src/model.safetensors")
    report = convert(tmp_path / "src", tmp_path / "dst", dtype="float16", verify=False)
    assert any("'model.layers.0.mlp.up_proj.weight': 1 of 6144 in float16" in note for note in report.notes)


def test_pickled_checkpoints_are_read_too(tmp_path):
    official_folder(tmp_path / "src", "llama")
    tensors = load_file(tmp_path / "src/model.safetensors")
    os.remove(tmp_path / "src/model.safetensors")
    torch.save(tensors, tmp_path / "src/pytorch_model.bin")
    convert(tmp_path / "src", tmp_path / "dst")
    found = load_file(tmp_path / "dst/model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in in_our_names(tensors).items())


def test_a_damaged_memory_is_told_and_is_not_needed(tmp_path):
    official_folder(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "dst", verify=False)
    (tmp_path / "dst/conversion.json").write_text('{"family": "../../etc"}')
    with pytest.raises(ConversionError, match=r"conversion\.json: damaged; delete it"):
        convert(tmp_path / "dst", tmp_path / "back", to_official=True)
    (tmp_path / "dst/conversion.json").unlink()
    convert(tmp_path / "dst", tmp_path / "back", to_official=True, verify=False)
    assert stored(tmp_path / "back") == stored(tmp_path / "src")


def test_the_special_settings_really_slide(tmp_path):
    """A window shorter than the probes, so that the comparison sees it."""
    assert SPECIAL["mistral"]["sliding_window"] < probes(official_model("mistral").config)[0].input_ids.shape[1]
    official_folder(tmp_path / "src", "mistral")
    ours = from_official(tmp_path / "src")
    shutil.rmtree(tmp_path / "src")
    full = official_model("mistral", sliding_window=None)
    assert not torch.allclose(logits(ours), logits(full), atol=0.1)


def test_from_official_loads_a_repo_of_ours_as_it_is(tmp_path):
    torch.manual_seed(0)
    config = blockformer.BlockformerDecoderConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    ours = blockformer.BlockformerDecoderForCausalLM(config).eval()
    ours.save_pretrained(tmp_path / "ours")
    found = from_official(tmp_path / "ours", attn_implementation="eager")
    assert type(found) is type(ours)
    assert found.config._attn_implementation == "eager"
    assert not found.training
    for name, tensor in ours.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor)
    assert from_official(tmp_path / "ours", dtype="float16").dtype is torch.float16


@pytest.mark.parametrize("kept", [(), ("norm",)])
def test_weights_in_8_bits_without_factors_load_in_what_is_computed_in(source, kept):
    def cast(tensors):
        return {
            name: tensor if any(part in name for part in kept) else tensor.to(torch.float8_e4m3fn)
            for name, tensor in tensors.items()
        }

    edit_tensors(source, cast)
    model = from_official(source)
    assert model.dtype == torch.float32
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(model.state_dict()[name], load_file(source / "model.safetensors")[name].float())
