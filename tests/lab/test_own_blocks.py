"""Blocks of one's own in an experiment."""

import hashlib

import pytest
import yaml
from example_files import EXAMPLES
from own_blocks import ALL, FILES, LOOKED_UP, NORM, VALUES, block_file, forgotten_after

from blockformer.cli.entry import main
from blockformer.lab.experiment import LabError
from blockformer.lab.experiment_file import read_experiment
from blockformer.lab.runs import open_folder, read_rows
from blockformer.lab.text import Text

from .experiments import write_experiment


@pytest.fixture(autouse=True)
def forgotten():
    with forgotten_after():
        yield


def test_the_example_compares_ideas_and_the_folder_keeps_them(tmp_path):
    """`examples/lab/ideas.yaml`, with a tiny model and one seed."""
    ideas = yaml.safe_load((EXAMPLES / "lab/ideas.yaml").read_text(encoding="utf-8"))
    small = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    blocks = [str(EXAMPLES / "lab" / each) for each in ideas["blocks"]]
    path = write_experiment(tmp_path, base={**ideas["base"], **small}, axes=ideas["axes"], seeds=[0], blocks=blocks)
    with pytest.raises(SystemExit) as end:
        main(["lab", str(path), "--output", str(tmp_path / "out")])
    assert not end.value.code
    rows = {row["variant"]: row for row in read_rows(tmp_path / "out")}
    ideas = {*ALL.items(), ("attention_type", "value_residual"), ("attention_type", "value_embeddings")}
    assert {"base", *(f"{axis}={value}" for axis, value in ideas)} == rows.keys()
    digest = hashlib.sha256(NORM.read_bytes()).hexdigest()
    row = rows["norm_type=dynamic_tanh"]
    assert (row["config"]["blocks"], row["config"]["dynamic_tanh_alpha"]) == ({NORM.name: digest}, 0.5)
    assert rows["base"]["config"]["blocks"] is None
    for file in (*FILES, VALUES, LOOKED_UP):
        assert (tmp_path / "out/blocks" / file.name).read_bytes() == file.read_bytes()
    assert len({row["bits_per_byte"] for row in rows.values()}) == len(rows)


def test_the_lab_names_what_is_wrong_with_blocks(tmp_path):
    path = write_experiment(tmp_path, blocks=["none.py", 3])
    with pytest.raises(LabError) as error:
        read_experiment(path)
    assert "none.py: no such file" in str(error.value)
    assert "blocks must be paths of Python files, not 3" in str(error.value)


def test_a_folder_of_runs_refuses_another_block_of_the_same_name(tmp_path):
    path = write_experiment(tmp_path, axes={"norm_type": ["my_norm"]}, seeds=[0], blocks=["my_norm.py"])
    for body in ("        return hidden_states", "        return hidden_states / 2"):
        with forgotten_after():
            block_file(tmp_path, body)
            experiment = read_experiment(path)
            if body.endswith("2"):
                with pytest.raises(LabError, match=r"blocks/my_norm\.py is another block of this name"):
                    open_folder(tmp_path / "out", experiment, Text(experiment.data))
            else:
                open_folder(tmp_path / "out", experiment, Text(experiment.data))
