"""torch.onnx.export with open sizes, run in ONNX Runtime on other ones. Usage: python with_onnx.py MODELS [NAME ...]"""

import sys
import tempfile
from pathlib import Path

import torch
from shared import compare

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
from export_onnx import export, largest_difference, load

NAMES = ("bert-encoder", "bert-classifier", "qwen3", "gpt2", "t5", "bart")


def run(folder: str) -> list[float]:
    """0 where ONNX Runtime says what PyTorch says."""
    model = load(folder)
    with tempfile.TemporaryDirectory() as place:
        export(model, f"{place}/model.onnx")
        difference = largest_difference(model, f"{place}/model.onnx")
    if difference > 1e-4:
        raise RuntimeError(f"ONNX Runtime differs by {difference:.1e} of the largest result")
    return [0.0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2:] or NAMES:
        compare("onnxruntime", "export and run", name, run)
