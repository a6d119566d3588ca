"""Blocks of one's own in an experiment."""

import hashlib

import pytest
from own_blocks import NETWORK, NORM, block_file, forgotten_after

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


def test_the_lab_compares_blocks_and_keeps_them(tmp_path):
    for file in (NORM, NETWORK):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    axes = {"norm_type": ["dynamic_tanh"], "mlp_type": ["squared_relu"]}
    path = write_experiment(tmp_path, axes=axes, seeds=[0], blocks=[NORM.name, NETWORK.name])
    with pytest.raises(SystemExit) as end:
        main(["lab", str(path), "--output", str(tmp_path / "out")])
    assert not end.value.code
    rows = {row["name"]: row for row in read_rows(tmp_path / "out")}
    digest = hashlib.sha256(NORM.read_bytes()).hexdigest()
    row = rows["norm_type=dynamic_tanh-seed0"]
    assert (row["config"]["blocks"], row["config"]["dynamic_tanh_alpha"]) == ({NORM.name: digest}, 0.5)
    assert rows["base-seed0"]["config"]["blocks"] is None
    assert (tmp_path / "out/blocks" / NORM.name).read_bytes() == NORM.read_bytes()
    assert len({row["bits_per_byte"] for row in rows.values()}) == 3


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
