"""Repos that the package wrote before 0.1.0, and a `Trainer` checkpoint of then: `tests/museum/2026-11-20/`."""

import json
import shutil

import pytest
import torch
import transformers
from fork_server import program
from museum.earliest import FOLDER as MUSEUM
from museum.earliest import REPOS, WHERE, assemble
from museum.make import model_of_run
from packaging.version import Version
from pairs import assert_close
from programs.museum_run import train
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import blockformer
from blockformer.conversion import ConversionError
from blockformer.conversion.exporting import export_folder
from blockformer.files import earlier_names

pytestmark = pytest.mark.versions

AUTO_CLASSES = {
    "blockformer_encoder": transformers.AutoModelForMaskedLM,
    "blockformer_decoder": transformers.AutoModelForCausalLM,
    "blockformer_encoder_decoder": transformers.AutoModelForSeq2SeqLM,
}


def auto_class(repo):
    return AUTO_CLASSES[json.loads((repo / "config.json").read_text())["model_type"]]


@torch.no_grad()
def assert_as_then(model, repo):
    """The logits that the code of then gave, to 1e-6 of the largest."""
    inputs = load_file(repo / "expected.safetensors")
    expected = inputs.pop("logits")
    torch.testing.assert_close(model(**inputs).logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def is_pooler(name):
    """Which a masked language model had then, and nothing read."""
    return ".pooler." in name


@pytest.fixture(scope="module")
def found(tmp_path_factory, processes):
    """What all repos compute: natively, by their own code, and by the code that an upgrade gave them."""
    results = {}
    for kind, way in {"native": "native", "own code": "own code", "upgraded": "own code"}.items():
        folder = tmp_path_factory.mktemp("earliest")
        homes = [assemble(repo, folder) for repo in REPOS]
        for home in homes if kind == "upgraded" else ():
            blockformer.upgrade(home)
        file, elsewhere = folder / "computed.safetensors", way == "own code"
        said = processes.said(program("museum_earliest"), way, file, MUSEUM, *homes, folder=folder, elsewhere=elsewhere)
        results[kind] = {**load_file(file), "where": json.loads(said)}
    return results


def test_there_are_repos():
    assert len(REPOS) == 6


@pytest.mark.parametrize("repo", REPOS, ids=lambda repo: repo.name)
def test_a_repo_of_then_gives_the_logits_of_then(repo, tmp_path):
    model = auto_class(repo).from_pretrained(repo)
    assert_as_then(model, repo)
    model.save_pretrained(tmp_path)
    names = earlier_names.renamed(load_file(repo / "model.safetensors"), model.config).keys()
    assert load_file(tmp_path / "model.safetensors").keys() == {name for name in names if not is_pooler(name)}
    assert not earlier_names.are_earlier(names)
    assert_as_then(auto_class(repo).from_pretrained(tmp_path), repo)


@pytest.mark.parametrize("kind", ["own code", "upgraded"])
@pytest.mark.parametrize("repo", REPOS, ids=lambda repo: repo.name)
def test_a_repo_of_then_runs_by_its_own_code_and_by_that_of_an_upgrade(found, repo, kind):
    """Where this package cannot be imported; saved again, too, by which the repo's own code goes along."""
    ours, name = found[kind], repo.name
    is_exact = kind == "own code" and ours["where"] == WHERE
    expected = load_file(repo / "expected.safetensors")["logits"]
    assert_close(ours[f"{name} logits"], expected, 0 if is_exact else 1e-5)
    assert torch.equal(ours[f"{name}-again logits"], ours[f"{name} logits"])
    if name == "bert":
        return
    # From transformers 5.24 on, `generate` calls the cache by a name that the code of then does not know.
    reads_cache = kind == "upgraded" or Version(transformers.__version__) < Version("5.24")
    for what in ("ids", "uncached ids") if reads_cache else ("uncached ids",):
        assert torch.equal(ours[f"{name} {what}"], found["native"][f"{name} ids"])
        assert torch.equal(ours[f"{name}-again {what}"], ours[f"{name} {what}"])


@pytest.mark.parametrize("repo", REPOS, ids=lambda repo: repo.name)
def test_a_state_dict_of_then_is_read_whole(repo):
    config = AutoConfig.from_pretrained(repo)
    state = load_file(repo / "model.safetensors")
    model = auto_class(repo).from_config(config).eval()
    tied = {name: tensor for name, tensor in model.state_dict().items() if name in model.all_tied_weights_keys}
    model.load_state_dict(tied | {name: tensor for name, tensor in state.items() if not is_pooler(name)})
    model.load_state_dict(
        {name: tensor for name, tensor in model.state_dict().items() if name not in tied}, strict=False
    )
    model.tie_weights()
    assert_as_then(model, repo)
    assert_as_then(type(model).from_pretrained(None, config=config, state_dict=state).eval(), repo)


def test_weights_that_are_missing_are_still_refused(tmp_path):
    (repo,) = (repo for repo in REPOS if repo.name == "qwen3")
    tensors = load_file(repo / "model.safetensors")
    del tensors["model.layers.1.input_layernorm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((repo / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"missing(.|\n)*layers.1.self_attn_pre_norm"):
        auto_class(repo).from_pretrained(tmp_path)


def test_trainer_does_not_go_on_from_a_checkpoint_of_then(tmp_path):
    """Its losses differed from those of then without a word: biases had the momentum of norms."""
    folder = shutil.copytree(MUSEUM / "trainer", tmp_path / "run")
    run = json.loads((folder / "run.json").read_text())
    checkpoint = folder / "checkpoint-2"
    fix = r"names from before Blockformer 0\.1(.|\n)*Trainer cannot resume.*from_pretrained\(CHECKPOINT\)"
    with pytest.raises(ValueError, match=fix):
        train(model_of_run(run), tmp_path / "again", run, checkpoint)
    with pytest.raises(ValueError, match=rf"checkpoint-2: its weights have {fix}"):
        blockformer.last_complete_checkpoint(folder)
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    torch.save(tensors, checkpoint / "pytorch_model.bin")
    with pytest.raises(ValueError, match=fix):
        blockformer.last_complete_checkpoint(folder)
    with pytest.raises(ValueError, match=fix):
        train(model_of_run(run), tmp_path / "again", run, checkpoint)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)  # as the error says
    assert torch.equal(
        model.model.layers[0].mlp_pre_norm.weight, tensors["model.layers.0.post_attention_layernorm.weight"]
    )


@pytest.mark.parametrize("repo", REPOS, ids=lambda repo: repo.name)
def test_it_is_exported_from_the_folder(repo, tmp_path):
    export_folder(repo, tmp_path / "repo")
    assert not earlier_names.are_earlier(load_file(tmp_path / "repo" / "model.safetensors"))
    assert_as_then(auto_class(repo).from_pretrained(tmp_path / "repo"), repo)


def test_pickled_weights_are_read(tmp_path):
    (repo,) = (repo for repo in REPOS if repo.name == "gpt2")
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_bytes((repo / "config.json").read_bytes())
    torch.save(load_file(repo / "model.safetensors"), folder / "pytorch_model.bin")
    assert_as_then(auto_class(repo).from_pretrained(folder), repo)
    export_folder(folder, tmp_path / "repo")
    assert_as_then(auto_class(repo).from_pretrained(tmp_path / "repo"), repo)


def test_both_names_of_a_weight_are_refused(tmp_path):
    (repo,) = (repo for repo in REPOS if repo.name == "gpt2")
    tensors = load_file(repo / "model.safetensors")
    tensors["model.layers.0.mlp_pre_norm.weight"] = tensors["model.layers.0.post_attention_layernorm.weight"].clone()
    (tmp_path / "both").mkdir()
    save_file(tensors, tmp_path / "both" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "both" / "config.json").write_bytes((repo / "config.json").read_bytes())
    with pytest.raises(ConversionError, match="the old and the new name of one weight"):
        export_folder(tmp_path / "both", tmp_path / "repo")


def test_names_of_another_layout_are_told_from_a_checkpoint_that_is_not_whole(tmp_path):
    (repo,) = (repo for repo in REPOS if repo.name == "gpt2")
    tensors = load_file(repo / "model.safetensors")
    (tmp_path / "config.json").write_bytes((repo / "config.json").read_bytes())
    others = {name.replace("layers", "blocks"): tensor for name, tensor in tensors.items()}
    save_file(others, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"names of another layout or release(.|\n)*has instead:(.|\n)*blocks\.0"
    ) as error:
        auto_class(repo).from_pretrained(tmp_path)
    assert "the checkpoint is incomplete" not in str(error.value)
    fewer = {name: tensor for name, tensor in tensors.items() if "layers.1" not in name}
    save_file(fewer, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="the checkpoint is incomplete"):
        auto_class(repo).from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["bert", "gpt2", "qwen3", "marian"])
def test_it_converts_to_the_official_layout(name, tmp_path):
    (repo,) = (repo for repo in REPOS if repo.name == name)
    report = blockformer.convert(repo, tmp_path / "official", to_official=True)
    assert report.parity is not None
    assert not report.not_verified


def test_t5_of_then_has_no_final_dropout_and_says_so(tmp_path):
    """Its code had none; the official class has one, so the way there is to choose it."""
    (repo,) = (repo for repo in REPOS if repo.name == "t5")
    assert AutoConfig.from_pretrained(repo).final_dropout is False
    with pytest.raises(ConversionError, match="final_dropout must be True, not False"):
        blockformer.convert(repo, tmp_path / "official", to_official=True)
