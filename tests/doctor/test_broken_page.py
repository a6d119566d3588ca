"""The page of broken checkpoints: each folder on it is made here, and doctor prints what stands there."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from blockformer.doctor import diagnose
from blockformer.doctor.report import lines_of

from ..conversion.oracles import edit_config, edit_tensors, official_folder
from .zero_layout import write_zero

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {"en": DOCS / "doctor.md", "zh": DOCS / "zh" / "doctor.md"}
FOLDER = Path("my-model")


def trained(all_):
    """Weights that no longer look like a draw."""
    return {
        name: each * torch.linspace(0.5, 1.5, len(each))[:, None] if each.dim() == 2 else each
        for name, each in all_.items()
    }


def wrapped():
    edit_tensors(FOLDER, lambda all_: {f"module._orig_mod.{name}": each for name, each in all_.items()})


def adapter():
    """Only the files of an adapter."""
    for name in ("model.safetensors", "config.json"):
        (FOLDER / name).unlink()
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "base_model_name_or_path": "Qwen/Qwen3-0.6B"}
    (FOLDER / "adapter_config.json").write_text(json.dumps(settings))
    (FOLDER / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


def distributed():
    weights = load_file(FOLDER / "model.safetensors")
    (FOLDER / "model.safetensors").unlink()
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": weights}, checkpoint_id=FOLDER / "pytorch_model_fsdp_0", no_dist=True)


def of_zero():
    weights = load_file(FOLDER / "model.safetensors")
    (FOLDER / "model.safetensors").unlink()
    write_zero(FOLDER / "global_step500", weights, stage=3, world=4)
    (FOLDER / "latest").write_text("global_step500")


def lightning():
    all_ = {f"model.{name}": each for name, each in load_file(FOLDER / "model.safetensors").items()}
    torch.save({"state_dict": all_, "epoch": 3}, FOLDER / "last.ckpt")
    (FOLDER / "model.safetensors").unlink()


def without_a_layer():
    edit_tensors(FOLDER, lambda all_: {name: each for name, each in all_.items() if "layers.1.mlp" not in name})


def joined():
    def change(all_):
        made = {name: each for name, each in all_.items() if not re.search(r"[qkv]_proj", name)}
        for layer in (0, 1):
            name = f"model.layers.{layer}.self_attn.{{}}_proj.weight"
            made[name.format("qkv")] = torch.cat([all_[name.format(part)] for part in "qkv"])
        return made

    edit_tensors(FOLDER, change)


def enlarged():
    """Embeddings with room for new tokens, a config from before, and a tokenizer with more."""
    name = "model.embed_tokens.weight"
    edit_tensors(FOLDER, lambda all_: {**all_, name: torch.cat([all_[name], all_[name][:4]])})
    path = FOLDER / "tokenizer.json"
    entries = json.loads(path.read_text())
    entries["added_tokens"] += [{**entries["added_tokens"][0], "id": 520, "content": "<|tool|>"}]
    path.write_text(json.dumps(entries))


def untied():
    edit_config(FOLDER, tie_word_embeddings=False)


def zeros():
    edit_tensors(FOLDER, lambda all_: {name: each * ("embed" in name) for name, each in all_.items()})


def pointer():
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 476984\n"
    (FOLDER / "model.safetensors").write_text(text)


def without_a_file():
    weights = load_file(FOLDER / "model.safetensors")
    (FOLDER / "model.safetensors").unlink()
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    places = {name: files[place >= 10] for place, name in enumerate(weights)}
    save_file({name: each for name, each in weights.items() if places[name] == files[0]}, FOLDER / files[0])
    (FOLDER / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def cut():
    whole = (FOLDER / "model.safetensors").read_bytes()
    (FOLDER / "model.safetensors").write_bytes(whole[:400_000])


def only_state():
    (FOLDER / "model.safetensors").unlink()
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"):
        (FOLDER / name).touch()


def half_merged():
    def new(name):
        return name.replace("q_proj.", "q_proj.base_layer.").replace("v_proj.", "v_proj.base_layer.")

    edit_tensors(FOLDER, lambda all_: {new(name): each for name, each in all_.items()})


BROKEN = (wrapped, adapter, distributed, of_zero, lightning, without_a_layer, joined, enlarged, untied, zeros)
BROKEN += (pointer, without_a_file, cut, only_state, half_merged)


def said(make, tokenizer):
    """What doctor prints of a folder that was broken in one way."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    settings = {"vocab_size": 512, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
    official_folder(FOLDER, "qwen3", tokenizer=tokenizer, tie_word_embeddings=True, attention_bias=False, **settings)
    edit_tensors(FOLDER, trained)
    make()
    return "\n".join(lines_of(diagnose(FOLDER)))


@pytest.mark.parametrize("language", PAGES)
def test_the_page_says_what_doctor_prints(tmp_path, monkeypatch, tiny_tokenizer, language):
    monkeypatch.chdir(tmp_path)
    sections = re.findall(r"^## \d+\. .*?^```text\n(.*?)\n```$", PAGES[language].read_text("utf-8"), re.M | re.S)
    assert len(sections) == len(BROKEN)
    for make, shown in zip(BROKEN, sections, strict=True):
        assert said(make, tiny_tokenizer) == shown, make.__name__
