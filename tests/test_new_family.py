"""The walk of docs/add-a-family.md: the record that it shows and a name in the index, in a copy without the family."""

import re
import shutil
from pathlib import Path

import pytest
from fork_server import program

ROOT = Path(__file__).parents[1]
LACKING = """
import sys
sys.path.insert(0, sys.argv[1])
from blockformer.conversion.families.registry import family_of
family_of({"model_type": "jais2"})
"""


@pytest.mark.slow
def test_a_family_is_a_record_and_its_name_in_the_index(tmp_path, processes):
    package = shutil.copytree(ROOT / "src/blockformer", tmp_path / "copy/blockformer")
    families = shutil.copytree(ROOT / "conversion", package / "conversion") / "families"
    index, record = families / "index.py", families / "jais2.py"
    record.unlink()
    names = index.read_text(encoding="utf-8")
    assert names.count('"jais2", ') == 1
    index.write_text(names.replace('"jais2", ', ""), encoding="utf-8")
    done = processes.run(LACKING, package.parent, folder=tmp_path, elsewhere=False)
    assert "model_type 'jais2' is not supported" in done.stderr

    page = (ROOT / "docs/add-a-family.md").read_text(encoding="utf-8")
    record.write_text(re.search(r'```python\n("""Jais 2.*?)```', page, re.S)[1], encoding="utf-8")
    index.write_text(
        names.replace('"jais2", ', "").replace("NAMES: tuple[str, ...] = (\n", 'NAMES = (\n    "jais2",\n'),
        encoding="utf-8",
    )
    processes.said(program("new_family"), package.parent, tmp_path, folder=tmp_path, elsewhere=False)
