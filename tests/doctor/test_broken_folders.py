"""Folders as trainers, downloads and copies leave them: doctor has a sentence for each, and mends what it can."""

import gzip
import json
import re
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from blockformer.conversion import ConversionError, from_official
from blockformer.doctor import Options, diagnose, mend

from ..conversion.oracles import edit_config, edit_tensors, official_folder, stored

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 12345\n"
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


class Unknown:
    """A class of the training code."""


def taken(folder):
    """The weights of a folder, which no longer has them."""
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    return weights


def moved(*parts):
    """All of a folder in a subfolder of it."""

    def make(folder):
        inner = shutil.copytree(folder, folder.parent / "between")
        shutil.rmtree(folder)
        shutil.copytree(inner, folder.joinpath(*parts))

    return make


def pickled(name, content):
    return lambda folder: torch.save(content(taken(folder)), folder / name)


def renamed(change):
    return lambda folder: edit_tensors(folder, lambda all_: {change(name): each for name, each in all_.items()})


def beside(name, text=""):
    return lambda folder: (folder / name).write_text(text)


def instead(name, text=""):
    """A file in place of the weights."""

    def make(folder):
        taken(folder)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return make


def adapter(folder, weights, name="adapter_model.safetensors", config=True, peft_type="LORA"):
    taken(folder)
    (folder / "config.json").unlink()
    folder = folder / "checkpoint-500" if config == "inside" else folder
    folder.mkdir(exist_ok=True)
    if config:
        entries = {"peft_type": peft_type, "r": 4, "lora_alpha": 8, "base_model_name_or_path": "me/base"}
        (folder / "adapter_config.json").write_text(json.dumps(entries))
    if weights:
        save_file(weights, folder / name)


def adapter_of_adapterhub(folder):
    adapter(folder, {})
    entries = {"config": {"reduction_factor": 16}, "model_class": "BertAdapterModel", "model_name": "me/base"}
    (folder / "adapter_config.json").write_text(json.dumps(entries))
    torch.save(
        {"encoder.layer.0.output.adapters.a.adapter_up.weight": torch.zeros(4, 4)}, folder / "pytorch_adapter.bin"
    )


def in_two(folder, index):
    """The weights in two files, with an index of what `index` makes of the place of each."""
    weights = taken(folder)
    files = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    places = {name: files[place >= 10] for place, name in enumerate(weights)}
    for file in files:
        save_file({name: each for name, each in weights.items() if places[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index(places)}))


def of_verl(folder):
    weights, actor = taken(folder), folder / "global_step_100/actor"
    (actor / "huggingface").mkdir(parents=True)
    torch.save(weights, actor / "model_world_size_1_rank_0.pt")
    shutil.move(folder / "config.json", actor / "huggingface")


def nested_config(folder):
    (folder / "hf").mkdir()
    shutil.move(folder / "config.json", folder / "hf")


def of_deepspeed_in_lightning(folder):
    weights, inner = taken(folder), folder / "epoch=1.ckpt/checkpoint"
    inner.mkdir(parents=True)
    torch.save({"module": weights}, inner / "mp_rank_00_model_states.pt")


def quantized(ending, *more):
    def change(all_):
        made = dict(all_)
        for name in all_:
            if "_proj" in name:
                stem = name.removesuffix(".weight")
                made |= {f"{stem}{part}": torch.ones(2, 2, dtype=torch.int32) for part in (ending, *more)}
        return made

    return lambda folder: edit_tensors(folder, change)


def misread(tensor, there, here):
    """The bits of one 16-bit dtype under the name of the other."""
    return (tensor * 0.1).to(getattr(torch, there)).view(getattr(torch, here))


def twice(**starts):
    """Several models, each under a beginning of its own."""
    return lambda all_: {f"{start}{name}": each for start in starts.values() for name, each in all_.items()}


LORA = {Q.format("A"): torch.randn(4, 64), Q.format("B"): torch.randn(128, 4)}
FOLDERS = {
    "model two folders down": (moved("runs", "final"), "the model is in the subfolder 'runs/final'"),
    "the Hub's cache": (moved("snapshots", "5a3f"), "the model is in the subfolder 'snapshots/5a3f'"),
    "killed while saving": (moved("tmp-checkpoint-9"), "the run ended while it saved 'tmp-checkpoint-9'"),
    "checkpoint of PEFT": (lambda f: adapter(f, LORA, config="inside"), "an adapter lies in .*'checkpoint-500'"),
    "only its config": (lambda f: adapter(f, {}), "of rank 4 for 'me/base', and the adapter itself is missing"),
    "verl": (of_verl, "the weights lie in the subfolder 'global_step_100/actor'"),
    "DeepSpeed in Lightning": (of_deepspeed_in_lightning, "lie in the subfolder 'epoch=1.ckpt/checkpoint'"),
    "NeMo": (instead("model.nemo"), "an archive of NeMo"),
    "Megatron, distributed": (instead("iter_0000100/common.pt"), "a checkpoint of Megatron-LM"),
    "Orbax": (instead("_METADATA"), "a checkpoint of Orbax, for JAX"),
    "archive": (instead("model.tar.gz"), r"this is an archive \(model.tar.gz\)"),
    "half a download": (instead(f"{WEIGHTS}.incomplete"), "a download was not finished"),
    "page of a server": (beside(WEIGHTS, "<!DOCTYPE html><html>no such file</html>"), "a text that begins with '<!DOC"),
    "empty tensors": (
        lambda f: edit_tensors(f, lambda all_: dict.fromkeys(all_, torch.empty(0))),
        "25 tensors are empty",
    ),
    "flat parameters": (renamed(lambda name: name.replace("weight", "_flat_param")), "FSDP has saved flat parameters"),
    "names of Megatron": (
        renamed(lambda name: name.replace("self_attn.q_proj", "self_attention.linear_qkv")),
        "the names of Megatron-LM",
    ),
    "bitsandbytes, 4 bits": (
        quantized(".weight.quant_state.bitsandbytes__nf4"),
        "quantized by bitsandbytes in 4 bits .*, and config.json has no quantization_config",
    ),
    "bitsandbytes, 8 bits": (quantized(".SCB"), "quantized by bitsandbytes in 8 bits"),
    "GPTQ": (quantized(".qweight", ".qzeros", ".g_idx"), "quantized by GPTQ"),
    "AWQ": (quantized(".qweight", ".qzeros", ".scales"), "quantized by AWQ"),
}
FOLDERS |= {
    "safetensors under a pickled name": (
        lambda f: shutil.move(f / WEIGHTS, f / "pytorch_model.bin"),
        "a safetensors file under the name of a pickled one; rename it to model.safetensors",
    ),
    "pickle under the name of safetensors": (
        pickled(WEIGHTS, dict),
        r"a pickled file \(torch.save\) under the name of a safetensors one; rename it to pytorch_model.bin",
    ),
    "compressed": (
        lambda f: (f / WEIGHTS).write_bytes(gzip.compress((f / WEIGHTS).read_bytes())),
        "compressed by gzip; unpack it first",
    ),
    "GGUF under the name of safetensors": (
        lambda f: (f / WEIGHTS).write_bytes(b"GGUF" + bytes([255] * 60)),
        "a GGUF file for llama.cpp; rename it",
    ),
    "average under its own name": (
        lambda f: shutil.move(f / WEIGHTS, f / "ema_model.safetensors"),
        "the weights are called 'ema_model.safetensors', and libraries look for model.safetensors",
    ),
    "arrays of NumPy": (instead("model.npz"), "arrays of NumPy .*numpy.load"),
    "LoRA of LitGPT": (instead("lit_model.pth.lora"), "LoRA weights of LitGPT, without the model .*litgpt merge_lora"),
    "parts without a table": (instead("__0_0.distcp"), r"without \.metadata, .*copy \.metadata"),
    "latest without its step": (
        instead("latest", "global_step5\n"),
        "'latest' names 'global_step5', which is not there",
    ),
    "tokens of prompt tuning": (
        lambda f: adapter(f, {"prompt_embeddings": torch.randn(4, 64)}, peft_type="PROMPT_TUNING"),
        r"an adapter \('PROMPT_TUNING'\) .*PeftModel.from_pretrained\(BASE, FOLDER\); it cannot be merged",
    ),
    "adapter of AdapterHub": (
        adapter_of_adapterhub,
        r"this is an adapter of AdapterHub for 'me/base', not a model.*load_adapter\(FOLDER\)",
    ),
    "IA3": (
        lambda f: adapter(f, {Q.format("A"): torch.randn(4, 64)}, peft_type="IA3"),
        r"an adapter \('IA3'\) of rank 4 for 'me/base', not a model.*with PEFT: merge_and_unload\(\)",
    ),
}
"""Each door says the same of these."""
ONLY_DOCTOR = {
    "adapter as a model": (
        lambda f: edit_tensors(f, lambda all_: LORA),
        "the tensors are only the 2 matrices of a LoRA adapter, without the model",
    ),
    "empty adapter": (lambda f: adapter(f, dict.fromkeys(LORA, torch.empty(0))), "2 tensors are empty"),
    "config elsewhere": (nested_config, "there is one in 'hf': copy it, or take it with --against"),
    "pointer to a tokenizer": (beside("tokenizer.json", POINTER), "tokenizer.json: a git-LFS pointer"),
    "pointer to sentencepiece": (beside("tokenizer.model", POINTER), "tokenizer.model: a git-LFS pointer"),
    "aria2": (beside(f"{WEIGHTS}.aria2"), "the download of 'model.safetensors' was not finished"),
    "two models of accelerate": (
        lambda f: shutil.copy(f / WEIGHTS, f / "model_1.safetensors"),
        "'model_1.safetensors' holds weights too",
    ),
    "teacher and student": (
        lambda f: edit_tensors(f, twice(one="teacher.", two="student.")),
        "25 names that begin with 'student.' and 25 names that begin with 'teacher.'.*--drop 'teacher.*'",
    ),
    "with and without": (
        lambda f: edit_tensors(f, twice(one="", two="module.")),
        "25 names that have no such beginning and 25 names that begin with 'module.'",
    ),
    "config of another family": (
        lambda f: edit_config(f, model_type="llama", architectures=["LlamaForCausalLM"]),
        "config.json says llama, and the tensors have the names of qwen3",
    ),
    "index of another model": (
        lambda f: in_two(f, lambda places: dict.fromkeys(places, "model-00001-of-00005.safetensors")),
        "names 'model-00001-of-00005.safetensors', which are not there",
    ),
    "index without a name": (
        lambda f: in_two(f, lambda places: {name: places[name] for name in [*places][1:]}),
        "the index and the files do not agree",
    ),
    "index with a name too many": (
        lambda f: in_two(f, lambda places: {**places, "ghost": next(iter(places.values()))}),
        "the index and the files do not agree:.*'ghost' is in the index but in no shard",
    ),
    "optimizer under the model's name": (
        pickled("pytorch_model.bin", lambda all_: {"state": {0: all_}, "param_groups": []}),
        "the file holds the state of an optimizer, and no model",
    ),
    "average without names": (
        pickled("ema.pt", lambda all_: {"decay": 0.9, "shadow_params": [*all_.values()]}),
        "its tensors are a list under 'shadow_params', without names",
    ),
    "model and average": (
        pickled("last.pt", lambda all_: {"model": all_, "ema": dict(all_)}),
        "the file has other weights too, under 'ema'; those under 'model' are read.*--key ema",
    ),
    "two unknown keys": (
        pickled("last.pt", lambda all_: {"net": {"a": all_}, "ema": all_}),
        "tensors under 'net.a' and 'ema'.*--key net.a or --key ema",
    ),
    "no tensors": (lambda f: edit_tensors(f, lambda all_: {}), "the weights have no tensors"),
    "a link to nothing": (
        lambda f: (taken(f), (f / WEIGHTS).symlink_to("../../blobs/5a3f")),
        "a link to a file that is not there; download or copy the file itself",
    ),
    "adapter of torchtune": (
        pickled("adapter_0.pt", lambda all_: {f"layers.0.attn.q_proj.lora_{x}.weight": torch.ones(4, 4) for x in "ab"}),
        "only the 2 matrices of a LoRA adapter, without the model.*torchtune and LitGPT merge theirs",
    ),
    "bfloat16 read as float16": (
        lambda f: edit_tensors(f, lambda all_: {n: misread(each, "bfloat16", "float16") for n, each in all_.items()}),
        "16 of 16 matrices look like bfloat16 whose bits were read as float16",
    ),
    "float16 read as bfloat16": (
        lambda f: edit_tensors(f, lambda all_: {n: misread(each, "float16", "bfloat16") for n, each in all_.items()}),
        "16 of 16 matrices look like float16 whose bits were read as bfloat16",
    ),
    "files of two saves": (
        lambda f: (
            in_two(f, dict),
            (f / INDEX).unlink(),
            (f / "model-00002-of-00002.safetensors").rename(f / "model-00002-of-00003.safetensors"),
        ),
        "files of several saves, 'model-00001-of-00002.safetensors', .*move the files of the others away",
    ),
    "transposed": (
        lambda f: edit_tensors(f, lambda all_: {n: t.T.contiguous() if "_proj" in n else t for n, t in all_.items()}),
        r"'model.layers.0.mlp.down_proj.weight' is \[96, 64\], not \[64, 96\].*they are transposed",
    ),
    "one process of two": (
        lambda f: edit_tensors(
            f, lambda all_: {n: t[: len(t) // 2].clone() if "gate" in n or "up_p" in n else t for n, t in all_.items()}
        ),
        "each is 1/2 of the model's along one axis, as a process of tensor parallelism",
    ),
    "a head that grew": (
        lambda f: edit_tensors(f, lambda all_: {**all_, "lm_head.weight": torch.randn(208, 64)}),
        "1 tensor has a shape that config.json contradicts.*only one of embeddings and head was resized",
    ),
    "a program of TorchScript": (
        lambda f: (taken(f), torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), str(f / "model.pt"))),
        r"a program of TorchScript \(torch.jit.save\).*torch.jit.load",
    ),
    "nothing": (taken, "there is config.json, and there are no weights"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "folder"
    official_folder(folder, "qwen3", tie_word_embeddings=False)
    return folder


def sentences(found):
    return " ".join(f"{each.sentence} | {each.remedy}" for each in found.findings)


@pytest.mark.parametrize("kind", [*FOLDERS, *ONLY_DOCTOR])
def test_each_folder_has_its_sentence(tmp_path, model, kind):
    make, said = (FOLDERS | ONLY_DOCTOR)[kind]
    folder = shutil.copytree(model, tmp_path / "folder")
    make(folder)
    found = diagnose(folder)
    assert re.search(said, sentences(found), re.DOTALL), sentences(found)
    assert found.status in (1, 3)
    if kind in FOLDERS:
        with pytest.raises((ConversionError, OSError)) as caught:
            from_official(folder)
        assert re.search(said, str(caught.value), re.DOTALL), str(caught.value)


def changed(content):
    """What torch.save writes, in a file with another name."""
    return pickled("last.ckpt", content)


MENDED = {
    "full state of FSDP": (pickled("pytorch_model_fsdp.bin", dict), {}),
    "objects beside": (changed(lambda all_: {"state_dict": all_, "callbacks": Unknown()}), {}),
    "key in a key": (changed(lambda all_: {"state": {"model": all_, "optimizers": {}}, "rng": []}), {}),
    "first process": (pickled("latest-rank0.pt", lambda all_: {"state": {"model": all_}, "rng": []}), {}),
    "weights of DeepSpeed": (
        pickled("mp_rank_00_model_states.pt", lambda all_: {"module": {f"module.{n}": t for n, t in all_.items()}}),
        {},
    ),
    "the average": (
        changed(lambda all_: {"model": {name: each * 2 for name, each in all_.items()}, "ema": all_}),
        {"key": "ema"},
    ),
    "the student": (
        lambda f: edit_tensors(f, twice(one="teacher.", two="student.")),
        {"dropped": ("teacher.*",)},
    ),
    "index of another model": (*ONLY_DOCTOR["index of another model"][:1], {}),
    "index without a name": (*ONLY_DOCTOR["index without a name"][:1], {}),
}


@pytest.mark.parametrize("kind", MENDED)
def test_what_is_whole_in_them_is_mended(tmp_path, model, kind):
    make, options = MENDED[kind]
    folder = shutil.copytree(model, tmp_path / "folder")
    make(folder)
    mend(folder, tmp_path / "out", options=Options(**options))
    assert stored(tmp_path / "out") == stored(model)


def test_a_model_pickled_with_its_class_is_read_without_it(tmp_path, model):
    folder = shutil.copytree(model, tmp_path / "folder")
    taken(folder)
    torch.save(transformers.AutoModelForCausalLM.from_pretrained(model), folder / "model.pt")
    found = mend(folder, tmp_path / "out")
    assert "a whole model, pickled with its class" in sentences(found)
    assert "nothing of it was run" in sentences(found)
    assert stored(tmp_path / "out") == stored(model)


def test_a_key_that_is_not_there(tmp_path, model):
    folder = shutil.copytree(model, tmp_path / "folder")
    pickled("last.ckpt", lambda all_: {"model": all_})(folder)
    found = diagnose(folder, options=Options(key="ema"))
    assert "no tensors under 'ema'; there are some under 'model'" in sentences(found)
