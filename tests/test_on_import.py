"""What `import blockformer` brings along, and that nothing is missing afterwards however one begins."""

import subprocess
import sys

import transformers

import blockformer
from blockformer import api
from blockformer.on_import import CONFIGS

HEAVY = """
    torch transformers numpy scipy sympy sklearn datasets peft accelerate safetensors tokenizers huggingface_hub typer
    rich blockformer.api blockformer.model.axes blockformer.conversion blockformer.engine blockformer.training
""".split()


def run(code):
    """Run code in a process that has imported nothing yet, and give what it prints, line by line."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_importing_the_package_brings_nothing_heavy_and_the_auto_classes_know_its_models():
    lines = run(f"""
import sys
import blockformer
print([name for name in {HEAVY} if name in sys.modules])
print(blockformer.__version__, hasattr(blockformer, "nonsense"), "preset" in dir(blockformer))
print(len(set(blockformer.__all__) - set(dir(blockformer))))
from transformers import AutoConfig, AutoModelForCausalLM
print([name for name in sys.modules if name.startswith("blockformer.")])
config = AutoConfig.for_model("blockformer_decoder", num_hidden_layers=1, hidden_size=64, vocab_size=9)
print(type(config) is blockformer.BlockformerDecoderConfig)
print(type(AutoModelForCausalLM.from_config(config)) is blockformer.BlockformerDecoderForCausalLM)
print([type(finder).__module__ for finder in sys.meta_path if type(finder).__module__.startswith("blockformer")])
""")
    version = blockformer.__version__
    assert lines == [
        "[]",
        f"{version} False True",
        "0",
        "['blockformer.model', 'blockformer.model.release', 'blockformer.on_import']",
        "True",
        "True",
        "['blockformer.on_import']",  # which waits for PEFT
    ]


PART_FIRST = """
from blockformer.model.modeling_decoder import BlockformerDecoderForCausalLM, BlockformerDecoderConfig
import inspect
model = AutoModelForCausalLM.from_config(BlockformerDecoderConfig(num_hidden_layers=1, vocab_size=9))
assert type(model) is BlockformerDecoderForCausalLM
assert model.prepare_for_inference() is model
assert inspect.getsource(type(model)).startswith("class")
try:
    AutoConfig.from_pretrained(sys.argv[1])
except ValueError as error:
    print("appears twice" in str(error))
"""


def test_a_part_of_the_model_by_its_own_name_sets_the_package_up(tmp_path, processes):
    """As a pickle imports it, and with the Auto classes there before the package."""
    (tmp_path / "config.json").write_text('{"model_type": "blockformer_decoder", "vocab_size": 9, "vocab_size": 8}')
    imports = "from transformers import AutoConfig, AutoModelForCausalLM\n"
    assert processes.said(imports + PART_FIRST, tmp_path, folder=tmp_path, elsewhere=False) == "True"


def test_the_model_brings_no_library_that_transformers_has_not_brought(tmp_path, processes):
    code = """
from transformers import GPT2LMHeadModel
before = set(sys.modules)
import blockformer.model.modeling_decoder
new = set(sys.modules) - before
print(sorted({name.partition(".")[0] for name in new} - sys.stdlib_module_names), "transformers.trainer" in new)
"""
    assert processes.said(code, folder=tmp_path, elsewhere=False) == "['blockformer'] False"


def test_each_config_has_its_stand_in():
    config_classes = {getattr(api, name) for name in CONFIGS.values()}
    assert {each.model_type: each.__name__ for each in config_classes} == CONFIGS
    assert all(transformers.AutoConfig.for_model(name).__class__ in config_classes for name in CONFIGS)


def test_all_public_names_are_there():
    assert all(getattr(blockformer, name) is not None for name in blockformer.__all__)
    assert {"convert", "export_model", "from_official"} <= set(dir(blockformer))
