"""Weights of 8 bits in blocks, in families other than DeepSeek's: the same format everywhere."""

import json

import pytest
import torch
import transformers
from pairs import assert_close
from safetensors.torch import load_file
from sizes import OFFICIAL_DECODER

from blockformer.conversion import ConversionError, convert, from_official
from blockformer.conversion.families.registry import FAMILIES
from blockformer.doctor.diagnosing import diagnose
from blockformer.summary import summarize

from .oracles import assert_verified, edit_config, edit_tensors, entries_of
from .rows import Row, model_of
from .test_deepseek import FP8, factors_of

MINIMAX = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES_OF_8_BITS = {
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 136},
    "minimax_m2": MINIMAX,
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
    "llama": {},
    "phi3": {"pad_token_id": 0},
}
"""What each needs beyond the usual sizes; one has matrices of more than one block."""


def quantized(folder, name, factor=torch.float32, stays=("lm_head", "model.layers.0.self_attn.o_proj"), **settings):
    """An official checkpoint with its linear maps in 8 bits, except for some; gives the weights they stand for."""
    if name not in FAMILIES:
        pytest.skip(f"this transformers has no {name}")
    model = model_of(Row(name, {**FAMILIES_OF_8_BITS[name], **settings}), OFFICIAL_DECODER).bfloat16()
    model.save_pretrained(folder)
    return in_8_bits(folder, factor, stays)


def in_8_bits(folder, factor=torch.float32, stays=("lm_head",), block=(128, 128)):
    """The same of a checkpoint in bfloat16."""
    generator, plain, changes = torch.Generator().manual_seed(0), {}, {}
    for key, weight in load_file(folder / "model.safetensors").items():
        plain[key] = weight
        is_linear = weight.dim() == 2 and "embed" not in key and ".gate.weight" not in key
        if is_linear and not key.startswith(stays):
            blocks = [-(-size // length) for size, length in zip(weight.shape, block, strict=True)]
            scales = (torch.rand(blocks, generator=generator) * 0.002 + 0.001).to(factor)
            factors = factors_of(scales.float(), weight, block)
            low = (weight.float() / factors).clamp(-448, 448).to(torch.float8_e4m3fn)
            plain[key] = (low.float() * factors).bfloat16()
            changes |= {key: low, f"{key}_scale_inv": scales}
    edit_tensors(folder, **changes)
    told = {**FP8, "weight_block_size": list(block), "modules_to_not_convert": list(stays)}
    edit_config(folder, quantization_config=told, dtype="bfloat16")
    return plain


@pytest.mark.parametrize("name", FAMILIES_OF_8_BITS)
def test_every_decoder_takes_them(tmp_path, name):
    factor = torch.bfloat16 if name.startswith("qwen3") else torch.float32
    plain = quantized(tmp_path / "src", name, factor)
    report = convert(tmp_path / "src", tmp_path / "repo")
    assert_verified(report)
    assert any("FP8 weights have become bfloat16; the way back writes bfloat16" in note for note in report.notes)
    convert(tmp_path / "repo", tmp_path / "back", to_official=True, verify="quick")
    assert "quantization_config" not in entries_of(tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == plain.keys()
    assert all(torch.equal(back[key], weight) for key, weight in plain.items())
    summary = summarize(tmp_path / "src")
    assert any("stored in FP8" in note for note in summary.notes)
    assert summary.parameters == summarize(tmp_path / "repo").parameters


def test_they_are_what_transformers_makes_of_them(tmp_path):
    quantized(tmp_path / "src", "qwen3", torch.bfloat16)
    theirs = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "src", dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="FP8 weights have become bfloat16"):
        ours = from_official(tmp_path / "src")
    with torch.no_grad():
        ids = torch.arange(5, 25)[None]
        assert_close(ours.float()(ids).logits, theirs.float()(ids).logits)


def with_one_factor(folder, scale=torch.bfloat16):
    """Matrices with one factor each, and one for their inputs, as Devstral 2 is published."""
    model = model_of(Row("llama"), OFFICIAL_DECODER).bfloat16()
    model.save_pretrained(folder)
    changes = {}
    for key, weight in load_file(folder / "model.safetensors").items():
        if key.endswith("_proj.weight"):
            factor = (weight.float().abs().max() / 448).to(scale)
            changes[key] = (weight.float() / factor.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
            changes[f"{key}_scale_inv"] = factor
            changes[key.replace(".weight", ".activation_scale")] = torch.tensor(0.5, dtype=scale)
    edit_tensors(folder, **changes)
    told = {"activation_scheme": "static", "quant_method": "fp8", "weight_block_size": None, "dequantize": False}
    edit_config(folder, quantization_config={**told, "modules_to_not_convert": ["lm_head"]}, dtype="bfloat16")


def powers_of_two(folder, factor=torch.float32):
    """Factors that are powers of two, as DeepSeek-V3.1 has them in float32; `factor` is what they are stored in."""
    quantized(folder, "qwen3")
    scales = {key: each for key, each in load_file(folder / "model.safetensors").items() if key.endswith("_scale_inv")}
    edit_tensors(folder, **{key: each.log2().round().exp2().to(factor) for key, each in scales.items()})
    told = {**entries_of(folder)["quantization_config"], "scale_fmt": "ue8m0", "ignored_layers": ["lm_head"]}
    edit_config(folder, quantization_config=told)


def powers_without_numbers(folder):
    """The same in one byte, where this torch has it."""
    powers_of_two(folder, getattr(torch, "float8_e8m0fnu", torch.float32))


def other_blocks(folder):
    """Factors for blocks of 16 rows and 8 columns."""
    model_of(Row("qwen3"), OFFICIAL_DECODER).bfloat16().save_pretrained(folder)
    in_8_bits(folder, block=(16, 8))


@pytest.mark.parametrize("make", [with_one_factor, powers_of_two, powers_without_numbers, other_blocks])
def test_other_factors_that_transformers_reads(tmp_path, make):
    src = tmp_path / "src"
    make(src)
    settings = {**entries_of(src)["quantization_config"], "dequantize": True}
    settings = {name: value for name, value in settings.items() if name not in ("quant_method", "fmt")}
    told = transformers.FineGrainedFP8Config(**settings)
    loading = {"quantization_config": told, "dtype": torch.bfloat16}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(src, **loading)
    assert_verified(convert(src, tmp_path / "repo"))
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "repo")
    with torch.no_grad():
        ids = torch.arange(5, 25)[None]
        assert_close(ours.float()(ids).logits, theirs.float()(ids).logits)


def compressed(folder, strategy, block=(128, 128), **of_weights):
    """A checkpoint as compressed-tensors 0.20 writes it; gives the weights that it stands for."""
    quantized(folder, "qwen3")
    plain, tensors = {}, {}
    for key, weight in load_file(folder / "model.safetensors").items():
        if key.endswith("_scale_inv"):
            continue
        plain[key] = tensors[key] = weight
        if weight.dtype is torch.float8_e4m3fn:
            blocks = [-(-size // length) for size, length in zip(weight.shape, block, strict=True)]
            sizes = {"tensor": [1], "channel": [len(weight), 1], "block": blocks}
            factors = (torch.rand(sizes[strategy]) * 0.002 + 0.001).bfloat16()
            spread = factors_of(factors.float(), weight, block) if strategy == "block" else factors.float()
            plain[key] = (weight.float() * spread).bfloat16()
            tensors[f"{key}_scale"] = factors
            if strategy == "tensor":
                tensors[key.replace(".weight", ".input_scale")] = torch.ones(1).bfloat16()
    edit_tensors(folder, lambda _: tensors)
    weights = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": False,
        "group_size": None,
    }
    weights |= {"block_structure": list(block) if strategy == "block" else None, **of_weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    told = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "sparsity_config": {}}
    told |= {"format": "naive-quantized" if strategy == "block" else "float-quantized", "ignore": ["lm_head"]}
    edit_config(folder, quantization_config={**told, "config_groups": {"group_0": group}, "kv_cache_scheme": None})
    return plain


@pytest.mark.parametrize(
    ("strategy", "block"),
    [("tensor", (128, 128)), ("channel", (128, 128)), ("block", (128, 128)), ("block", (16, 24))],
)
def test_those_of_compressed_tensors(tmp_path, strategy, block):
    plain = compressed(tmp_path / "src", strategy, block)
    report = convert(tmp_path / "src", tmp_path / "repo")
    assert_verified(report)
    assert any("FP8 weights have become bfloat16" in note for note in report.notes)
    convert(tmp_path / "repo", tmp_path / "back", to_official=True)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == plain.keys()
    assert all(torch.equal(back[key], weight) for key, weight in plain.items())


def test_other_weights_of_compressed_tensors_are_refused(tmp_path):
    compressed(tmp_path / "src", "channel", num_bits=4)
    with pytest.raises(ConversionError, match=r"(?s)weights of this kind cannot be converted.*num_bits is 4, not 8"):
        convert(tmp_path / "src", tmp_path / "repo")
    told = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    edit_config(tmp_path / "src", quantization_config=told)
    with pytest.raises(ConversionError, match="compressed-tensors"):
        convert(tmp_path / "src", tmp_path / "repo")


def by_modelopt(folder, in_rows, is_aside):
    """A checkpoint as ModelOpt 0.47 writes it; gives the weights that it stands for."""
    quantized(folder, "llama")
    plain, tensors = {}, {}
    for key, weight in load_file(folder / "model.safetensors").items():
        if key.endswith("_scale_inv"):
            continue
        plain[key] = tensors[key] = weight
        if weight.dtype is torch.float8_e4m3fn:
            factors = torch.rand([len(weight)] if in_rows else []) * 0.002 + 0.001
            plain[key] = (weight.float() * (factors[:, None] if in_rows else factors)).bfloat16()
            tensors |= {f"{key}_scale": factors, key.replace(".weight", ".input_scale"): torch.ones([])}
        if key.endswith(("k_proj.weight", "v_proj.weight")):
            tensors[key.replace("weight", f"{key.split('.')[-2][0]}_scale")] = torch.ones([])
    edit_tensors(folder, lambda _: tensors)
    algorithm = "FP8_PER_CHANNEL_PER_TOKEN" if in_rows else "FP8"
    aside = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    write(folder, {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": aside})
    eight = {"dynamic": False, "num_bits": 8, "type": "float"}
    group = {"input_activations": eight, "weights": eight, "targets": ["Linear"]}
    told = {"config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": eight}
    told |= {"quant_algo": algorithm, "producer": {"name": "modelopt"}, "quant_method": "modelopt"}
    edit_config(folder, quantization_config=... if is_aside else told)
    return plain


def write(folder, settings):
    (folder / "hf_quant_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("is_aside", [False, True], ids=["in config.json", "in a file next to it"])
@pytest.mark.parametrize("in_rows", [False, True], ids=["one factor", "rows"])
def test_those_of_modelopt(tmp_path, in_rows, is_aside):
    src, repo, back = (tmp_path / name for name in ("src", "repo", "back"))
    plain = by_modelopt(src, in_rows, is_aside)
    report = convert(src, repo)
    assert_verified(report)
    assert any("FP8 weights have become bfloat16" in note for note in report.notes)
    assert any("round inputs of linear layers and cached keys and values" in note for note in report.notes)
    convert(repo, back, to_official=True)
    found = load_file(back / "model.safetensors")
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[key], weight) for key, weight in plain.items())
    assert not (back / "hf_quant_config.json").exists()
    assert any("stored in FP8" in note for note in summarize(src).notes)
    assert diagnose(src, quick=True).status == 0
    with pytest.warns(UserWarning, match="have become bfloat16|here they stay as they are"):
        from_official(src)


def test_what_modelopt_says_of_other_weights(tmp_path):
    src = tmp_path / "src"
    by_modelopt(src, in_rows=False, is_aside=True)
    write(src, {"quantization": {"quant_algo": "NVFP4", "group_size": 16}})
    for door in (lambda: convert(src, tmp_path / "repo"), lambda: from_official(src), lambda: summarize(src)):
        with pytest.raises(ConversionError, match=r"(?s)quant_algo is 'NVFP4', not .*Convert the plain weights"):
            door()
    assert diagnose(src, quick=True).status == 3
    model_of(Row("llama"), OFFICIAL_DECODER).save_pretrained(tmp_path / "plain")  # left from the weights before
    write(tmp_path / "plain", {"quantization": {"quant_algo": "FP8"}})
    assert_verified(convert(tmp_path / "plain", tmp_path / "repo"))
    assert diagnose(tmp_path / "plain", quick=True).status == 0


def test_blocks_that_do_not_fill_a_matrix(tmp_path):
    """transformers refuses these."""
    model_of(Row("qwen3"), OFFICIAL_DECODER).bfloat16().save_pretrained(tmp_path / "src")
    plain = in_8_bits(tmp_path / "src", block=(24, 20))
    assert_verified(convert(tmp_path / "src", tmp_path / "repo"))
    convert(tmp_path / "repo", tmp_path / "back", to_official=True)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[key], weight) for key, weight in plain.items())
    for size in ([128], [0, 128], "128", {"rows": 128}):
        edit_config(tmp_path / "src", quantization_config={**FP8, "weight_block_size": size})
        with pytest.raises(ConversionError, match=r"weight_block_size is .*, not two positive integers"):
            convert(tmp_path / "src", tmp_path / "other")


def test_layers_after_the_last_are_left_out(tmp_path):
    quantized(tmp_path / "src", "glm4_moe", num_nextn_predict_layers=1)
    extra = {"model.layers.2.eh_proj.weight": torch.randn(32, 64).to(torch.float8_e4m3fn)}
    edit_tensors(tmp_path / "src", **extra, **{"model.layers.2.eh_proj.weight_scale_inv": torch.rand(1, 1)})
    edit_config(tmp_path / "src", num_nextn_predict_layers=1)
    report = convert(tmp_path / "src", tmp_path / "repo", verify=False)
    assert any("predict further tokens" in note and "left out" in note for note in report.notes)
    convert(tmp_path / "repo", tmp_path / "back", to_official=True, verify=False)
    assert entries_of(tmp_path / "back")["num_nextn_predict_layers"] == 0


def test_what_does_not_fit_together_is_named(tmp_path):
    src = tmp_path / "src"
    quantized(src, "qwen3")
    name = "model.layers.1.mlp.up_proj.weight"
    told = entries_of(src)["quantization_config"]
    edit_config(src, quantization_config=None)
    with pytest.raises(ConversionError, match=r"quantized by FP8 in blocks .*put quantization_config back"):
        convert(src, tmp_path / "dst")
    edit_config(src, quantization_config=told)
    edit_tensors(src, **{f"{name}_scale_inv": torch.rand(2, 2)})
    with pytest.raises(ConversionError, match=rf"(?s)FP8 weights that cannot be converted.*{name}.*factors \[2, 2\]"):
        convert(src, tmp_path / "dst")
    edit_tensors(src, **{f"{name}_scale_inv": torch.ones(1, 1, dtype=torch.int32)})
    with pytest.raises(ConversionError, match=rf"(?s)FP8 weights that cannot be converted.*{name}.*torch.int32"):
        convert(src, tmp_path / "dst")
    edit_tensors(src, **{f"{name}_scale_inv": None})
    with pytest.raises(ConversionError, match=rf"(?s)parts that are missing.*{name}_scale_inv"):
        convert(src, tmp_path / "dst")
    model_of(Row("qwen3"), OFFICIAL_DECODER).save_pretrained(tmp_path / "plain")
    edit_config(tmp_path / "plain", quantization_config=told)
    with pytest.raises(ConversionError, match="by 'fp8', but all weights are plain"):
        convert(tmp_path / "plain", tmp_path / "dst")
