"""CONTRIBUTING's walk for a new axis, in a copy of the package: a line declares it, and its part's code reads it."""

import shutil
from pathlib import Path

from fork_server import program

ROOT = Path(__file__).parents[1]
DECLARED = '    gate_multiplier: float = axis(1.0, "a positive number", "feed-forward", "factor of the gate")\n'
READ = """        self.gate_multiplier = config.gate_multiplier
        self.chunk_size = """
FOLLOWED = "self.gate_multiplier * self.act_fn(self.gate_proj(hidden_states))"
NEEDED = '    (("gate_multiplier",), "gated_mlp", ()),\n'
LOADED = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert torch.equal(model(torch.arange(7)[None]).logits, torch.load(f"{sys.argv[1]}/logits.pt"))
print("{}")
"""


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_an_axis_is_a_line_beside_its_reader_and_one_where_it_needs_another(tmp_path, processes):
    package = shutil.copytree(ROOT / "src/blockformer", tmp_path / "copy/blockformer")
    shutil.copytree(ROOT / "conversion", package / "conversion")
    part = package / "model/feed_forward.py"
    edit(part, "    float32_down_proj: bool = flag(", DECLARED + "    float32_down_proj: bool = flag(")
    edit(part, "        self.chunk_size = ", READ)
    edit(part, "self.act_fn(self.gate_proj(hidden_states))", FOLLOWED)
    edit(package / "declared_fields.py", "    (axes(LinearFields),", NEEDED + "    (axes(LinearFields),")
    repo = tmp_path / "repo"
    processes.said(program("new_axis"), package.parent, repo, folder=tmp_path, elsewhere=False)
    processes.said(LOADED, repo, folder=tmp_path)
