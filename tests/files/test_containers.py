"""Folders without a model's weights: what each door says that they are, in one sentence."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sizes import OFFICIAL_DECODER
from transformers import Qwen3Config, Qwen3ForCausalLM

import blockformer
from blockformer.conversion import ConversionError, convert, from_official

SHARD = (
    "this is an FSDP shard, 2 of 4, not a model: put the shards of all processes into one folder, and consolidate with"
)


@pytest.fixture
def official(tmp_path):
    Qwen3ForCausalLM(Qwen3Config(**OFFICIAL_DECODER)).save_pretrained(tmp_path / "official")
    return tmp_path / "official"


def only(folder, name, content=b""):
    """The folder with one file in place of its weights."""
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    return folder / name


def adapter(folder):
    settings = {"peft_type": "LORA", "r": 8, "base_model_name_or_path": "Qwen/Qwen3-0.6B"}
    only(folder, "adapter_config.json", json.dumps(settings).encode())
    (folder / "adapter_model.safetensors").touch()


def test_a_shard_of_an_official_model(tmp_path, official):
    shard = only(official, "model_world_size_4_rank_1.pt")
    for source in (official, shard):
        with pytest.raises(ConversionError, match=SHARD):
            from_official(source)
        with pytest.raises(ConversionError, match=SHARD):
            convert(source, tmp_path / "out")


def test_a_shard_of_ours(tmp_path, official):
    convert(official, tmp_path / "ours", verify=False)
    only(tmp_path / "ours", "model_world_size_4_rank_1.pt")
    for load in (blockformer.BlockformerDecoderForCausalLM, transformers.AutoModelForCausalLM):
        with pytest.raises(OSError, match=SHARD):
            load.from_pretrained(tmp_path / "ours")
    with pytest.raises(ConversionError, match=SHARD):
        from_official(tmp_path / "ours")
    (problem,) = blockformer.verify(tmp_path / "ours").problems["weights"]
    assert SHARD in problem


def test_an_adapter(tmp_path, official):
    adapter(official)
    said = "this is a LoRA adapter of rank 8 for 'Qwen/Qwen3-0.6B', not a model; merge it into 'Qwen/Qwen3-0.6B': "
    for refuse in (from_official, lambda source: convert(source, tmp_path / "out")):
        with pytest.raises(ConversionError, match=said):
            refuse(official)
    (official / "config.json").unlink()
    with pytest.raises(ConversionError, match="not a repo of Blockformer") as caught:
        blockformer.verify(official)
    assert said in str(caught.value)


def test_names_of_a_wrapper(tmp_path, official):
    convert(official, tmp_path / "ours", verify=False)
    for folder in (official, tmp_path / "ours"):
        weights = load_file(folder / "model.safetensors")
        save_file({f"module.{name}": each for name, each in weights.items()}, folder / "model.safetensors")
    said = r"without the prefix 'module\.'.*as blockformer doctor FOLDER --mend NEW does"
    with pytest.raises(ConversionError, match=said):
        from_official(official)
    with pytest.raises(ValueError, match=said):
        blockformer.BlockformerDecoderForCausalLM.from_pretrained(tmp_path / "ours")
    (problem,) = blockformer.verify(tmp_path / "ours").problems["weights"]
    assert "blockformer doctor" in problem


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", r"DeepSpeed ZeRO .*blockformer doctor .* --mend NEW"),
        ("__0_0.distcp", r"parts of a distributed checkpoint \(DCP\) without \.metadata"),
        (".metadata", "this is a distributed checkpoint"),
        ("consolidated.00.pth", "the layout of their maker's own code"),
        ("model.gguf", "a GGUF file|only as GGUF"),
    ],
)
def test_other_folders(official, name, said):
    only(official, name)
    with pytest.raises(ConversionError, match=said):
        from_official(official)


def test_a_folder_that_is_only_damaged_says_nothing_more(tmp_path, official):
    only(official, "notes.txt")
    with pytest.raises(ConversionError, match=r"no weights; one of .* is needed$"):
        from_official(official)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/notes.txt").touch()
    with pytest.raises(OSError, match=r"notes: there are neither a config\.json nor weights"):
        blockformer.BlockformerDecoderForCausalLM.from_pretrained(tmp_path / "notes")


def test_weights_under_a_key(official):
    torch.save({"model": load_file(official / "model.safetensors")}, official / "pytorch_model.bin")
    (official / "model.safetensors").unlink()
    with pytest.raises(ConversionError, match="save only them"):
        from_official(official)
