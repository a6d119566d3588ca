"""SIGKILL at every write, sync and rename: the target is the old model or the new one, whole.

First the writers by themselves, then `convert`. A process forks a child for each kill point; see
`programs/kill_points.py`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer, program


@pytest.fixture(scope="module")
def runs(processes: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What the target was after each kill, for each way of replacing; the last entry is the run that came through."""
    folder = tmp_path_factory.mktemp("kill")
    return json.loads(processes.said(program("killed_writer"), folder, folder=folder, elsewhere=False))


@pytest.mark.parametrize(("name", "before"), [("replace", "old"), ("fresh", "none")])
def test_kill_anywhere_leaves_the_old_or_the_new(runs: dict[str, list[dict[str, Any]]], name: str, before: str) -> None:
    *killed, last = runs[name]
    assert (last["found"], last["status"]) == ("new", 0)
    calls = [kill["call"] for kill in killed]
    assert {"write", "fsync", "rename", "mkdir"} <= set(calls)
    assert len(killed) > 20
    renamed = calls.index("rename") + 1
    assert len(killed) > renamed  # some kills came after the rename
    assert [kill["found"] for kill in killed] == [before] * renamed + ["new"] * (len(killed) - renamed)


def test_kill_anywhere_without_the_exchange_call(runs: dict[str, list[dict[str, Any]]]) -> None:
    *killed, last = runs["fallback"]
    assert (last["found"], last["status"]) == ("new", 0)
    for kill in killed:  # between the two renames, and only there, the old model is whole at the name beside
        whole = kill["found"] in ("old", "new") or (kill["found"] == "none" and kill["aside"] == ["old"])
        assert whole, kill
    assert [kill["found"] for kill in killed].count("none") == 1


def converters(processes: ForkServer, folder: Path, step: int) -> dict[str, list[dict[str, Any]]]:
    """What the target was after each kill of `convert`, at every `step`-th point and at each around the rename."""
    return json.loads(processes.said(program("killed_converter"), folder, step, folder=folder, elsewhere=False))


def check_converters(runs: dict[str, list[dict[str, Any]]]) -> None:
    for name, before in (("replace", "old"), ("fresh", "none")):
        *killed, last = runs[name]
        assert (last["found"], last["status"], last["left"]) == ("new", 0, 0)
        found = [kill["found"] for kill in killed]
        changed = found.index("new") if "new" in found else len(found)
        assert found == [before] * changed + ["new"] * (len(found) - changed)
        assert killed[changed - 1]["call"] == "rename"  # the step right before the change is the one rename
        assert {"write", "sync", "os.chmod", "rename"} <= {kill["call"] for kill in killed}


@pytest.fixture(scope="module")
def some_points(processes: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return converters(processes, tmp_path_factory.mktemp("convert"), 13)


def test_a_converter_killed_at_some_points(some_points: dict[str, list[dict[str, Any]]]) -> None:
    check_converters(some_points)


def test_three_converters_on_one_target_and_a_reader(some_points: dict[str, list[dict[str, Any]]]) -> None:
    replaced, fresh = some_points["together"]
    assert replaced["codes"] == [0, 0, 0]  # each replaced it in its turn, whole
    assert fresh["codes"] == [0, 1, 1]  # one made it, the others were refused
    assert len(replaced["seen"]) > 1
    assert len(fresh["seen"]) == 1  # what was there once stayed
    assert replaced["left"] == fresh["left"] == ["x"]


@pytest.mark.exhaustive
def test_a_converter_killed_at_every_point(processes: ForkServer, tmp_path: Path) -> None:
    runs = converters(processes, tmp_path, 1)
    check_converters(runs)
    points = [len(killed) - 1 for name, killed in runs.items() if name != "together"]
    assert min(points) > 100
    assert {"text", "open", "os.mkdir", "sync", "rename"} <= {kill["call"] for kill in runs["replace"]}
    print(f"\n{points} points")
