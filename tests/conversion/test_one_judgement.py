"""Odd folders, each through every door: all take it, with the official class's numbers, or all refuse it alike."""

import json
import warnings

import pytest
import torch
import transformers
from pairs import assert_close
from safetensors.torch import load_file, save_file, save_model

import blockformer
from blockformer.conversion import ConversionError, convert, export_folder, from_official
from blockformer.summary import summarize

from .oracles import edit_config, edit_tensors, entries_of, official_folder, stored

IDS = torch.arange(5, 25)[None]
BITSANDBYTES = {"load_in_4bit": True, "quant_method": "bitsandbytes"}
REMOTE = """
import json, sys
import torch, transformers
ids = torch.arange(5, 25)[None]
found = {}
for folder, auto in json.loads(sys.argv[1]).items():
    with torch.no_grad():
        model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True).eval()
        found[folder] = model(ids)[0].double().tolist()
print(json.dumps(found))
"""


def pickled(key):
    def change(folder, model):
        torch.save({key: load_file(folder / "model.safetensors"), "epoch": 3}, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()

    return change


def prefixed(prefix):
    return lambda folder, model: edit_tensors(folder, lambda all_: {prefix + name: each for name, each in all_.items()})


def only_the_head(folder, model):
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})


def value_head(folder, model):
    edit_tensors(folder, **{"v_head.summary.weight": torch.randn(1, 64), "v_head.summary.bias": torch.zeros(1)})


def told(**entries):
    return lambda folder, model: edit_config(folder, **entries)


def of_another_dtype(folder, model):
    edit_tensors(folder, lambda all_: {name: each.half() for name, each in all_.items()})


def integers(folder, model):
    edit_tensors(folder, lambda all_: {name: each.round().to(torch.int32) for name, each in all_.items()})


def for_another_library(name):
    def change(folder, model=None):
        (folder / "model.safetensors").unlink()
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"weights")

    return change


def adapted(folder, model=None):
    """Names of a model in PEFT, not merged."""
    inner, outer = "q_proj.weight", "q_proj.base_layer.weight"
    edit_tensors(
        folder,
        lambda all_: {f"base_model.model.{name.replace(inner, outer)}": each for name, each in all_.items()},
        **{"base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.zeros(4, 64)},
    )


def adapted_without_a_prefix(folder, model=None):
    edit_tensors(
        folder, lambda all_: {name.replace("q_proj.", "q_proj.base_layer."): each for name, each in all_.items()}
    )


def with_saved_modules(folder, model=None):
    """The head twice, as PEFT keeps a module that it trains next to adapters."""
    parts = ("original_module", "modules_to_save.default")
    edit_tensors(
        folder,
        lambda all_: {
            name.replace("lm_head.", f"lm_head.{part}."): each for name, each in all_.items() for part in parts
        },
    )


LLAMA, TIED, BERT = ("llama", "LlamaForCausalLM"), ("llama", "LlamaForCausalLM", True), ("mpnet", "MPNetModel")
TAKEN = {
    "only the head of tied ones": (TIED, only_the_head),
    "pickle under state_dict": (LLAMA, pickled("state_dict")),
    "pickle of an encoder": (BERT, pickled("state_dict")),
    "empty quantization_config": (LLAMA, told(quantization_config={})),
    "quantization_config of no method": (LLAMA, told(quantization_config={"quant_method": "none"})),
    "headless masked LM": (BERT, told(architectures=["MPNetForMaskedLM"])),
    "another spelling of the class": (LLAMA, told(architectures=["LLaMAForCausalLM"])),
    "class name of FSDP": (LLAMA, told(architectures=["FSDPLlamaForCausalLM"])),
    "value head": (LLAMA, value_head),
    "file of float16": (LLAMA, of_another_dtype),
}
REFUSED = {
    "names with module.": (LLAMA, prefixed("module."), r"without the prefix 'module\.'.*out of the names"),
    "names with _orig_mod.": (LLAMA, prefixed("_orig_mod."), r"without the prefix '_orig_mod\.' of torch.compile"),
    "names of FSDP": (LLAMA, prefixed("_fsdp_wrapped_module."), r"'_fsdp_wrapped_module\.' of FSDP.*out of the names"),
    "class name of a compiled model": (LLAMA, told(architectures=["OptimizedModule"]), r'write "architectures"'),
    "stale 4 bits": (LLAMA, told(quantization_config=BITSANDBYTES), "plain.*remove quantization_config"),
    "stale quantization in a word": (LLAMA, told(quantization_config="gptq"), "quantized by 'gptq', but all"),
    "no model_type": (LLAMA, told(model_type=...), 'write "model_type": "llama"'),
    "pickle under model": (LLAMA, pickled("model"), "'model': is a dict of them.*save only them, as"),
    "pickle under module": (LLAMA, pickled("module"), "'module': is a dict of them.*save only them, as"),
    "integers": (LLAMA, integers, "must be floating-point"),
    "dtype with torch.": (LLAMA, told(dtype="torch.float16"), r"dtype is 'torch\.float16'; .*such as 'bfloat16'"),
    "names of PEFT": (LLAMA, adapted, r"base_layer\.weight' is a name in a model that PEFT .*merge_and_unload\(\)"),
    "layers of PEFT": (LLAMA, adapted_without_a_prefix, r"that PEFT has adapted; save the model .*merge_and_unload"),
    "saved modules of PEFT": (LLAMA, with_saved_modules, r"lm_head\.\w+.*that PEFT has adapted; save the model"),
    "weights for rust-bert": (LLAMA, for_another_library("rust_model.ot"), r"for rust-bert \(rust_model\.ot\): name"),
    "weights of TensorFlow": (
        LLAMA,
        for_another_library("tf_model.h5"),
        r"for TensorFlow \(tf_model\.h5\): transformers before 5",
    ),
    "weights of Flax": (LLAMA, for_another_library("flax_model.msgpack"), r"for Flax .*from_flax=True"),
    "weights of DeepSpeed": (
        LLAMA,
        for_another_library("global_step9/mp_rank_00_model_states.pt"),
        "DeepSpeed ZeRO saves",
    ),
    "weights of FSDP": (LLAMA, for_another_library("pytorch_model_fsdp_0/__0_0.distcp"), "accelerate merge-weights"),
    "weights for ONNX": (LLAMA, for_another_library("onnx/model.onnx"), "the checkpoint that it was exported from"),
    "untied without a head": (
        LLAMA,
        lambda folder, model: edit_tensors(folder, **{"lm_head.weight": None}),
        r'nothing fills lm_head\.weight.*Write "architectures": \["LlamaModel"\]',
    ),
}


def folder_of(path, kind, change):
    """The odd folder, and the model that it holds."""
    family, cls, *tied = kind
    settings = {"tie_word_embeddings": bool(tied)} if family == "llama" else {}
    model = official_folder(path, family, cls, **settings)
    change(path, model)
    return model


def names_of(folder):
    """The names, dtypes and bits of its tensors, whichever format they are in."""
    path = folder / "pytorch_model.bin"
    if not path.exists():
        return stored(folder)
    wrapped = torch.load(path, weights_only=True)
    inner = next(each for each in wrapped.values() if isinstance(each, dict))
    save_file(inner, folder.parent / "twin.safetensors")
    return stored(folder.parent)


def test_what_one_door_takes_all_take(tmp_path, fresh):
    autos, expected = {}, {}
    for case, (kind, change) in TAKEN.items():
        src, ours, exported, back = (tmp_path / case.replace(" ", "-") / each for each in ("src", "a", "b", "c"))
        model = folder_of(src, kind, change)
        wide = case != "file of float16"
        model = model if wide else type(model).from_pretrained(src, dtype=torch.float32)
        with torch.no_grad():
            wanted = model(IDS)[0]
            assert convert(src, ours, verify="quick").parity.passed, case
            assert blockformer.verify(ours).is_ok, case
            export_folder(ours, exported)
            convert(ours, back, to_official=True, verify="quick")
            loaded = getattr(blockformer, entries_of(ours)["architectures"][0]).from_pretrained(ours).float()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # notes of the report, which other tests read
                direct = from_official(src).float()
            for each in (loaded, direct):
                assert_close(each(IDS)[0], wanted, name=f"{case}: ")
        assert stored(back) == names_of(src), case
        kept = {name: value for name, value in entries_of(src).items() if name != "transformers_version"}
        assert kept.items() <= entries_of(back).items(), case
        if wide:
            auto = "AutoModelForCausalLM" if kind[0] == "llama" else "AutoModel"
            autos |= {str(ours): auto, str(exported): auto}
            expected |= dict.fromkeys((str(ours), str(exported)), wanted)
    found = json.loads(fresh(REMOTE, json.dumps(autos), folder=tmp_path))
    for folder, values in found.items():
        assert_close(torch.tensor(values, dtype=torch.float32), expected[folder])


@pytest.mark.parametrize("case", REFUSED)
def test_what_one_door_refuses_all_refuse_alike(tmp_path, case):
    kind, change, message = REFUSED[case]
    src = tmp_path / "src"
    folder_of(src, kind, change)
    said = set()
    for door in (lambda: convert(src, tmp_path / "dst"), lambda: from_official(src)):
        with pytest.raises(ConversionError, match=f"(?s){message}") as refused:
            door()
        said.add(str(refused.value))
    assert len(said) == 1
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_fsdp_wrapped_module."])
def test_ours_with_names_of_a_wrapper_is_refused_alike(tmp_path, prefix):
    official_folder(tmp_path / "src", "llama")
    convert(tmp_path / "src", tmp_path / "ours", verify=False)
    prefixed(prefix)(tmp_path / "ours", None)
    assert_refused_alike(tmp_path, "out of the names")


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_ours_in_a_wrapped_pickle_is_refused_alike(tmp_path, key):
    official_folder(tmp_path / "src", "llama")
    convert(tmp_path / "src", tmp_path / "ours", verify=False)
    pickled(key)(tmp_path / "ours", None)
    assert_refused_alike(tmp_path, "save only them, as")


@pytest.mark.parametrize("change", [adapted, adapted_without_a_prefix])
def test_ours_that_peft_has_adapted_is_refused_alike(tmp_path, change):
    official_folder(tmp_path / "src", "llama")
    convert(tmp_path / "src", tmp_path / "ours", verify=False)
    change(tmp_path / "ours")
    assert_refused_alike(tmp_path, r"PEFT has adapted; save the model that its merge_and_unload\(\) returns")


OURS_REFUSED = {
    "dtype with torch.": ({"dtype": "torch.float16"}, r"dtype must be one of float32, .*not 'torch\.float16'"),
    "class of transformers": (
        {"architectures": ["LlamaForCausalLM"]},
        r"'LlamaForCausalLM', which is not a model of Blockformer .*\[\"BlockformerDecoderForCausalLM\"\]",
    ),
    "stale 4 bits": ({"quantization_config": BITSANDBYTES}, "all weights are plain.*so remove quantization_config"),
}


@pytest.mark.parametrize("case", OURS_REFUSED)
def test_settings_of_ours_are_judged_alike(tmp_path, case):
    entries, message = OURS_REFUSED[case]
    official_folder(tmp_path / "src", "llama")
    ours = tmp_path / "ours"
    convert(tmp_path / "src", ours, verify=False)
    edit_config(ours, **entries)
    said = set()
    for door in (
        lambda: export_folder(ours, tmp_path / "exported"),
        lambda: convert(ours, tmp_path / "back", to_official=True),
        lambda: from_official(ours),
    ):
        with pytest.raises(ConversionError, match=f"(?s){message}") as refused:
            door()
        said.add(str(refused.value))
    assert said == set(blockformer.verify(ours).problems["weights"])


@pytest.mark.parametrize("names", [..., ["FSDPBlockformerDecoderForCausalLM"]], ids=["no class", "class name of FSDP"])
def test_classes_that_ours_may_name(tmp_path, names):
    model = official_folder(tmp_path / "src", "llama")
    ours = tmp_path / "ours"
    convert(tmp_path / "src", ours, verify=False)
    edit_config(ours, architectures=names)
    assert blockformer.verify(ours).is_ok
    export_folder(ours, tmp_path / "exported")
    assert blockformer.verify(tmp_path / "exported").is_ok
    assert "FSDP" not in (tmp_path / "exported/config.json").read_text()
    assert convert(ours, tmp_path / "back", to_official=True, verify="quick").parity.passed
    with torch.no_grad():
        assert_close(from_official(ours)(IDS).logits, model(IDS).logits)


def test_weights_that_a_library_has_quantized_are_not_called_spare(tmp_path):
    official_folder(tmp_path / "src", "llama")
    ours = tmp_path / "ours"
    convert(tmp_path / "src", ours, verify=False)
    edit_config(ours, quantization_config=BITSANDBYTES)
    edit_tensors(ours, **{"model.layers.0.self_attn.q_proj.weight.absmax": torch.zeros(4, dtype=torch.uint8)})
    for door in (
        lambda: export_folder(ours, tmp_path / "exported"),
        lambda: convert(ours, tmp_path / "back", to_official=True),
    ):
        with pytest.raises(ConversionError, match="quantized by 'bitsandbytes', which only loading reads; make plain"):
            door()


def test_damaged_settings_of_generation_do_not_go_back(tmp_path):
    official_folder(tmp_path / "src", "llama")
    convert(tmp_path / "src", tmp_path / "ours", verify=False)
    (tmp_path / "ours/generation_config.json").write_text("{")
    for door in (
        lambda: export_folder(tmp_path / "ours", tmp_path / "exported"),
        lambda: convert(tmp_path / "ours", tmp_path / "back", to_official=True),
    ):
        with pytest.raises(ConversionError, match=r"generation_config\.json: not valid JSON"):
            door()


LABELS = ("bert", "BertForSequenceClassification")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"version": 99}', ""])
def test_a_damaged_record_is_judged_alike(tmp_path, text):
    """Only what reads no record takes the repo: loading it."""
    official_folder(tmp_path / "src", "llama")
    ours = tmp_path / "ours"
    convert(tmp_path / "src", ours, verify=False)
    (ours / "conversion.json").write_text(text)
    said = set()
    for door in (
        lambda: export_folder(ours, tmp_path / "exported"),
        lambda: convert(ours, tmp_path / "back", to_official=True),
    ):
        with pytest.raises(ConversionError, match=r"conversion\.json: .*delete (it|the file)") as refused:
            door()
        said.add(str(refused.value))
    (problem,) = blockformer.verify(ours).problems["settings"]
    assert len(said) == 1
    assert said.pop().startswith(problem)
    assert from_official(ours) is not None
    (ours / "conversion.json").unlink()
    convert(ours, tmp_path / "back", to_official=True, verify=False)


REFUSED_SETTINGS = {"early_stopping": "x"}


def test_settings_of_generation_that_transformers_refuses_are_refused_alike(tmp_path):
    official_folder(tmp_path / "src", "llama")
    ours, text = tmp_path / "ours", json.dumps(REFUSED_SETTINGS)
    convert(tmp_path / "src", ours, verify=False)
    for folder in (tmp_path / "src", ours):
        (folder / "generation_config.json").write_text(text)
    said = set()
    for door in (
        lambda: convert(tmp_path / "src", tmp_path / "dst", verify=False),
        lambda: from_official(tmp_path / "src"),
        lambda: from_official(ours),
        lambda: export_folder(ours, tmp_path / "exported"),
        lambda: convert(ours, tmp_path / "back", to_official=True, verify=False),
    ):
        with pytest.raises(
            ConversionError, match=r"generation_config\.json: .*early_stopping.*Correct that entry"
        ) as no:
            door()
        said.add(str(no.value))
    assert said == set(blockformer.verify(ours).problems["settings"])
    with pytest.raises(ValueError, match="early_stopping"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "src")


def test_an_encoder_may_have_settings_of_generation_that_are_refused(tmp_path):
    """transformers does not read them there."""
    official_folder(tmp_path / "src", "bert", "BertForMaskedLM")
    (tmp_path / "src/generation_config.json").write_text(json.dumps(REFUSED_SETTINGS))
    assert convert(tmp_path / "src", tmp_path / "ours").parity.passed
    assert blockformer.verify(tmp_path / "ours").is_ok
    assert from_official(tmp_path / "src") is not None
    convert(tmp_path / "ours", tmp_path / "back", to_official=True)
    assert entries_of(tmp_path / "back", "generation_config.json") == REFUSED_SETTINGS


@pytest.mark.parametrize("place", ["generation_config.json", "config.json"])
def test_a_model_is_saved_again_with_settings_of_generation_as_they_came(tmp_path, place):
    """Of settings that it has loaded, transformers saves also those that mean nothing without sampling."""
    settings = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": 3}
    official_folder(tmp_path / "src", "llama")
    (tmp_path / "src/generation_config.json").unlink()
    if place == "config.json":
        edit_config(tmp_path / "src", **settings)
    else:
        (tmp_path / "src" / place).write_text(json.dumps(settings))
    from_official(tmp_path / "src").save_pretrained(tmp_path / "saved")
    assert settings.items() <= entries_of(tmp_path / "saved", "generation_config.json").items()


@pytest.mark.parametrize(
    ("family", "entries"),
    [
        ("llama", {"rope_parameters": ..., "rope_theta": None}),
        ("modernbert", {"rope_parameters": ..., "local_rope_theta": None}),
    ],
)
def test_a_rotation_without_a_base_is_refused_alike(tmp_path, family, entries):
    """The official classes take the power of None."""
    official_folder(tmp_path / "src", family, pad_token_id=0)
    edit_config(tmp_path / "src", **entries)
    for door in (lambda: convert(tmp_path / "src", tmp_path / "dst"), lambda: from_official(tmp_path / "src")):
        with pytest.raises(ConversionError, match=r"rope_theta is null .*write the number"):
            door()


def test_one_rotation_where_each_layer_type_has_its_own_is_refused_alike(tmp_path):
    """The official class puts the usual rotations next to the entries, and reads only these."""
    official_folder(tmp_path / "src", "gemma3_text", pad_token_id=0)
    edit_config(tmp_path / "src", rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    said = set()
    for door in (
        lambda: convert(tmp_path / "src", tmp_path / "dst"),
        lambda: from_official(tmp_path / "src"),
        lambda: summarize(tmp_path / "src"),
    ):
        with pytest.raises(
            ConversionError,
            match=r"one dict for each layer type \(.*'sliding_attention'.* not read 'rope_type', 'rope_theta' next",
        ) as refused:
            door()
        said.add(str(refused.value))
    assert len(said) == 1


MISFITS = {
    "another class": (LLAMA, {"architectures": ["LlamaModel"]}, '"architectures": ["LlamaForCausalLM"]'),
    "the stack of an encoder": (
        LABELS,
        {"architectures": ["BertModel"]},
        '"architectures": ["BertForSequenceClassification"]',
    ),
    "the stack, and a head for answers": (
        ("bert", "BertForQuestionAnswering"),
        {"architectures": ["BertModel"]},
        '"architectures": ["BertForQuestionAnswering"]',
    ),
    "the stack of a detector": (
        ("electra", "ElectraForPreTraining"),
        {"architectures": ["ElectraModel"]},
        '"architectures": ["ElectraForPreTraining"]',
    ),
    "the stack, and an old name of the head": (
        ("gpt_neox", "GPTNeoXForCausalLM"),
        {"architectures": ["GPTNeoXModel"]},
        '"architectures": ["GPTNeoXForCausalLM"]',
    ),
    "fewer tokens": (LLAMA, {"vocab_size": 190}, '"vocab_size": 199'),
    "fewer layers": (LLAMA, {"num_hidden_layers": 1}, '"num_hidden_layers": 2'),
    "more labels": (LABELS, {"id2label": {str(each): str(each) for each in range(9)}}, '"num_labels": 3'),
    "one label": (LABELS, {"id2label": {"0": "a"}, "bos_token_id": 1, "pretraining_tp": 1}, '"num_labels": 3'),
    "other labels": (LABELS, {"num_labels": 2, "id2label": ...}, '"num_labels": 3'),
    "class and tokens": (
        LLAMA,
        {"architectures": ["LlamaForSequenceClassification"], "vocab_size": 190},
        '"architectures": ["LlamaForCausalLM"], "vocab_size": 199',
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_tensors_that_do_not_fit_are_refused_with_the_settings_that_do(tmp_path, case):
    kind, entries, remedy = MISFITS[case]
    family, cls = kind
    official_folder(tmp_path / "src", family, cls, **({"tie_word_embeddings": False} if family == "llama" else {}))
    edit_config(tmp_path / "src", **entries)
    for door in (lambda: convert(tmp_path / "src", tmp_path / "dst"), lambda: from_official(tmp_path / "src")):
        with pytest.raises(ConversionError) as refused:
            door()
        assert str(refused.value).endswith(f"\nThe tensors fit if config.json has {remedy}.")
    edit_config(tmp_path / "src", **json.loads(f"{{{remedy}}}"))
    convert(tmp_path / "src", tmp_path / "dst", verify=False)


@pytest.mark.parametrize(
    ("family", "cls"),
    [
        ("electra", "ElectraForPreTraining"),
        ("bert", "BertForQuestionAnswering"),
        ("roberta", "RobertaForSequenceClassification"),
        ("gpt_neox", "GPTNeoXForCausalLM"),
        ("bart", "BartForSequenceClassification"),
    ],
)
def test_where_no_class_is_named_the_tensors_show_their_head(tmp_path, family, cls):
    official_folder(tmp_path / "src", family, cls)
    edit_tensors(
        tmp_path / "src", lambda all_: {name.replace("lm_head.", "embed_out."): each for name, each in all_.items()}
    )
    edit_config(tmp_path / "src", architectures=...)
    convert(tmp_path / "src", tmp_path / "ours", verify=False)
    convert(tmp_path / "ours", tmp_path / "back", to_official=True, verify=False)
    assert stored(tmp_path / "back") == stored(tmp_path / "src")
    edit_config(tmp_path / "src", architectures=[cls])
    convert(tmp_path / "src", tmp_path / "named", verify=False)
    assert stored(tmp_path / "named") == stored(tmp_path / "ours")
    assert entries_of(tmp_path / "named")["architectures"] == entries_of(tmp_path / "ours")["architectures"]


def test_no_remedy_is_named_that_does_not_help(tmp_path):
    official_folder(tmp_path / "src", "llama")
    edit_tensors(tmp_path / "src", global_step=torch.tensor(3))
    with pytest.raises(
        ConversionError,
        match=r"no rule takes \(1\):\s+'global_step'\s+If .* file\.\n`blockformer doctor .*` says more\.$",
    ):
        convert(tmp_path / "src", tmp_path / "dst")


def assert_refused_alike(folder, message):
    ours = folder / "ours"
    doors = (
        lambda: export_folder(ours, folder / "exported"),
        lambda: convert(ours, folder / "back", to_official=True),
        lambda: from_official(ours),
        lambda: blockformer.BlockformerDecoderForCausalLM.from_pretrained(ours),
        lambda: transformers.AutoModelForCausalLM.from_pretrained(ours),
    )
    said = set()
    for door in doors:
        with pytest.raises(ValueError, match=message) as refused:
            door()
        said.add(str(refused.value))
    assert len(said) == 1
    assert said <= set(blockformer.verify(ours).problems["weights"])


def test_verify_takes_a_repo_whose_source_had_damaged_notes(tmp_path):
    """Trainer writes a loss that is NaN into JSON files as it is."""
    official_folder(tmp_path / "src", "llama")
    notes = {"eval_results.json": '{"eval_loss": NaN}', "notes.json": "{", "empty.json": ""}
    for name, text in notes.items():
        (tmp_path / "src" / name).write_text(text)
    convert(tmp_path / "src", tmp_path / "ours", verify=False)
    export_folder(tmp_path / "ours", tmp_path / "exported")
    for folder in ("ours", "exported"):
        assert blockformer.verify(tmp_path / folder).is_ok
        convert(tmp_path / folder, tmp_path / f"{folder}-back", to_official=True, verify=False)
        assert {name: (tmp_path / f"{folder}-back" / name).read_text() for name in notes} == notes


def test_an_empty_quantization_config_of_ours_is_none(tmp_path):
    model = official_folder(tmp_path / "src", "llama")
    convert(tmp_path / "src", tmp_path / "ours", verify=False)
    edit_config(tmp_path / "ours", quantization_config={})
    export_folder(tmp_path / "ours", tmp_path / "exported")
    loaded = blockformer.BlockformerDecoderForCausalLM.from_pretrained(tmp_path / "ours")
    with torch.no_grad():
        for each in (loaded, from_official(tmp_path / "ours")):
            assert_close(each(IDS).logits, model(IDS).logits)
    assert convert(tmp_path / "ours", tmp_path / "back", to_official=True).parity.passed
