"""Low-bit weights made by the libraries that make them: torchao, bitsandbytes and optimum-quanto, on the CPU.

The oracle is transformers' own Qwen3 with the same weights, quantized by the same library. Each library's tests are
skipped where it is absent: `pip install '.[quantization]'`.
"""

import copy
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from example_files import EXAMPLES
from fork_server import program
from packed_layers import can_pack
from pairs import assert_close, pair, token_ids, train
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig, Qwen3ForCausalLM, TorchAoConfig

import blockformer
from blockformer.demo.elsewhere import run_elsewhere
from blockformer.engine import choices, packed
from blockformer.engine import linear as quick_linear
from blockformer.engine.packed import PackedLinear

# Multiples of 32 rows and of 64 columns, as bitsandbytes' 4-bit product for AVX-512 wants them.
WEAK_LAYERS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "initializer_range": 0.08}


def torchao_int8():
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def torchao_int4():
    from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig

    return TorchAoConfig(PrototypeInt4WeightOnlyConfig(group_size=32))


def torchao_int4_unpacked():
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup

    return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))


def bitsandbytes_int8():
    return BitsAndBytesConfig(load_in_8bit=True)


def bitsandbytes_nf4():
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


def quanto_int8():
    return QuantoConfig(weights="int8")


def quanto_int4():
    return QuantoConfig(weights="int4")


@dataclass(frozen=True)
class Method:
    """One way to make low-bit weights.

    Attributes:
        make: its config of transformers.
        package: what it imports.
        error: the most that it may change logits, relative to their norm, on the model of these tests.
        saves: whether what it makes can be saved.
        learns: whether gradients pass through it.
    """

    make: object
    package: str
    error: float
    saves: bool = True
    learns: bool = True


METHODS = {
    "torchao-int8": Method(torchao_int8, "torchao", 0.05),
    "torchao-int4": Method(torchao_int4, "torchao", 0.4, saves=False, learns=False),
    "torchao-int4-unpacked": Method(torchao_int4_unpacked, "torchao", 0.4),
    "bitsandbytes-int8": Method(bitsandbytes_int8, "bitsandbytes", 0.05),
    "bitsandbytes-nf4": Method(bitsandbytes_nf4, "bitsandbytes", 0.4),
    "quanto-int8": Method(quanto_int8, "optimum.quanto", 0.05, saves=False),
    "quanto-int4": Method(quanto_int4, "optimum.quanto", 0.4, saves=False),
}
IDS = token_ids(2, 9)


@dataclass
class Saved:
    """Ours and transformers' Qwen3 of the same weights, the head tied, and the folders that they are saved in."""

    ours: nn.Module
    folder: Path
    official_folder: Path


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    ours, theirs = pair(tie_word_embeddings=True, **WEAK_LAYERS)
    places = [tmp_path_factory.mktemp(name) for name in ("ours", "official")]
    for a_model, place in zip((ours, theirs), places, strict=True):
        a_model.save_pretrained(place)
    return Saved(ours, *places)


@pytest.fixture(params=METHODS)
def method(request):
    chosen = METHODS[request.param]
    pytest.importorskip(chosen.package, reason=f"{chosen.package} is not installed")
    return chosen


def load(folder, chosen=None, dtype=torch.float32, **settings):
    if chosen is not None:
        settings["quantization_config"] = chosen.make()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map="cpu", **settings).eval()


@torch.no_grad()
def logits_of(a_model, ids=IDS):
    return a_model(ids).logits


def greedy(a_model):
    return a_model.generate(IDS, max_new_tokens=8, do_sample=False)


@pytest.mark.parametrize("bits", [2, 4])
def test_a_cache_that_quanto_quantizes_gives_the_text_of_transformers(bits):
    """`test_caches.py` has the same with a stand-in, without the package."""
    pytest.importorskip("optimum.quanto", reason="optimum.quanto is not installed")
    few = {"backend": "quanto", "nbits": bits, "residual_length": 4, "q_group_size": 32}
    settings = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    cached = settings | {"cache_implementation": "quantized", "cache_config": few}
    ours, theirs = pair()
    written = ours.generate(IDS, **cached)
    assert torch.equal(written, theirs.generate(IDS, **cached))
    assert not torch.equal(written, ours.generate(IDS, **settings)), "so few bits that the text is another one"


def is_plain(module):
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter


def linears(a_model):
    """The modules of the layers that stand where a plain model has linear layers, by name."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    return {name: module for name, module in a_model.named_modules() if name.rpartition(".")[2] in names}


def test_logits_and_text_are_those_of_transformers_with_the_same_library(saved, method):
    ours, theirs = load(saved.folder, method), load(saved.official_folder, method)
    assert type(theirs) is Qwen3ForCausalLM
    logits, plain = logits_of(ours), logits_of(saved.ours)
    assert_close(logits, logits_of(theirs))
    assert torch.equal(greedy(ours), greedy(theirs))
    assert 1e-4 < (logits - plain).norm() / plain.norm() < method.error


def test_every_linear_of_the_layers_and_nothing_else_is_quantized(saved, method):
    quantized = load(saved.folder, method)
    found = linears(quantized)
    assert len(found) == 14
    assert not any(is_plain(module) for module in found.values())
    assert is_plain(quantized.lm_head)
    assert quantized.lm_head.weight is quantized.model.embed_tokens.weight
    plain = dict(saved.ours.named_parameters())
    others = {name: weight for name, weight in quantized.named_parameters() if name.rpartition(".")[0] not in found}
    assert others.keys() == {name for name in plain if name.rpartition(".")[0] not in found}
    assert all(torch.equal(weight, plain[name]) for name, weight in others.items())


def test_saved_and_loaded_again(saved, method, tmp_path):
    quantized = load(saved.folder, method)
    if not method.saves:
        with pytest.raises(ValueError, match=r"not serializable|Unsupported tensor"):
            quantized.save_pretrained(tmp_path)
        return
    quantized.save_pretrained(tmp_path)  # before the first forward pass, after which bitsandbytes saves another layout
    again = load(tmp_path)
    assert torch.equal(logits_of(again), logits_of(quantized))
    assert torch.equal(greedy(again), greedy(quantized))
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert not any(is_plain(module) for module in linears(again).values())
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (tmp_path, saved.folder)]
    assert sizes[0] < 0.6 * sizes[1]


def test_a_checkpoint_that_lacks_a_weight_is_refused(saved, method, tmp_path):
    shutil.copytree(saved.folder, tmp_path / "partial")
    path = tmp_path / "partial/model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing[\s\S]*layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path / "partial", method)


def test_adapters_learn_on_top(saved, method, tmp_path):
    peft = pytest.importorskip("peft")
    if not method.learns:
        pytest.skip("its product has no derivative")
    torch.manual_seed(1)
    adapted = peft.get_peft_model(load(saved.folder, method), peft.LoraConfig(target_modules="all-linear"))
    trained = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    assert len(trained) == 2 * 14
    assert all(".lora_" in name for name in trained)
    losses = train(adapted, IDS, steps=3, rate=0.1)
    assert losses[2] < losses[1] < losses[0]
    adapted.eval().save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(load(saved.folder, method), tmp_path).eval()
    assert torch.equal(logits_of(again), logits_of(adapted))
    assert not torch.equal(logits_of(again), logits_of(load(saved.folder, method)))


def test_the_quicker_product_of_float32_is_for_the_head_alone(saved, method, monkeypatch):
    seen = []

    def spy(states, weight, bias=None):
        seen.append(weight)
        return nn.functional.linear(states, weight, bias)

    monkeypatch.setattr(choices, "FASTER_HERE", {(choices.ONEDNN, torch.float32): True})
    monkeypatch.setattr(quick_linear, "_LEAST_WORK", 0)
    monkeypatch.setattr(quick_linear, "by_onednn", spy)
    quantized = load(saved.folder, method).prepare_for_inference()
    expected = logits_of(quantized)
    assert [weight is quantized.lm_head.weight for weight in seen] == [True]
    monkeypatch.setenv("BLOCKFORMER_FAST", "0")
    assert_close(logits_of(quantized), expected)


def test_preparing_for_inference_packs_an_untied_head_alone(method, monkeypatch, tmp_path):
    if not can_pack(torch.bfloat16):
        pytest.skip("this PyTorch has no packed bfloat16 product here")
    monkeypatch.setattr(choices, "FASTER_HERE", {(choices.PACKED, torch.bfloat16): True})
    monkeypatch.setattr(packed, "_LEAST_WEIGHTS", {torch.bfloat16: 0})
    pair(tie_word_embeddings=False, **WEAK_LAYERS)[0].save_pretrained(tmp_path / "untied")
    quantized = load(tmp_path / "untied", method, torch.bfloat16)
    before, expected = linears(quantized), logits_of(quantized)
    quantized.prepare_for_inference()
    assert linears(quantized) == before
    assert [name for name, part in quantized.named_modules() if isinstance(part, PackedLinear)] == ["lm_head"]
    assert_close(logits_of(quantized), expected, 0.02)
    assert greedy(quantized).shape == (2, 17)
    if method.saves and method.package == "torchao":
        quantized.save_pretrained(tmp_path / "packed")
        assert torch.equal(logits_of(load(tmp_path / "packed", dtype=torch.bfloat16)), expected)
    quantized.prepare_for_training()
    assert torch.equal(logits_of(quantized), expected)


# BERT: six a layer, the head's transform; T5: seven a layer of the encoder, eleven of the decoder.
@pytest.mark.parametrize(("name", "linear_count"), [("bert", 2 * 6 + 1), ("t5-v1.1", 2 * 7 + 2 * 11)])
def test_other_topologies_give_what_their_dequantized_weights_give(name, linear_count, tmp_path):
    pytest.importorskip("torchao", reason="torchao is not installed")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = blockformer.preset(name, vocab_size=97, initializer_range=0.1, **sizes)
    kind = "EncoderDecoderForConditionalGeneration" if config.is_encoder_decoder else "EncoderForMaskedLM"
    plain = getattr(blockformer, f"Blockformer{kind}")(config).eval()
    plain.save_pretrained(tmp_path)
    quantized = type(plain).from_pretrained(tmp_path, quantization_config=torchao_int8(), device_map="cpu").eval()
    inputs = {"input_ids": token_ids(2, 9, vocab=97)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    before, count = plain(**inputs).logits, 0
    with torch.no_grad():
        for path, module in quantized.named_modules():
            if isinstance(module, nn.Linear) and not is_plain(module):
                plain.get_submodule(path).weight.copy_(module.weight.dequantize())
                count += 1
    assert count == linear_count
    with torch.no_grad():
        logits = quantized(**inputs).logits
        # Weights times scale are summed here, sums times scale there.
        assert_close(logits, plain(**inputs).logits, tolerance=5e-5)
    assert not torch.allclose(logits, before, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torchao", "bitsandbytes"])
def test_an_exported_repo_is_quantized_and_saved_where_blockformer_is_not(saved, tmp_path, library):
    pytest.importorskip(library, reason=f"{library} is not installed")
    blockformer.export_model(copy.deepcopy(saved.ours), tmp_path / "repo")
    found = run_elsewhere(
        program("remote_quantized"), tmp_path / "repo", tmp_path / "again", library, json.dumps(IDS.tolist())
    )
    assert_close(torch.tensor(found), logits_of(load(saved.folder, METHODS[f"{library}-int8"])))
    assert (tmp_path / "again/modeling_decoder.py").exists()


@pytest.mark.slow
def test_the_block_of_the_page_runs(saved, tmp_path, monkeypatch):
    """That of docs/quantization.md, with a small model under the name that the page converts."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    blockformer.export_model(saved.ours, tmp_path / "qwen3")
    monkeypatch.chdir(tmp_path)
    page = (EXAMPLES.parent / "docs" / "quantization.md").read_text(encoding="utf-8")
    (block,) = (body for body in re.findall(r"```python\n(.*?)```", page, re.S) if "TorchAoConfig" in body)
    names = {}
    exec(compile(block, "docs/quantization.md", "exec"), names)
    assert torch.equal(*(logits_of(names[name]) for name in ("model", "again")))


def test_the_comparison_of_the_example_runs(tmp_path):
    pytest.importorskip("torchao", reason="torchao is not installed")
    command = [sys.executable, EXAMPLES / "quantize.py", "--compare", "--tiny", "--rounds", "1"]
    command += ["--ways", "bfloat16", "torchao-int8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    for name in ("float32", "bfloat16", "torchao int8"):
        assert any(line.startswith(f"| {name} |") for line in rows), done.stdout
