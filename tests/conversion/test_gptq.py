"""GPTQ checkpoints: kept in 4 bits or made plain; the oracle is what each number means, by the layout's definition."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from sizes import OFFICIAL_DECODER

from blockformer.conversion import ConversionError, convert, from_official
from blockformer.doctor.diagnosing import diagnose
from blockformer.model.awq_linear import QuantizedLinear
from blockformer.summary import summarize

from .oracles import assert_verified, edit_config, edit_tensors, entries_of
from .rows import Row, model_of
from .test_compressed import assert_equal, plain_of

ENTRIES = {
    "bits": 4,
    "checkpoint_format": "gptq",
    "damp_percent": 0.01,
    "desc_act": False,
    "group_size": 16,
    "lm_head": False,
    "meta": {"quantizer": ["gptqmodel:7.7.0"]},
    "pack_dtype": "int32",
    "quant_method": "gptq",
    "sym": True,
}


def words(rows, bits):
    """Rows of numbers -> rows of words of 32 bits; the first number has the lowest bits."""
    wholes = [sum(int(number) << (bits * place) for place, number in enumerate(row)) for row in rows]
    count = len(rows[0]) * bits // 32
    split = [[(whole >> (32 * place)) & 0xFFFFFFFF for place in range(count)] for whole in wholes]
    return torch.tensor(split, dtype=torch.int64)


def packed(weight, bits, symmetric, ordered, first):
    """The tensors that stand for a weight [N, K] in groups of 16 inputs, and that weight."""
    most, inputs = 2**bits - 1, weight.shape[1]
    turn = torch.arange(inputs) if ordered else torch.randperm(inputs)
    groups = torch.empty(inputs, dtype=torch.int32)
    groups[turn] = torch.arange(inputs, dtype=torch.int32) // 16
    parts = weight.float()[:, turn].unflatten(1, (-1, 16))
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    low[0] = 0  # whose zero points are 0, and borrow from the next ones in the first layout
    if symmetric:
        low, high = -torch.maximum(-low, high), torch.maximum(-low, high)
    scales = ((high - low) / most).clamp(min=1e-3).half()
    zeros = torch.full_like(low, (most + 1) // 2) if symmetric else (-low / scales.float()).round().clamp(0, most)
    index = groups.long()
    numbers = (weight.float() / scales.float()[:, index] + zeros[:, index]).round().clamp(0, most)
    stored = words(zeros.t(), bits)
    if first:
        stored = (stored - sum(1 << shift for shift in range(0, 32, bits))) & 0xFFFFFFFF
    tensors = {"qweight": words(numbers, bits).t(), "qzeros": stored}
    tensors = {name: each.to(torch.int32) for name, each in tensors.items()} | {"scales": scales.t(), "g_idx": groups}
    meant = ((numbers - zeros[:, index]).double() * scales.double()[:, index]).half()
    return tensors, meant


def folder_of(folder, family="qwen3", *, bits=4, symmetric=True, ordered=True, first=True, biases=False, **settings):
    """An official checkpoint whose linear maps are such; gives the weights that it stands for."""
    settings = {"head_dim": 16, "intermediate_size": 64, "initializer_range": 0.25, **settings}
    model_of(Row(family, settings), OFFICIAL_DECODER).half().save_pretrained(folder)
    plain = {}

    def low(tensors):
        changed = {}
        for name, weight in tensors.items():
            plain[name] = changed[name] = weight
            if weight.dim() == 2 and name.endswith("_proj.weight"):
                stem = name.removesuffix("weight")
                parts, plain[name] = packed(changed.pop(name), bits, symmetric, ordered, first)
                changed |= {stem + part: each for part, each in parts.items()}
                if biases and f"{stem}bias" not in tensors:
                    changed[f"{stem}bias"] = torch.zeros(len(weight), dtype=torch.float16)
        return changed

    edit_tensors(folder, low)
    told = {**ENTRIES, "bits": bits, "sym": symmetric, "desc_act": not ordered}
    told["checkpoint_format"] = "gptq" if first else "gptq_v2"
    edit_config(folder, quantization_config=told, dtype="float16")
    return plain


@pytest.mark.parametrize("first", [True, False], ids=["first layout", "second layout"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_numbers_of_4_bits_stay(tmp_path, symmetric, first):
    plain = folder_of(tmp_path / "src", symmetric=symmetric, first=first)
    report = convert(tmp_path / "src", tmp_path / "repo")
    assert_verified(report)
    assert report.notes[0] == "the 4-bit weights stay, in AWQ's layout; the way back writes that layout"
    convert(tmp_path / "repo", tmp_path / "back", to_official=True)
    assert entries_of(tmp_path / "back")["quantization_config"]["quant_method"] == "awq"
    assert_equal(plain_of(tmp_path / "back", torch.float16), plain)
    with pytest.warns(UserWarning, match="4-bit weights stay"):
        model = from_official(tmp_path / "src")
    layers = {f"{name}.weight": each for name, each in model.named_modules() if isinstance(each, QuantizedLinear)}
    assert len(layers) == 14
    assert all(torch.equal(each.dequantized(torch.float16).t(), plain[name]) for name, each in layers.items())
    assert "QuantizedLinear" in summarize(tmp_path / "src").tree
    assert diagnose(tmp_path / "src", quick=True).status == 0


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {"ordered": False, "symmetric": False}),
        ("qwen3", {"bits": 8, "symmetric": False, "first": False}),
        ("qwen3", {"bits": 8, "ordered": False}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
        ("phi3", {"pad_token_id": 0}),
    ],
)
def test_others_become_plain(tmp_path, family, settings):
    """Groups in another order of the inputs, 8 bits, experts, and matrices that a family joins."""
    plain = folder_of(tmp_path / "src", family, **settings)
    report = convert(tmp_path / "src", tmp_path / "repo")
    assert_verified(report)
    assert "-bit weights have become plain; the way back writes plain ones too" in report.notes[0]
    convert(tmp_path / "repo", tmp_path / "back", to_official=True, verify="quick")
    assert "quantization_config" not in entries_of(tmp_path / "back")
    assert_equal(load_file(tmp_path / "back" / "model.safetensors"), plain)
    assert any("bits; conversion makes plain ones" in note for note in summarize(tmp_path / "src").notes)
    assert diagnose(tmp_path / "src", quick=True).status == 0


@pytest.mark.parametrize("dequantize", [None, "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_biases_of_zeros_where_a_layer_has_none(tmp_path, family, dequantize):
    """As AutoGPTQ writes them, for Qwen2.5 too, whose queries, keys and values have biases."""
    plain = folder_of(tmp_path / "src", family, biases=True)
    assert_verified(convert(tmp_path / "src", tmp_path / "repo", dequantize=dequantize))
    convert(tmp_path / "repo", tmp_path / "back", to_official=True)
    back = load_file(tmp_path / "back" / "model.safetensors")
    back = plain_of(tmp_path / "back", torch.float16) if dequantize is None else back
    assert_equal(back, plain)
    with pytest.warns(UserWarning, match="4-bit weights stay"):
        from_official(tmp_path / "src")
    edit_tensors(tmp_path / "src", lambda all_: {**all_, "model.layers.1.mlp.up_proj.bias": torch.ones(64).half()})
    with pytest.raises(ConversionError, match=r"no place for.*\n.*up_proj.bias"):
        convert(tmp_path / "src", tmp_path / "other", dequantize=dequantize)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A checkpoint that tests copy."""
    folder = tmp_path_factory.mktemp("gptq") / "src"
    folder_of(folder)
    return folder


@pytest.mark.parametrize("dequantize", [None, "bfloat16"])
@pytest.mark.parametrize(
    ("part", "change", "named"),
    [
        ("qweight", None, "up_proj"),
        ("qzeros", None, r"needs .*up_proj\.qzeros"),
        ("g_idx", None, r"needs .*up_proj\.g_idx"),
        ("g_idx", lambda t: t[:-1], "do not fit together"),
        ("g_idx", lambda t: t.float(), "float32, not torch.int32"),
        ("scales", lambda t: t[:, :-8], "do not fit together"),
        ("scales", lambda t: t.to(torch.int32), "int32, not torch.float16"),
        ("qzeros", lambda t: t[:, :-1], "do not fit together"),
        ("qweight", lambda t: t[:-1], "do not fit together"),
        ("qweight", lambda t: t.long(), "int64, not torch.int32"),
    ],
)
def test_what_does_not_fit_together_is_named(tmp_path, shared, part, change, named, dequantize):
    src, name = tmp_path / "src", f"model.layers.1.mlp.up_proj.{part}"
    shutil.copytree(shared, src)
    edit_tensors(src, lambda all_: {**all_, name: change(all_[name]) if change else None})
    with pytest.raises(ConversionError, match=named) as error:
        convert(src, tmp_path / "repo", dequantize=dequantize, verify=False)
    assert "layers.1.mlp.up_proj" in str(error.value)
    assert not (tmp_path / "repo").exists()


def test_groups_that_are_not_there_or_in_another_order(tmp_path, shared):
    src, name = tmp_path / "src", "model.layers.1.mlp.up_proj.g_idx"
    shutil.copytree(shared, src)
    edit_tensors(src, lambda all_: {**all_, name: all_[name].flip(0)})
    with pytest.raises(ConversionError, match=r"up_proj.weight': its groups are not of neighbouring inputs"):
        convert(src, tmp_path / "repo")
    assert_verified(convert(src, tmp_path / "repo", dequantize="float16"))
    edit_tensors(src, lambda all_: {**all_, name: all_[name] + 1})
    with pytest.raises(ConversionError, match="g_idx names groups from 1 to 2 of 2"):
        convert(src, tmp_path / "other", dequantize="float16")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"bits": 3}, "bits is 3, not 4 or 8"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"format": "gptq_p"}, "format is 'gptq_p'"),
        ({"pack_dtype": "int16"}, "pack_dtype is 'int16'"),
        ({"rotation": "hadamard"}, "rotation is 'hadamard'"),
        ({"quant_method": "auto-round"}, "quantization_config is"),
    ],
)
def test_others_are_refused_by_name(tmp_path, shared, changes, named):
    shutil.copytree(shared, tmp_path / "src")
    edit_config(tmp_path / "src", quantization_config={**ENTRIES, **changes})
    with pytest.raises(ConversionError, match=named):
        convert(tmp_path / "src", tmp_path / "repo")
    assert not (tmp_path / "repo").exists()
