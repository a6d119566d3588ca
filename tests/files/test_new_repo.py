import json

import pytest
import torch
from safetensors.torch import save_file

from blockformer.conversion import ConversionError
from blockformer.files.new_repo import RepoOptions, new_repo

AUTO_MAP = {"AutoModel": "modeling_mine.Mine", "AutoTokenizer": ["tokenization_mine.Mine", None]}


def fill(folder, settings=None, shards=("model.safetensors",)):
    (folder / "config.json").write_text(json.dumps(settings or {}))
    for name in shards:
        save_file({name: torch.zeros(1)}, folder / name)


def test_a_whole_repo_appears(tmp_path):
    with new_repo(tmp_path / "x", RepoOptions(), check_sources=lambda: None) as folder:
        fill(
            folder, {"auto_map": {"AutoModel": "modeling_mine.Mine", "AutoConfig": "someone/else--configuration.Other"}}
        )
        (folder / "modeling_mine.py").write_text("")
        assert not (tmp_path / "x").exists()
    assert (tmp_path / "x" / "config.json").is_file()


def no_weights(folder):
    fill(folder, shards=())


def no_shard(folder):
    fill(folder, shards=("model-1.safetensors",))
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def no_code(folder):
    fill(folder, {"auto_map": AUTO_MAP})


def repeated_name(folder):
    fill(folder)
    (folder / "config.json").write_text('{"a": 1, "a": 2}')


MISSING = {
    no_weights: "lack model.safetensors",
    no_shard: "lack model-2.safetensors",
    no_code: "lack modeling_mine.py",
    repeated_name: "appears twice",
}


@pytest.mark.parametrize("build", MISSING)
def test_one_that_is_not_whole_does_not(tmp_path, build):
    with pytest.raises(ConversionError, match=MISSING[build]), new_repo(tmp_path / "x", RepoOptions()) as folder:
        build(folder)
    assert not list(tmp_path.iterdir())


def test_nor_one_whose_source_has_changed(tmp_path):
    def changed():
        raise ConversionError("it changed")

    with (
        pytest.raises(ConversionError, match="it changed"),
        new_repo(tmp_path / "x", RepoOptions(), check_sources=changed) as folder,
    ):
        fill(folder)
    assert not list(tmp_path.iterdir())
