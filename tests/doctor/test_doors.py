"""Folders that hold no model as libraries read one: each door that refuses them says what doctor finds."""

import json
import re
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import blockformer
from blockformer.conversion import from_official
from blockformer.doctor import diagnose

from ..conversion.oracles import edit_tensors
from .doors import refusal, verified
from .test_own_code import llama2_c, write_numbers
from .zero_layout import write_zero

WEIGHTS = "model.safetensors"
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 12345\n"
STATE = ("optimizer.pt", "scheduler.pt", "rng_state.pth")


def taken(folder):
    """The weights of a folder, which no longer has them."""
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    return weights


def emptied(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def touched(folder, *names):
    taken(folder)
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()


def adapter(folder):
    touched(folder, "adapter_model.safetensors")
    (folder / "config.json").unlink()
    entries = {"peft_type": "LORA", "r": 8, "base_model_name_or_path": "Qwen/Qwen3-0.6B"}
    (folder / "adapter_config.json").write_text(json.dumps(entries))


def distributed(folder):
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": taken(folder)}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)


def own_code(folder):
    emptied(folder)
    torch.save({"model": {"tok.weight": torch.randn(4, 4)}, "step": 5}, folder / "ckpt.pt")


def numbers(folder):
    emptied(folder)
    write_numbers(folder / "model.bin", llama2_c(), True)


def of_mlx(folder):
    def change(all_):
        made = dict(all_)
        for name, each in all_.items():
            if "_proj" in name:
                made[name] = torch.zeros(each.shape[0], each.shape[1] // 8, dtype=torch.int32).view(torch.uint32)
                made |= {name.replace("weight", part): torch.ones(each.shape[0], 1) for part in ("scales", "biases")}
        return made

    edit_tensors(folder, change)


def without_a_shard(folder):
    weights = taken(folder)
    first = dict([*weights.items()][:10])
    save_file(first, folder / "model-00001-of-00002.safetensors")
    places = {name: f"model-0000{1 if name in first else 2}-of-00002.safetensors" for name in weights}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def inside(folder):
    shutil.copytree(folder, folder.parent / "inner")
    emptied(folder)
    for step in (900, 1000):
        shutil.copytree(folder.parent / "inner", folder / f"checkpoint-{step}")


def renamed(change):
    return lambda folder: edit_tensors(folder, lambda all_: {change(name): each for name, each in all_.items()})


def cut(folder):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1000])


KINDS = {
    "adapter": (adapter, "this is a LoRA adapter of rank 8 for 'Qwen/Qwen3-0.6B', not a model"),
    "shard": (lambda f: torch.save(taken(f), f / "model_world_size_4_rank_0.pt"), "this is an FSDP shard, 1 of 4"),
    "distributed": (distributed, {"doctor": "distributed checkpoint (DCP)", "": "the parts that FSDP saves"}),
    "zero": (lambda f: write_zero(f / "global_step5", taken(f), 3, 2), "the parts .*DeepSpeed ZeRO"),
    "wrapped": (renamed("module.{}".format), "'module.'.* DistributedDataParallel"),
    "adapted": (renamed(lambda name: name.replace("q_proj", "q_proj.base_layer")), "a model that PEFT has adapted"),
    "own code": (own_code, {"doctor": "--map NAMES.json", "": "the weights are called 'ckpt.pt'"}),
    "llama2.c": (numbers, {"doctor": "a checkpoint of llama2.c", "": "the weights are called 'model.bin'"}),
    "gguf": (lambda f: touched(f, "model-Q4.gguf"), "GGUF"),
    "empty": (emptied, "the folder is empty"),
    "pointer": (lambda f: (f / WEIGHTS).write_text(POINTER), "a git-LFS pointer, not the file itself"),
    "pointer to a config": (lambda f: (f / "config.json").write_text(POINTER), "config.json: a git-LFS pointer"),
    "state": (lambda f: touched(f, *STATE), "there is only the state of a training run"),
    "only state": (
        lambda f: (touched(f, *STATE), (f / "config.json").unlink()),
        "there is only the state of a training run",
    ),
    "inside": (inside, "the model is in the subfolders 'checkpoint-900', 'checkpoint-1000'.*checkpoint-1000"),
    "mlx": (of_mlx, "MLX has packed 14 of the weights in few bits"),
    "mlx numbers": (lambda f: touched(f, "weights.npz"), "these are weights for MLX"),
    "onnx": (lambda f: touched(f, "onnx/model.onnx"), "this is a model for ONNX"),
    "no second shard": (without_a_shard, {"doctor": "1 of 2 weight files are missing", "": "files are missing"}),
    "cut": (cut, "truncated"),
}


DOORS = {
    "from_official": (from_official, "official"),
    "from_pretrained": (blockformer.BlockformerDecoderForCausalLM.from_pretrained, "ours"),
    "verify": (verified, "ours"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_door_says_what_it_is(tmp_path, models, kind):
    make, said = KINDS[kind]
    sentences = said if isinstance(said, dict) else {"": said}
    heard = {}
    for name, (function, layout) in DOORS.items():
        make(shutil.copytree(models / layout, tmp_path / name / "folder"))
        heard[name] = refusal(function, tmp_path / name / "folder")
    findings = diagnose(tmp_path / "from_official" / "folder").findings
    heard["doctor"] = " ".join(f"{each.sentence} | {each.remedy}" for each in findings)
    for name, text in heard.items():
        pattern = sentences.get(name, sentences[""])
        pattern = pattern if ".*" in pattern else pattern.replace("(", r"\(").replace(")", r"\)")
        assert re.search(pattern, text, re.DOTALL), (name, text)
