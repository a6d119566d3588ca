"""How weights are stored: what doctor says of pickles, shards, distributed checkpoints, adapters and missing files."""

import json
import pickle
import shutil

import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from fork_server import program
from pairs import assert_close
from safetensors.torch import load_file, save_file

from blockformer.conversion import ConversionError
from blockformer.doctor import Options, diagnose, mend
from blockformer.doctor.rank_files import read_shards

from ..conversion.oracles import edit_config, entries_of, official_folder, stored

SETTINGS = {"tie_word_embeddings": False}


class Evil:
    """Unpickled, it would write a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def sentences(found):
    return " ".join(f"{each.sentence} | {each.remedy}" for each in found.findings)


@pytest.fixture
def source(tmp_path):
    official_folder(tmp_path / "source", "llama", "LlamaForCausalLM", **SETTINGS)
    return tmp_path / "source"


def pickled(folder, name, content):
    torch.save(content(load_file(folder / "model.safetensors")), folder / name)
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("pytorch_model.bin", lambda all_: {"state_dict": all_, "epoch": 3}, "are under the key 'state_dict'"),
        ("pytorch_model.bin", lambda all_: {"module": all_}, "are under the key 'module'"),
        (
            "last.ckpt",
            lambda all_: {
                "state_dict": {f"model.{n}": each for n, each in all_.items()},
                "hyper_parameters": {"lr": 0.1},
            },
            "the weights are called 'last.ckpt', and libraries look for model.safetensors",
        ),
        ("weights.pth", lambda all_: all_, "the weights are called 'weights.pth'"),
    ],
)
def test_pickles_are_read_and_written_as_safetensors(tmp_path, source, name, content, sentence):
    wanted = stored(source)
    pickled(source, name, content)
    for place in (source, source / name):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        found = mend(place, tmp_path / "out")
        assert sentence in sentences(found) or place != source
        assert stored(tmp_path / "out") == wanted


def test_nothing_in_a_pickle_is_run(tmp_path, source):
    pickled(source, "last.ckpt", lambda all_: {"state_dict": all_, "callbacks": Evil(tmp_path / "run")})
    found = diagnose(source)
    assert not (tmp_path / "run").exists()
    assert "it has objects too ('io.open'), and nothing of it was run" in sentences(found)
    assert found.is_mendable
    shutil.rmtree(source)
    source.mkdir()
    (source / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "run")))
    found = diagnose(source)
    assert not (tmp_path / "run").exists()
    assert "not the table of contents of a distributed checkpoint" in sentences(found)
    torch.save({"a": Evil(tmp_path / "run")}, tmp_path / "model_rank_0.pt")
    assert read_shards(tmp_path / "model_rank_0.pt") == {}
    assert not (tmp_path / "run").exists()


def test_shards_of_processes(tmp_path, processes, source):
    wanted = stored(source)
    done = processes.run(
        program("sharded_checkpoints"), str(source), str(tmp_path), 3, folder=tmp_path, elsewhere=False
    )
    assert done.returncode == 0, done.stderr
    for kind, said in (("ranks", "the weights are FSDP shards"), ("dcp", "a distributed checkpoint (DCP)")):
        shutil.copy(source / "config.json", tmp_path / kind)
        found = mend(tmp_path / kind, tmp_path / f"{kind}-mended")
        assert said in sentences(found)
        assert stored(tmp_path / f"{kind}-mended") == wanted
    shard = tmp_path / "ranks/model_world_size_3_rank_1.pt"
    found = diagnose(shard)
    assert "this is an FSDP shard, 2 of 3, not a model" in sentences(found)
    assert found.status == 1
    shard.unlink()
    found = diagnose(tmp_path / "ranks")
    assert "these are 2 of 3 FSDP shards, not a model" in sentences(found)
    (tmp_path / "dcp/__1_0.distcp").unlink()
    assert "__1_0.distcp: is missing; copy the whole folder again" in sentences(diagnose(tmp_path / "dcp"))


def test_a_distributed_checkpoint_in_a_folder_of_a_trainer(tmp_path, source):
    wanted = stored(source)
    weights = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    for name, state in (("pytorch_model_fsdp_0", {"model": weights}), ("optimizer_0", {"optim": torch.ones(3)})):
        with pytest.warns(UserWarning, match="single process"):
            dcp.save(state, checkpoint_id=source / name, no_dist=True)
    found = mend(source, tmp_path / "out")
    assert "'model.' removed before" in " ".join(found.changes)
    assert stored(tmp_path / "out") == wanted
    data = source / "pytorch_model_fsdp_0/__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-100])
    assert "__0_0.distcp: is cut short" in sentences(diagnose(source))


@pytest.fixture
def adapted(tmp_path, source):
    """A model with an adapter, and the folder of the adapter."""
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(source), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter.data, std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    return model


@torch.no_grad()
def test_an_adapter_is_named_and_merged_as_peft_merges_it(tmp_path, source, adapted):
    found = diagnose(tmp_path / "adapter")
    assert f"this is a LoRA adapter of rank 4 for '{source}', not a model" in sentences(found)
    assert not found.is_mendable
    found = mend(tmp_path / "adapter", tmp_path / "out", source)
    assert "4 adapters merged with the scale 3.0" in found.changes
    merged = adapted.merge_and_unload().state_dict()
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, each in merged.items():
        assert_close(ours[name], each, 1e-6)


@torch.no_grad()
def test_modules_that_an_adapter_saves_whole_take_the_place_of_the_base_models(tmp_path, source):
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    model.config.tie_word_embeddings = False
    whole = ["embed_tokens", "lm_head"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=whole))
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter.data, std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    found = mend(tmp_path / "adapter", tmp_path / "out", source)
    assert "the adapter has 2 weights in place of the base model's" in sentences(found)
    merged = model.merge_and_unload().state_dict()
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, each in merged.items():
        assert_close(ours[name], each, 1e-6)


@torch.no_grad()
def test_modules_of_a_resized_model_which_peft_saves_twice(tmp_path, source):
    """Next to `lm_head.weight`, PEFT then writes `lm_head.modules_to_save.weight` and the one from before."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    model.resize_token_embeddings(model.config.vocab_size + 3)
    whole = ["embed_tokens", "lm_head"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=whole))
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter.data, std=0.1)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    assert "base_model.model.lm_head.original_module.weight" in load_file(
        tmp_path / "adapter/adapter_model.safetensors"
    )
    mend(tmp_path / "adapter", tmp_path / "out", source)
    merged = model.merge_and_unload().state_dict()
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, each in merged.items():
        assert_close(ours[name], each, 1e-6)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer")
def test_embeddings_of_an_adapter_whose_head_stays_are_not_merged(tmp_path):
    """PEFT computes with new embeddings and the old head, which no tied checkpoint can say."""
    official_folder(tmp_path / "source", "llama", "LlamaForCausalLM", tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    found = diagnose(tmp_path / "adapter", tmp_path / "source")
    assert "'lm_head.weight', tied to it in the base model, stays | PEFT computes with both" in sentences(found)
    assert not found.is_mendable


@torch.no_grad()
def test_an_adapter_among_the_weights_needs_its_scale(tmp_path, source, adapted):
    inside = {name: each.contiguous() for name, each in adapted.state_dict().items()}
    save_file(inside, source / "model.safetensors", {"format": "pt"})
    found = diagnose(source)
    assert "its scale, lora_alpha / r, is not in the weights; say it with --lora-scale" in sentences(found)
    assert not found.is_mendable
    mend(source, tmp_path / "out", options=Options(lora_scale=3.0))
    merged = adapted.merge_and_unload().state_dict()
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, each in merged.items():
        assert_close(ours[name], each, 1e-6)
    shutil.copy(tmp_path / "adapter/adapter_config.json", source)
    assert "an adapter (adapter_config.json, adapter_model) is next to whole weights" in sentences(diagnose(source))


@pytest.mark.parametrize(
    "setting",
    [
        {"use_dora": True},
        {"init_lora_weights": "olora"},  # which changes the base model's weights too
        {"init_lora_weights": "pissa_niter_4"},
        {"layer_replication": [[0, 2], [1, 2]]},
        {"alora_invocation_tokens": [5]},
    ],
)
def test_an_adapter_of_another_kind_is_not_merged(tmp_path, source, adapted, setting):
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **setting}))
    with pytest.raises(
        ConversionError, match=f"{next(iter(setting))}=.*, which is not merged here; use merge_and_unload"
    ):
        diagnose(tmp_path / "adapter", source)


def test_an_index_and_its_files(tmp_path):
    official_folder(tmp_path / "source", "llama", "LlamaForCausalLM", shards=True, **SETTINGS)
    wanted = stored(tmp_path / "source")
    files = sorted(path.name for path in (tmp_path / "source").glob("*.safetensors"))
    (tmp_path / "source/model.safetensors.index.json").unlink()
    found = mend(tmp_path / "source", tmp_path / "out")
    assert "the index of the weight files is missing" in sentences(found)
    assert stored(tmp_path / "out") == wanted
    (tmp_path / "source" / files[0]).unlink()
    found = diagnose(tmp_path / "source")
    assert f"1 of {len(files)} weight files are missing" in sentences(found)
    assert not found.is_mendable


@pytest.mark.parametrize(
    ("names", "kind", "sentence"),
    [
        (["global_step9/mp_rank_00_model_states.pt", "latest"], "zero", "the optim_states files are missing"),
        (["model.gguf"], "gguf", "this is a GGUF file for llama.cpp"),
        (["consolidated.00.pth"], "consolidated", "in the layout of their maker's own code"),
        (["tf_model.h5"], "tensorflow", "these are weights for TensorFlow"),
        (["iter_0000100/mp_rank_00/model_optim_rng.pt"], "megatron", "a checkpoint of Megatron-LM"),
        (["optimizer.pt", "trainer_state.json"], "no-weights", "there is only the state of a training run"),
        (["a.safetensors", "b.safetensors"], "several", "name the file, not the folder"),
    ],
)
def test_other_libraries_folders(source, names, kind, sentence):
    (source / "model.safetensors").unlink()
    (source / "generation_config.json").unlink()
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    found = diagnose(source)
    assert kind in {each.kind for each in found.findings}
    assert sentence in sentences(found)
    assert (found.status, found.is_mendable) == (1, False)


def test_damaged_and_doubled_files(tmp_path, source):
    shutil.copytree(source, source / "checkpoint-500")
    torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
    said = sentences(diagnose(source, quick=True))
    assert "the subfolder 'checkpoint-500' holds a model too" in said
    assert "the weights are there twice, as safetensors and pickled" in said
    (source / "pytorch_model.bin").unlink()
    whole = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(whole[:-10])
    assert "truncated; download it again" in sentences(diagnose(source))
    (source / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "run `git lfs pull` in its folder" in sentences(diagnose(source))
    (source / "model.safetensors").unlink()
    assert "the model is in the subfolder 'checkpoint-500'" in sentences(diagnose(source))
    (source / "checkpoint-500/config.json").write_text("{")
    assert "config.json: not valid JSON" in sentences(diagnose(source / "checkpoint-500"))


def test_a_link_out_of_the_folder_is_not_followed(tmp_path, source):
    shutil.move(source / "model.safetensors", tmp_path / "elsewhere.safetensors")
    (source / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    assert "a link that leaves the folder" in sentences(diagnose(source))


def test_a_mended_folder_keeps_what_is_around_the_weights(tmp_path, tiny_tokenizer):
    official_folder(tmp_path / "source", "qwen3", tokenizer=tiny_tokenizer, vocab_size=512, **SETTINGS)
    (tmp_path / "source/LICENSE").write_text("free")
    (tmp_path / "source/modeling_own.py").write_text("raise SystemExit")
    edit_config(tmp_path / "source", architectures=["FSDPQwen3ForCausalLM"])
    found = mend(tmp_path / "source", tmp_path / "out")
    assert {"LICENSE", "tokenizer.json", "config.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert not (tmp_path / "out/modeling_own.py").exists()
    assert "not copied, code of the folder: modeling_own.py" in found.changes
    assert entries_of(tmp_path / "out")["architectures"] == ["Qwen3ForCausalLM"]
    with pytest.raises(ConversionError, match="already exists"):
        mend(tmp_path / "source", tmp_path / "out")
    with pytest.raises(ConversionError, match="is the source"):
        mend(tmp_path / "source", tmp_path / "source", force=True)
