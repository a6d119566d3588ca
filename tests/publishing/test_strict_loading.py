"""Weight files that hold integers in place of weights are refused, in every format and through every door."""

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import blockformer
from blockformer.conversion import ConversionError, convert, export_folder
from blockformer.conversion.loading import load_any
from blockformer.model.pretrained_model import WeightsError

SIZES = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
NAME = "model.norm.weight"


def rewrite(folder, kind, spoil):
    """The weights of a saved model in another format, spoilt."""
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    (folder / "model.safetensors").unlink()
    if kind == "safetensors":
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    elif kind == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    elif kind == "legacy bin":
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    else:
        parts = {f"pytorch_model-{i}-of-2.bin": dict(list(tensors.items())[i - 1 :: 2]) for i in (1, 2)}
        for name, part in parts.items():
            torch.save(part, folder / name)
        places = {name: file for file, part in parts.items() for name in part}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def to_integers(tensors):
    tensors[NAME] = tensors[NAME].round().to(torch.int8)


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = blockformer.BlockformerDecoderForCausalLM(blockformer.preset("qwen3", **SIZES))
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


KINDS = ["safetensors", "bin", "legacy bin", "sharded bin"]


@pytest.mark.parametrize("kind", KINDS)
def test_integers_are_refused_through_every_door(saved, kind, tmp_path):
    rewrite(saved, kind, to_integers)
    doors = {
        "class": lambda: blockformer.BlockformerDecoderForCausalLM.from_pretrained(saved),
        "any": lambda: load_any(saved),
        "from_official": lambda: blockformer.from_official(saved),
        "export": lambda: export_folder(saved, tmp_path / "new"),
        "back": lambda: convert(saved, tmp_path / "new", to_official=True),
    }
    for name, door in doors.items():
        with pytest.raises((ConversionError, WeightsError), match=rf"(?s)integers|floating-point.*{NAME}"):
            door()
        assert not (tmp_path / "new").exists(), name


@pytest.mark.parametrize("kind", KINDS[1:])
def test_plain_pickles_load(saved, kind):
    expected = load_file(saved / "model.safetensors")
    rewrite(saved, kind, lambda tensors: None)
    model = blockformer.BlockformerDecoderForCausalLM.from_pretrained(saved)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in expected.items())


def test_integers_under_names_of_before_are_refused(tmp_path):
    old = tmp_path / "old"
    old.mkdir()
    museum = Path(__file__).parents[1] / "museum/2026-11-20/gpt2"
    shutil.copy(museum / "config.json", old)
    tensors = load_file(museum / "model.safetensors")
    name = next(name for name in tensors if "norm" in name and ".layers." in name)
    tensors[name] = tensors[name].round().to(torch.int32)
    torch.save(tensors, old / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="integers in place of"):
        blockformer.BlockformerDecoderForCausalLM.from_pretrained(old)


def test_a_folder_of_an_adapter_is_loaded_with_its_base_model(tmp_path, saved):
    model = blockformer.BlockformerDecoderForCausalLM.from_pretrained(saved)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "config.json").exists()
    again = blockformer.BlockformerDecoderForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    ids = torch.arange(4, 12)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, adapted.eval()(ids).logits)
