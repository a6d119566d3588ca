"""Blocks from outside: what `register` takes and refuses, and that all that is done with a model works with them."""

import copy
import hashlib
import json
import pickle
import py_compile
import re
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
import scale_steps
import torch
from fork_server import program
from own_blocks import ALL, ATTENTION, FILES, NETWORK, NORM, SIZES, block_file, forgotten_after, register_all
from pairs import assert_close, assert_gradients_close

import blockformer
from blockformer.cli.entry import main
from blockformer.conversion import ConversionError, convert
from blockformer.conversion.exporting import export_folder
from blockformer.conversion.reshaped import convert_reshaped as convert_shape
from blockformer.declared_fields import axes_of
from blockformer.model.axes import BLOCKS, axes
from blockformer.page.fields import fields_of
from blockformer.page.making import page_of
from blockformer.pictures import anatomy, figure
from blockformer.summary import summarize

MODELS = {
    "gpt2": "BlockformerDecoderForCausalLM",
    "bert": "BlockformerEncoderForMaskedLM",
    "t5": "BlockformerEncoderDecoderForConditionalGeneration",
}


@pytest.fixture(autouse=True)
def forgotten():
    with forgotten_after():
        yield


def model_of(name="gpt2", **settings):
    register_all()
    torch.manual_seed(0)
    config = blockformer.preset(name, **{**SIZES, **ALL, **settings})
    model = getattr(blockformer, MODELS[name])(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def inputs_of(model):
    ids = torch.randint(3, 97, (2, 7))
    return {"input_ids": ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})}


def test_a_file_says_what_it_adds_and_may_be_registered_again():
    assert blockformer.register(NORM) == {"norm_type": ["dynamic_tanh"]}
    assert blockformer.register(str(NORM)) == {"norm_type": ["dynamic_tanh"]}
    assert blockformer.register(NETWORK) == {"mlp_type": ["squared_relu"]}
    assert blockformer.register(ATTENTION) == {"attention_type": ["gated_attention"]}


def test_a_gate_multiplies_what_the_output_projection_reads():
    model = model_of()
    attention, states, read = model.model.layers[1].self_attn, [], []
    attention.register_forward_pre_hook(
        lambda module, _, given: states.append(given["hidden_states"]), with_kwargs=True
    )
    attention.o_proj.register_forward_pre_hook(lambda module, args: read.append(args[0]))
    ids = torch.randint(3, 97, (2, 7))
    model(ids)
    with torch.no_grad():
        attention.gate_proj.weight.zero_()  # the first layer is as before, so the second one reads the same
    model(ids)
    assert torch.equal(states[0], states[1])
    gate = torch.sigmoid(states[0] @ gate_of(model_of()).T)
    torch.testing.assert_close(read[0], read[1] * 2 * gate, rtol=1e-5, atol=1e-6)


def gate_of(model):
    return model.model.layers[1].self_attn.gate_proj.weight


def test_the_norm_and_the_network_compute_their_formulas():
    model = model_of(dynamic_tanh_alpha=0.7)
    layer, states = model.model.layers[0], torch.randn(2, 5, 32)
    norm, network = layer.mlp_pre_norm, layer.mlp
    torch.testing.assert_close(norm(states), norm.weight * torch.tanh(norm.alpha * states) + norm.bias)
    inner = torch.relu(states @ network.up_proj.weight.T) ** 2
    torch.testing.assert_close(network(states), inner @ network.down_proj.weight.T)
    register_all()
    fresh = blockformer.BlockformerDecoderForCausalLM(model.config)
    assert {module.alpha.item() for module in fresh.modules() if hasattr(module, "alpha")} == {torch.tensor(0.7).item()}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_with_its_blocks(tmp_path, name):
    model = model_of(name)
    model.save_pretrained(tmp_path)
    for file in FILES:
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()
    entries = json.loads((tmp_path / "config.json").read_text())
    assert entries["blocks"] == {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in FILES}
    assert set(entries["auto_map"]) == set(type(model.config).auto_classes)
    assert {code.partition(".")[0] for code in entries["auto_map"].values()} == {"with_blocks"}
    again = type(model).from_pretrained(tmp_path).eval()
    inputs = inputs_of(model)
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    fields = axes_of(model.config)
    assert all(getattr(again.config, name) == getattr(model.config, name) for name in fields)
    assert {"blocks", "mlp_type", "attention_type", "dynamic_tanh_alpha"} <= fields.keys()


def test_without_blocks_nothing_is_written_of_them(tmp_path):
    register_all()
    blockformer.BlockformerDecoderForCausalLM(blockformer.preset("gpt2", **SIZES)).save_pretrained(tmp_path)
    assert not {"with_blocks.py", *(file.name for file in FILES)} & {path.name for path in tmp_path.iterdir()}
    entries = json.loads((tmp_path / "config.json").read_text())
    assert not {"blocks", "mlp_type", "attention_type"} & entries.keys()
    assert entries["auto_map"]["AutoModel"] == "modeling_decoder.BlockformerDecoderModel"


def test_a_config_that_no_longer_names_a_block_carries_none(tmp_path):
    model_of().config.save_pretrained(tmp_path / "first")
    config = blockformer.BlockformerDecoderConfig.from_pretrained(tmp_path / "first")
    own = axes_of(config).keys() - axes_of(blockformer.BlockformerDecoderConfig()).keys()
    assert own == {"dynamic_tanh_alpha", "p_rope_share"}
    fields = {name: value for name, value in config.to_dict().items() if name not in own}
    defaults = {name: each.default for name, each in axes(blockformer.BlockformerDecoderConfig).items()}
    plain = blockformer.BlockformerDecoderConfig(**{**fields, **{name: defaults[name] for name in ALL}})
    plain.save_pretrained(tmp_path / "second")
    assert plain.blocks is None
    assert plain.to_dict()["auto_map"] == plain.auto_classes
    assert not (tmp_path / "second/with_blocks.py").exists()


def test_fields_of_a_block_are_checked_shown_and_belong_to_it():
    register_all()
    config = blockformer.preset("gpt2", **SIZES, **ALL)
    assert config.dynamic_tanh_alpha == 0.5
    assert axes_of(config)["dynamic_tanh_alpha"].group == "norm"
    with pytest.raises(ValueError, match="dynamic_tanh_alpha must be a positive number, not -1"):
        blockformer.preset("gpt2", **ALL, dynamic_tanh_alpha=-1)
    with pytest.raises(ValueError, match="has no field 'dynamic_tanh_alpha'"):
        blockformer.preset("gpt2", dynamic_tanh_alpha=0.5)
    with pytest.raises(ValueError, match="has no field 'dynamic_tanh_alpha'"):
        blockformer.BlockformerDecoderConfig(dynamic_tanh_alpha=0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"norm_bias": True}, "does not read norm_bias=True: leave norm_bias out"),
        ({"norm_weight": "zero_centered"}, "does not read norm_weight='zero_centered'"),
        ({"norm_weight": "none"}, "does not read norm_weight='none'"),
        ({"qk_norm": "per_head"}, "does not read qk_norm='per_head'"),
        ({"chunk_size_feed_forward": 4}, "leave chunk_size_feed_forward out"),
        ({"float32_down_proj": True}, "leave float32_down_proj out"),
        ({"num_experts": 4, "gated_mlp": True}, "leave num_experts out"),
        ({"mlp_type": "dense"}, "mlp_type must be one of scaled, squared_relu, not 'dense'"),
        ({"pruned_heads": {0: [1]}}, "leave pruned_heads out"),
        ({"norm_type": "dynamic_tan"}, "Did you mean 'dynamic_tanh'?"),
    ],
)
def test_settings_that_say_nothing_with_a_block_are_refused(settings, message):
    register_all()
    with pytest.raises(ValueError, match=re.escape(message)):
        blockformer.preset("gpt2", **{**SIZES, **ALL, **settings})


def test_models_in_which_a_block_could_do_nothing_are_refused():
    register_all()
    with pytest.raises(ValueError, match=r"with num_hidden_groups=1 some layers share one: leave num_hidden_group"):
        blockformer.preset("albert", **SIZES, attention_type="value_residual")
    assert blockformer.preset("albert", **SIZES, attention_type="value_residual", num_hidden_groups=2).blocks
    assert blockformer.preset("albert", **SIZES, attention_type="gated_attention").num_hidden_groups == 1
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    latent = {**SIZES, "kv_lora_rank": 8, "head_dim": 16}
    assert blockformer.BlockformerDecoderConfig(**latent, rope_parameters=rope).kv_lora_rank == 8
    with pytest.raises(ValueError, match=r"'p_rope'.* which part of each head rotates, .*=8: set position_type="):
        blockformer.BlockformerDecoderConfig(**latent, position_type="p_rope")


@pytest.mark.parametrize("name", ["gemma2", "qwen3", "t5", "bert", "modernbert", "olmo", "gpt2"])
def test_presets_give_up_what_a_norm_from_outside_has_not(name):
    register_all()
    assert blockformer.preset(name, norm_type="dynamic_tanh").blocks.keys() == {NORM.name}


# What `register` refuses.

HEAD = "from torch import nn\nfrom .blocks import block\n\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("def f(:\n", "not Python"),
        ("import torch\n", "has no block"),
        ("import numpy\n", "line 1: a block may not import 'numpy': it may import torch, files next to it"),
        ("import os\n", "a block may not import 'os'"),
        ("from transformers import Trainer\n", "a block may not import 'transformers'"),
        ("def f():\n    from numpy.linalg import norm\n", "line 2: a block may not import 'numpy.linalg'"),
        ("from blockformer.model.blocks import block\n", "write `from .blocks import block`"),
        ("from .experts import Router\n", "'.experts' is not a file next to it in a repo: write `from .name import x`"),
        ("from . import blocks\n", "'.' is not a file next to it in a repo"),
        ("from ..model import blocks\n", "'..model' is not a file next to it"),
        ('"""Text.\n\nfrom .ghost import it\n"""\n', "looks like an import of '.ghost'"),
        ("raise RuntimeError('no')\n", "importing it fails: RuntimeError: no"),
        ("from .blocks import block\n\nblock('qk_norm', 'x')(int)\n", "importing it fails"),
        (
            f"{HEAD}@block('hidden_act', 'x')\nclass X(nn.Module): ...\n",
            "'hidden_act' takes no blocks from outside; the axes that do: attention_type, layer_types, "
            "mlp_type, norm_type, position_type, residual",
        ),
        (
            f"{HEAD}@block('position_type', 'x')\nclass X(nn.Module): ...\n",
            "X does not say which positions it gives: write `gives = ...` in the class, one of 'vectors', 'rotations', "
            "'biases'",
        ),
        (
            f"{HEAD}@block('position_type', 'x')\nclass X(nn.Module):\n    gives = 'scores'\n",
            "X does not say which positions it gives",
        ),
        (
            f"{HEAD}@block('residual', 'x')\nclass X(nn.Module): ...\n",
            "X is not a Layer: from .layer import Layer, and extend it",
        ),
        (
            f"{HEAD}@block('norm_type', 'rms_norm')\nclass X(nn.Module): ...\n",
            "norm_type='rms_norm' is one of Blockformer's: give your block another name",
        ),
        (
            f"{HEAD}@block('attention_type', 'x')\nclass X(nn.Module): ...\n",
            "X is not an Attention: from .attention import",
        ),
        (
            "from .blocks import block\n\n@block('norm_type', 'x')\nclass X: ...\n",
            "X is not a torch.nn.Module",
        ),
        (
            "from torch import nn\nfrom .axes import flag\nfrom .blocks import block\n\n"
            "@block('norm_type', 'x', qk_norm=flag(True, 'norm', 'it'))\nclass X(nn.Module): ...\n",
            "qk_norm is a field of Blockformer's: give yours another name",
        ),
    ],
)
def test_files_that_are_refused(tmp_path, content, message):
    path = tmp_path / "my_norm.py"
    path.write_text(content)
    before = {axis: dict(known) for axis, known in BLOCKS.items()}
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        blockformer.register(path)
    assert str(error.value).startswith(str(path))
    assert before == BLOCKS
    block_file(tmp_path)  # mended, it is taken
    assert blockformer.register(path) == {"norm_type": ["my_norm"]}


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"my_norm\.py: no such file; name the Python file"):
        blockformer.register(tmp_path / "my_norm.py")
    (tmp_path / "my_norm.py").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not Python"):
        blockformer.register(tmp_path / "my_norm.py")


@pytest.mark.parametrize("name", ["attention", "with_blocks", "my-norm", "2norm"])
def test_names_that_a_repo_has_or_cannot_import(tmp_path, name):
    with pytest.raises(ValueError, match=r"give yours another name|call the file by letters"):
        blockformer.register(block_file(tmp_path, name=name))


def test_two_blocks_of_one_name(tmp_path):
    (tmp_path / "other").mkdir()
    path = block_file(tmp_path)
    blockformer.register(path)
    assert blockformer.register(block_file(tmp_path / "other")) == {"norm_type": ["my_norm"]}
    path.write_text(path.read_text() + "\n# Changed.\n")
    with pytest.raises(ValueError, match=r"a file my_norm\.py with other content is registered"):
        blockformer.register(path)
    second = tmp_path / "second.py"
    second.write_text(path.read_text())
    with pytest.raises(ValueError, match=r"norm_type='my_norm' is registered from my_norm\.py"):
        blockformer.register(second)
    assert BLOCKS["norm_type"]["my_norm"].cls.__module__ == "blockformer.model.my_norm"


def test_the_file_is_run_and_not_a_compiled_one_beside_it(tmp_path):
    path = block_file(tmp_path, head="FLAG = 1\n")
    py_compile.compile(str(path), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    path.write_text(path.read_text().replace("FLAG = 1", "FLAG = 2"))
    blockformer.register(path)
    assert sys.modules[BLOCKS["norm_type"]["my_norm"].cls.__module__].FLAG == 2


def test_a_file_that_changes_while_it_is_registered(tmp_path):
    path = block_file(tmp_path)
    compiled = compile

    def slow(source, *rest):
        path.write_text(path.read_text() + "\n# Changed.\n")
        return compiled(source, *rest)

    with mock.patch("blockformer.registering.compile", slow, create=True):
        with pytest.raises(ValueError, match=r"my_norm\.py: the file changed while it was read: register it again"):
            blockformer.register(path)
    assert blockformer.register(path) == {"norm_type": ["my_norm"]}


def test_saving_never_undoes_an_edit_of_the_file_itself(tmp_path):
    path = block_file(tmp_path)
    blockformer.register(path)
    model = blockformer.BlockformerDecoderForCausalLM(blockformer.preset("gpt2", **SIZES, norm_type="my_norm"))
    model.save_pretrained(tmp_path)  # beside it, as it was
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir() if each.is_file()}
    path.write_text(edited := path.read_text() + "\n# Edited.\n")
    with pytest.raises(ValueError, match=r"my_norm\.py was edited after it was registered.*save to another folder"):
        model.save_pretrained(tmp_path)
    assert path.read_text() == edited
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir() if each.is_file()} == {
        **before,
        path.name: edited.encode(),
    }
    model.save_pretrained(tmp_path / "other")
    assert (tmp_path / "other/my_norm.py").read_bytes() == before["my_norm.py"]


TABLE = """import torch
from torch import nn

from .blocks import block


@block("position_type", "my_table")
class MyTable(nn.Module):
    gives = "vectors"

    def __init__(self, config, **kwargs):
        super().__init__()
        self.table = nn.Parameter(torch.randn(12, config.embedding_size))

    def forward(self, position_ids):
        return self.table[position_ids]
"""


def test_a_text_longer_than_a_table_from_outside(tmp_path):
    path = tmp_path / "my_table.py"
    path.write_text(TABLE)
    blockformer.register(path)
    model = model_of(position_type="my_table")
    assert model(torch.full((1, 12), 5)).logits.shape == (1, 12, 97)
    with pytest.raises(ValueError, match=r"position_type='my_table' reads outside its table .*: shorten the text"):
        model(torch.full((1, 13), 5))
    with pytest.raises(ValueError, match="reads outside its table"):
        model.generate(torch.full((1, 10), 5), max_new_tokens=5, eos_token_id=None)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("num_labels=axis(3, 'a positive integer', 'norm', 'it')", "num_labels is a field of transformers'"),
        ("model_type=axis('x', 'a token', 'norm', 'it')", "model_type is a field of transformers'"),
        ("name_or_path=axis('x', 'a token', 'norm', 'it')", "name_or_path is a field of transformers'"),
        ("temperature=axis(1.0, 'a token', 'norm', 'it')", "temperature is a field of transformers'"),
        ("to_dict=axis(1, 'a token', 'norm', 'it')", "to_dict is a field of transformers'"),
        ("_mine=axis(1, 'a token', 'norm', 'it')", "_mine is a field of"),
        ("mine=axis(1, 'a token', 'colour', 'it')", "the group of mine must be one of size, embeddings"),
        ("mine=axis(nn.Identity, 'a token', 'norm', 'it')", "the default of mine cannot stand in config.json"),
        ("mine=3", "the field mine of 'my_norm' is not declared: write mine=axis(...) of .axes"),
    ],
)
def test_fields_of_a_block_that_a_config_cannot_hold(tmp_path, field, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        blockformer.register(block_file(tmp_path, head="from .axes import axis\n", fields=f", {field}"))


def test_configs_share_no_default(tmp_path):
    blockformer.register(
        block_file(tmp_path, head="from .axes import axis\n", fields=", mine=axis([1], 'a list', 'norm', 'it')")
    )
    first, second = (blockformer.preset("gpt2", **SIZES, norm_type="my_norm") for _ in range(2))
    first.mine.append(2)
    assert second.mine == [1] == blockformer.preset("gpt2", **SIZES, norm_type="my_norm").mine


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.device("meta")])
def test_the_mode_of_the_caller_changes_nothing(tmp_path, mode):
    with mode():
        assert blockformer.register(block_file(tmp_path)) == {"norm_type": ["my_norm"]}


def test_others_make_configs_while_a_file_is_refused(tmp_path):
    register_all()
    ended, wrong = threading.Event(), []

    def make():
        while not ended.is_set():
            try:
                blockformer.preset("gpt2", **SIZES, **ALL)
            except Exception as error:
                wrong.append(error)
                return

    threads = [threading.Thread(target=make) for _ in range(2)]
    for each in threads:
        each.start()
    for number in range(4):
        with pytest.raises(ValueError, match="does not run"):
            blockformer.register(block_file(tmp_path, "        return hidden_states[..., :3]", name=f"bad_{number}"))
    ended.set()
    for each in threads:
        each.join()
    assert not wrong


CHAIN = """from .attention import Attention
from .blocks import block, leave, read


@block("attention_type", "chain")
class Chain(Attention):
    def before_cache(self, key, value, earlier):
        if self.layer_idx > 0:
            value = value + read(earlier, READ)
        if self.layer_idx < self.config.num_hidden_layers - 1:
            leave(earlier, LEFT, value)
        return key, value
"""


def test_layers_that_leave_tensors_under_one_name_are_refused(tmp_path):
    path = tmp_path / "chain.py"
    path.write_text(CHAIN.replace("READ", "'values'").replace("LEFT", "'values'"))
    with pytest.raises(ValueError, match=r"gradient checkpointing .*each layer under its own name"):
        blockformer.register(path)
    path.write_text(CHAIN.replace("READ", "f'{self.layer_idx - 1}'").replace("LEFT", "f'{self.layer_idx}'"))
    assert blockformer.register(path) == {"attention_type": ["chain"]}


PROBLEMS = {
    "a tensor that is no parameter": (
        "        if not hasattr(self, 'factor'):\n"
        "            import torch\n            self.factor = torch.rand(32)\n"
        "        return hidden_states * self.factor",
        "does not come back from its files, though all that was saved is the same: make every tensor an nn.Parameter",
    ),
    "a shape": ("        return hidden_states[..., :3]", "does not run: "),
    "another token": (
        "        return hidden_states - hidden_states.mean(1, keepdim=True)",
        "with a cache than without",
    ),
    "NaN": ("        return hidden_states / 0 * 0", "returns NaN or infinity"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_blocks_that_do_not_work_in_a_model(tmp_path, name):
    body, message = PROBLEMS[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        blockformer.register(block_file(tmp_path, body))
    assert "my_norm" not in BLOCKS["norm_type"]


def test_a_buffer_that_is_not_saved(tmp_path):
    path = block_file(tmp_path, "        return hidden_states * self.factor", head="import torch\n")
    text = path.read_text().replace(
        "super().__init__()\n",
        "super().__init__()\n        self.register_buffer('factor', torch.rand(size), persistent=False)\n",
    )
    path.write_text(text)
    with pytest.raises(ValueError, match=r"does not come back from its files: .*factor"):
        blockformer.register(path)
    path.write_text(text.replace(", persistent=False", ""))
    assert blockformer.register(path) == {"norm_type": ["my_norm"]}


# Repos whose blocks are not registered.


def test_a_repo_is_refused_until_its_block_is_registered(tmp_path):
    with forgotten_after():
        model = model_of()
        model.save_pretrained(tmp_path)
    planted = tmp_path / "PLANTED"
    (tmp_path / NORM.name).write_text(NORM.read_text() + f"\nopen({str(planted)!r}, 'w').close()\n")
    for load in (blockformer.BlockformerDecoderForCausalLM.from_pretrained, blockformer.from_official):
        with pytest.raises((ValueError, ConversionError), match=r"needs 'dynamic_tanh\.py', a block of its author's"):
            load(tmp_path)
    assert not planted.exists()
    register_all()
    blockformer.BlockformerDecoderForCausalLM.from_pretrained(tmp_path)
    assert not planted.exists()


def test_a_repo_of_another_version_of_a_block_is_refused(tmp_path):
    model_of().save_pretrained(tmp_path)
    entries = json.loads((tmp_path / "config.json").read_text())
    entries["blocks"][NORM.name] = "0" * 64
    (tmp_path / "config.json").write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=r"was made with another 'dynamic_tanh\.py'"):
        blockformer.BlockformerDecoderForCausalLM.from_pretrained(tmp_path)
    for wrong in (["dynamic_tanh.py"], {"dynamic_tanh.py": 1}, "dynamic_tanh.py"):
        (tmp_path / "config.json").write_text(json.dumps({**entries, "blocks": wrong}))
        with pytest.raises(ValueError, match="blocks must be a mapping from file names to their SHA-256"):
            blockformer.BlockformerDecoderForCausalLM.from_pretrained(tmp_path)


# What is done with a model.


def test_copies_and_pickles():
    model = model_of()
    inputs = inputs_of(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(**inputs).logits, model(**inputs).logits)
    assert pickle.loads(pickle.dumps(model.config)).to_dict() == model.config.to_dict()


def test_a_cache_and_padding_change_nothing():
    model = model_of()
    ids = torch.randint(3, 97, (2, 9))
    whole = model(ids).logits
    cache = model(ids[:, :5], use_cache=True).past_key_values
    torch.testing.assert_close(model(ids[:, 5:], past_key_values=cache).logits, whole[:, 5:], rtol=1e-5, atol=1e-5)
    padded = torch.cat((torch.zeros(2, 3, dtype=torch.long), ids), dim=1)
    found = model(padded, attention_mask=(padded != 0).long()).logits
    torch.testing.assert_close(found[:, 3:], whole, rtol=1e-5, atol=1e-5)


def gradients(model, ids):
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_gradient_checkpointing_gives_the_same_gradients():
    model = model_of(hidden_dropout=0.0, attention_dropout=0.0).train()
    ids = torch.randint(3, 97, (2, 9))
    plain = gradients(model, ids)
    assert all(gradient.abs().sum() > 0 for gradient in plain.values())
    model.gradient_checkpointing_enable()
    found = gradients(model, ids)
    assert all(torch.equal(found[name], gradient) for name, gradient in plain.items())


def test_a_prepared_model_agrees_and_trains_again():
    model = model_of()
    ids = torch.randint(3, 97, (2, 9))
    wanted = model(ids).logits
    blockformer.prepare_for_inference(model)
    torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-5, atol=1e-5)
    blockformer.prepare_for_training(model).train()
    assert all(gradient is not None for gradient in gradients(model, ids).values())


def test_a_model_prepared_with_compile_runs_uncompiled_and_says_so(caplog):
    model = model_of(initializer_range=0.2)
    ids = torch.randint(3, 97, (1, 9))
    wanted = model.generate(ids, max_new_tokens=8, do_sample=False)
    blockformer.prepare_for_inference(model, compile=True)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), wanted)
    assert "code of another package: blockformer.model." in caplog.text
    (reason,) = blockformer.explain(model).fallbacks
    assert "code of another package" in reason


@pytest.mark.slow
def test_torch_compile_traces_a_block_whole():
    model = model_of()
    ids = torch.randint(3, 97, (2, 9))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


def test_the_plan_for_tensor_parallelism_is_the_block_s():
    plan = model_of().config.base_model_tp_plan
    assert plan["layers.*.self_attn.gate_proj"] == "colwise"
    assert {name: style for name, style in plan.items() if ".mlp." in name} == {
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    BLOCKS["mlp_type"]["squared_relu"].tensor_parallel_plan = {}
    BLOCKS["attention_type"]["gated_attention"].tensor_parallel_plan = {}
    assert blockformer.preset("gpt2", **ALL).base_model_tp_plan == {}


@pytest.mark.slow
def test_two_processes_that_share_blocks_answer_like_one(tmp_path, processes):
    model = model_of(vocab_size=199, initializer_range=0.2)
    model.save_pretrained(tmp_path / "model-0")
    (tmp_path / "models.json").write_text('["blocks"]')
    one = scale_steps.answers(model)
    task = "blocks_in_parallel"
    arguments = (Path(scale_steps.__file__).parent, tmp_path, json.dumps([task]), 2)
    done = processes.run(program("world"), *arguments, folder=tmp_path, elsewhere=False)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = torch.load(tmp_path / f"{task}-{rank}.pt")["blocks"]
        assert_close(found["logits"], one["logits"])
        assert torch.equal(found["text"], one["text"])
        assert_gradients_close(found["gradients"], one["gradients"])
        for name in ("self_attn.gate_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
            weight = f"model.layers.0.{name}.weight"
            assert 2 * found["local_sizes"][weight] == one["gradients"][weight].numel()


@pytest.mark.parametrize("axis", ALL)
def test_an_official_layout_has_no_place_for_a_block(tmp_path, axis):
    register_all()
    config = blockformer.preset("gpt2", **SIZES, **{axis: ALL[axis]})
    blockformer.BlockformerDecoderForCausalLM(config).save_pretrained(tmp_path / "repo")
    with pytest.raises(ConversionError, match=f"{axis} must be .*, not '{ALL[axis]}'"):
        convert(tmp_path / "repo", tmp_path / "official", to_official=True)


def test_shapes_that_a_block_does_not_have_are_refused():
    model = model_of()
    with pytest.raises(ValueError, match=r"does not read pruned_heads=.*: leave pruned_heads out"):
        blockformer.prune_heads(model, {0: [1]})
    with pytest.raises(ValueError, match=r"a block from outside \(mlp_type='squared_relu'\): leave experts out"):
        blockformer.reshape(model, experts=2)
    assert blockformer.reshape(model, topology="encoder").config.blocks == model.config.blocks


def test_a_block_is_asked_for_before_any_is_registered():
    none = r"attention_type must be one of the blocks that are registered \(there are none\)"
    with pytest.raises(ValueError, match=none):
        blockformer.preset("gpt2", attention_type="differential")
    with pytest.raises(ValueError, match="mlp_type must be one of scaled, not 'squared_relu'"):
        blockformer.preset("gpt2", mlp_type="squared_relu")


def test_a_model_keeps_its_blocks_when_it_is_reshaped():
    model = model_of(dynamic_tanh_alpha=0.7)
    small = blockformer.reshape(model, layers=[1])
    assert small.config.dynamic_tanh_alpha == 0.7
    assert small.config.blocks == model.config.blocks
    assert torch.equal(small.model.layers[0].mlp_pre_norm.alpha, model.model.layers[1].mlp_pre_norm.alpha)


# Where neither the package nor the files are.

AUTO = {"gpt2": "AutoModelForCausalLM", "bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}


def code_of(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.py")}


@pytest.mark.versions
@pytest.mark.parametrize("name", MODELS)
def test_a_repo_loads_where_neither_the_package_nor_the_block_is(tmp_path, fresh, name):
    model = model_of(name)
    inputs = inputs_of(model)
    with torch.no_grad():
        wanted = {"logits": model(**inputs).logits}
    if model.can_generate():
        wanted["ids"] = model.generate(inputs["input_ids"], max_new_tokens=6, do_sample=False)
    blockformer.export_model(model, tmp_path / "repo")
    job = json.dumps({name: value.tolist() for name, value in inputs.items()})
    program_ = program("remote_blocks")
    found = json.loads(fresh(program_, tmp_path / "repo", tmp_path / "again", AUTO[name], job, folder=tmp_path))
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(torch.tensor(found[key]), value, rtol=1e-5, atol=1e-5)
    code = code_of(tmp_path / "repo")
    assert {*(file.name for file in FILES), "with_blocks.py"} <= code.keys()
    for folder in ("again", "again-config"):
        assert code_of(tmp_path / folder) == code
        entries = [json.loads((tmp_path / place / "config.json").read_text()) for place in ("repo", folder)]
        assert entries[0]["auto_map"] == entries[1]["auto_map"]
        assert entries[0]["blocks"] == entries[1]["blocks"]


def test_a_block_that_was_changed_in_a_repo_runs_for_nobody_who_does_not_trust_it(tmp_path, fresh):
    blockformer.export_model(model_of(), tmp_path / "repo")
    planted = tmp_path / "PLANTED"
    path = tmp_path / "repo" / NORM.name
    path.write_text(f"open({str(planted)!r}, 'w').close()\n" + path.read_text())
    assert fresh(program("remote_code_refused"), tmp_path / "repo", planted, folder=tmp_path).endswith("refused")


def test_every_way_to_write_a_repo_writes_the_same_code(tmp_path):
    model = model_of()
    model.save_pretrained(tmp_path / "plain")
    blockformer.export_model(model, tmp_path / "export")
    model.config.save_pretrained(tmp_path / "config")
    export_folder(tmp_path / "plain", tmp_path / "exported")
    convert_shape(tmp_path / "plain", tmp_path / "reshaped", layers=[0])
    wanted = code_of(tmp_path / "plain")
    assert {*(file.name for file in FILES), "with_blocks.py"} <= wanted.keys()
    for folder in tmp_path.iterdir():
        assert code_of(folder) == wanted, folder
    card = (tmp_path / "export/README.md").read_text()
    assert f"**`{NORM.name}` is its author's, not Blockformer's**: read it before you load the repo." in card


# What `verify` says.


def test_verify_names_the_file_to_read(tmp_path):
    digest = hashlib.sha256(NORM.read_bytes()).hexdigest()
    with forgotten_after():
        blockformer.export_model(model_of(), tmp_path / "repo")
    found = blockformer.verify(tmp_path / "repo")
    assert found.problems == {}
    assert found.to_read == [file.name for file in FILES]
    assert found.blocks[NORM.name] == digest
    assert not found.is_ok
    assert any("weights are not compared" in note for note in found.notes)
    register_all()
    found = blockformer.verify(tmp_path / "repo")
    assert found.is_ok
    assert not found.notes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda repo: (repo / NORM.name).unlink(), "dynamic_tanh.py is missing"),
        (
            lambda repo: (repo / NORM.name).write_text("import os\n"),
            "dynamic_tanh.py is not the block that config.json",
        ),
        (lambda repo: (repo / "with_blocks.py").unlink(), "with_blocks.py is missing"),
        (
            lambda repo: (repo / "with_blocks.py").write_text((repo / "with_blocks.py").read_text() + "import os\n"),
            "with_blocks.py is not as Blockformer writes it",
        ),
        (lambda repo: (repo / "layer.py").write_text("import os\n"), "layer.py differs from release"),
        (lambda repo: (repo / "more.py").write_text("import os\n"), "'more.py' is not code of Blockformer"),
        (lambda repo: entries_with(repo, blocks={"layer.py": "0" * 64}), "blocks must name files of its author's"),
        (lambda repo: entries_with(repo, blocks={"../x.py": "0" * 64}), "blocks must name files of its author's"),
        (lambda repo: entries_with(repo, blocks=["x.py"]), "blocks must name files of its author's"),
        (lambda repo: entries_with(repo, auto_map={"AutoConfig": "dynamic_tanh.X"}), "auto_map names 'dynamic_tanh.X'"),
        (lambda repo: entries_with(repo, blocks=None), "auto_map names 'with_blocks."),
    ],
)
def test_verify_finds_what_is_not_as_it_was_written(tmp_path, change, message):
    blockformer.export_model(model_of(), tmp_path / "repo")
    change(tmp_path / "repo")
    found = blockformer.verify(tmp_path / "repo")
    assert message in " ".join(problem for problems in found.problems.values() for problem in problems)


def entries_with(repo, **changes):
    path = repo / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_upgrade_keeps_the_blocks(tmp_path):
    blockformer.export_model(model_of(), tmp_path / "repo")
    before = code_of(tmp_path / "repo")
    assert blockformer.upgrade(tmp_path / "repo").is_ok
    assert code_of(tmp_path / "repo") == before


def test_upgrade_undoes_no_edit_of_a_block(tmp_path):
    repo = tmp_path / "repo"
    blockformer.export_model(model_of(), repo)
    path = repo / NETWORK.name
    path.write_text(path.read_text() + "# Edited.\n")
    before = code_of(repo)
    with pytest.raises(ConversionError, match=r"squared_relu\.py is not as it is registered, .*; move it away first"):
        blockformer.upgrade(repo)
    assert code_of(repo) == before
    path.unlink()
    blockformer.upgrade(repo)
    assert path.read_bytes() == NETWORK.read_bytes()


def test_the_command_line_registers_blocks_first(tmp_path, capsys):
    with forgotten_after():
        blockformer.export_model(model_of(), tmp_path / "repo")
    with pytest.raises(SystemExit) as end:
        main(["verify", str(tmp_path / "repo")])
    said = capsys.readouterr().out
    assert end.value.code == 1
    assert f"to read   {NORM.name}, SHA-256 {hashlib.sha256(NORM.read_bytes()).hexdigest()}" in said
    assert f"all as in release 0.1.0; {', '.join(sorted(file.name for file in FILES))}: of the repo's author" in said
    assert "names and shapes match" not in said
    assert said.count("not compared (see the note below)") == 2
    with pytest.raises(SystemExit) as end:
        main([*(part for file in FILES for part in ("--block", str(file))), "verify", str(tmp_path / "repo")])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert "to read" not in said
    assert "names and shapes match the config" in said
    with pytest.raises(SystemExit) as end:
        main(["--block", str(tmp_path / "none.py"), "verify", str(tmp_path / "repo")])
    assert end.value.code == 1
    assert "none.py: no such file" in capsys.readouterr().err


# What is shown of a model.


def test_a_residual_is_a_box_around_the_whole_layer():
    model = model_of("t5")
    parts = anatomy(model)
    found = [(box.path, box.title, box.code) for box in parts.boxes() if box.kind == "residual"]
    paths = ("model.encoder.layers.0", "model.decoder.layers.0")
    assert found == [(path, "Rezero", "rezero.py · ReZeroLayer") for path in paths]
    assert [stack.kinds[0].title for stack in parts.stacks] == ["", ""]
    drawn = figure(parts, marks=paths[:1])
    assert all(f'data-path="{path}"' in drawn for path in paths)
    assert drawn.count("\N{NOT EQUAL TO}") == 1
    covered = tuple(f"{box.path}." for box in parts.boxes())
    alphas = [name for name, _ in model.named_parameters() if "_alpha" in name and ".layers.0." in name]
    assert len(alphas) == 5
    assert all(name.startswith(covered) for name in alphas)
    box = next(box for box in parts.boxes() if box.kind == "residual")
    assert fields_of(box, model.config)["residual"] == "rezero"


def test_the_page_and_the_summary_call_a_block_by_its_name(tmp_path):
    model_of(dynamic_tanh_alpha=0.7).save_pretrained(tmp_path)
    html = page_of(str(tmp_path))
    assert "Dynamic tanh" in html
    assert "Layer norm" not in html
    assert "dynamic_tanh.py · DynamicTanh" in html
    assert "squared_relu.py · SquaredReLU" in html
    assert "squared relu" in html
    assert "gated attention" in html
    assert "dynamic_tanh_alpha" in html
    assert "rezero.py · ReZeroLayer" in html
    assert summarize(tmp_path).settings["norm"]["dynamic_tanh_alpha"] == 0.7
