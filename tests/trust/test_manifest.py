"""The manifests of releases: the installed one is what the model's folder has."""

import hashlib
import json

import blockformer
from blockformer.publishing import code_files
from blockformer.publishing.repo_code import STAND_IN
from blockformer.trust import manifest


def test_the_installed_manifest_has_every_file_that_a_repo_carries():
    found = manifest.installed()
    assert found.release == blockformer.__version__
    for name in ("bert", "qwen3", "t5"):
        config = blockformer.preset(name)
        paths = code_files(config)
        assert sorted(found.topologies[config.model_type]) == sorted(paths)
        for name, path in paths.items():
            known = found.stand_ins if path == STAND_IN else found.files
            assert known[name] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert manifest.Manifest(**json.loads(found.text())) == found


def test_manifests_that_ship_are_whole_and_named_after_their_release():
    for path in manifest.FOLDER.glob("*.json"):
        found = manifest.manifest_of(path.stem)
        assert found is not None
        assert found.release == path.stem
        assert set().union(*found.topologies.values()) <= found.files.keys()
        assert all(len(digest) == 64 for digest in found.files.values())


def test_only_later_releases_are_later():
    assert [manifest.is_later(each) for each in ("99.0", "0.0.1", blockformer.__version__, "", "None")] == [
        True, False, False, False, False,
    ]  # fmt: skip
