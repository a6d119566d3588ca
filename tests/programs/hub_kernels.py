"""Loads a model with `use_kernels=True`, with a stand-in for the package `kernels` that says what it would replace.

Usage: hub_kernels.py FOLDER, which the stand-in is written to. Prints JSON: by the name of a kernel layer, the classes.
"""

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

folder = Path(sys.argv[1])
package = folder / "kernels"
(package / "layer").mkdir(parents=True)
(package / "__init__.py").write_text("""
import enum


class Mode(enum.Flag):
    INFERENCE, TRAINING, TORCH_COMPILE, FALLBACK = 1, 2, 4, 8


class _Class(type):
    def __getattr__(cls, name):
        return None


class Anything(metaclass=_Class):
    def __init__(self, *args, **kwargs):
        pass


def use_kernel_forward_from_hub(name):
    def named(layer):
        layer.kernel_layer_name = name
        return layer

    return named


found = {}


def kernelize(model, *args, **kwargs):
    for module in model.modules():
        if hasattr(type(module), "kernel_layer_name"):
            found.setdefault(type(module).kernel_layer_name, set()).add(type(module).__qualname__)
    return model


def register_kernel_mapping(*args, **kwargs):
    pass


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything
""")
(package / "layer" / "__init__.py").write_text("")
(package / "layer" / "mode.py").write_text("from kernels import Mode\n")
releases = Path(find_spec("transformers").origin).parent / "utils" / "import_utils.py"  # found without importing it
least = re.search(r'KERNELS_MIN_VERSION = "([\d.]+)"', releases.read_text())[1]
info = folder / f"kernels-{least}.dist-info"
info.mkdir()
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {least}\n")
(info / "RECORD").write_text("")
sys.path.insert(0, str(folder))

import kernels  # noqa: E402
import torch  # noqa: E402

import blockformer  # noqa: E402

sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 97}
ids = torch.arange(5, 12)[None]
for family in ("qwen3", "t5", "bert"):
    config = blockformer.preset(family, **sizes)
    kind = {"qwen3": "DecoderModel", "bert": "EncoderModel"}.get(family, "EncoderDecoderModel")
    model_class = getattr(blockformer, f"Blockformer{kind}")
    model = model_class(config).eval()
    model.save_pretrained(folder / family)
    loaded = model_class.from_pretrained(folder / family, use_kernels=True)
    more = {"decoder_input_ids": ids} if family == "t5" else {}
    assert torch.equal(loaded(ids, **more)[0], model(ids, **more)[0])
print(json.dumps({name: sorted(classes) for name, classes in kernels.found.items()}))
