"""DeepSeek's checkpoints: weights of 8 bits, layers that are passed over, settings that are refused."""

import pytest
import torch
import transformers
from pairs import LATENT, latent_pair
from safetensors.torch import load_file

from blockformer.conversion import ConversionError, convert, from_official
from blockformer.conversion.families import oracle
from blockformer.conversion.storage.fp8 import Fp8

from .oracles import assert_verified, edit_config, edit_tensors, entries_of, stored

FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
SPARSE = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
WIDE = {"hidden_size": 256, "intermediate_size": 384, "kv_lora_rank": 120, "moe_intermediate_size": 128}


def factors_of(scales, weight, block=(128, 128)):
    """Each number's own factor, block by block."""
    high, wide = block
    factors = torch.empty(weight.shape)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            factors[high * row : high * (row + 1), wide * column : wide * (column + 1)] = scales[row, column]
    return factors


def quantized_folder(folder, **settings):
    """A DeepSeek-V3 as it is published, and the weights that it stands for: linear maps in FP8, the rest bfloat16.

    The router's bias is in float32.
    """
    _, theirs = latent_pair(folder, dtype="bfloat16", **{**SPARSE, **WIDE, **settings})
    theirs.bfloat16().save_pretrained(folder)
    generator, plain, changes = torch.Generator().manual_seed(0), {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        plain[name] = weight
        if name.endswith(("_proj.weight", "_with_mqa.weight")):
            blocks = [-(-size // 128) for size in weight.shape]
            scales = torch.rand(blocks, generator=generator) * 0.002 + 0.001
            factors = factors_of(scales, weight)
            low = (weight.float() / factors).clamp(-448, 448).to(torch.float8_e4m3fn)
            plain[name] = (low.float() * factors).bfloat16()
            changes |= {name: low, f"{name}_scale_inv": scales}
        elif name.endswith("correction_bias"):
            changes[name] = plain[name] = torch.randn(weight.shape, generator=generator)
    edit_tensors(folder, **changes)
    edit_config(folder, quantization_config={**FP8, "modules_to_not_convert": ["lm_head"]})
    return plain


def test_fp8_weights_become_bfloat16_and_go_back_out_so(tmp_path):
    plain = quantized_folder(tmp_path / "src")
    report = convert(tmp_path / "src", tmp_path / "repo")
    assert_verified(report)
    assert any("FP8 weights have become bfloat16; the way back writes bfloat16" in note for note in report.notes)
    assert_verified(convert(tmp_path / "repo", tmp_path / "back", to_official=True))
    assert "quantization_config" not in entries_of(tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == plain.keys()
    assert all(torch.equal(back[name], weight) and back[name].dtype is weight.dtype for name, weight in plain.items())


def test_fp8_weights_load_in_memory_and_in_another_dtype(tmp_path):
    plain = quantized_folder(tmp_path / "src")
    with pytest.warns(UserWarning, match="FP8 weights have become bfloat16"):
        ours = from_official(tmp_path / "src", dtype="float32")
    convert(tmp_path / "src", tmp_path / "repo", dtype="float32", verify=False)
    convert(tmp_path / "repo", tmp_path / "back", to_official=True, verify=False)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[name], weight.float()) for name, weight in plain.items())
    again = type(ours).from_pretrained(tmp_path / "repo").state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in ours.state_dict().items())


def test_fp8_weights_are_those_that_transformers_makes_of_them(tmp_path):
    quantized_folder(tmp_path / "src")
    theirs = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "src", dtype=torch.bfloat16)
    convert(tmp_path / "src", tmp_path / "repo", verify=False)
    convert(tmp_path / "repo", tmp_path / "back", to_official=True, verify=False)
    back = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.bfloat16)
    expected = theirs.state_dict()
    for name, weight in back.state_dict().items():
        assert torch.equal(weight, expected[name].to(weight.dtype)), name


def test_blocks_at_the_edges_are_smaller():
    """As in DeepSeek-V3 itself, whose latent vectors with the rotated key have 576 channels."""
    torch.manual_seed(0)
    weight, scales = torch.randn(576, 200).to(torch.float8_e4m3fn), torch.rand(5, 2)
    (plain,) = Fp8().forward([weight, scales])
    assert torch.equal(plain, (weight.float() * factors_of(scales, weight)).bfloat16())
    assert Fp8().forward_shapes([(576, 200), (5, 2)]) == [(576, 200)]
    with pytest.raises(ConversionError, match=r"factors \[4, 2\] are not FP8 weights in blocks of 128 x 128"):
        Fp8().forward_shapes([(576, 200), (4, 2)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_block_size": [64, 64]}, "factors .* are not FP8 weights in blocks of 64 x 64"),
        ({"scale_fmt": "e4m3"}, "scale_fmt is 'e4m3', not 'float' or 'ue8m0' or None"),
        ({"quant_method": "mystery"}, "quant_method is 'mystery', not 'fp8'"),
        ({"secret": 1}, "'secret' is not understood"),
    ],
)
def test_fp8_of_another_kind_is_refused(tmp_path, changes, message):
    quantized_folder(tmp_path / "src")
    edit_config(tmp_path / "src", quantization_config=FP8 | changes)
    with pytest.raises(ConversionError, match=message):
        from_official(tmp_path / "src")


def test_fp8_weights_without_their_factors_or_their_entry_are_refused(tmp_path):
    quantized_folder(tmp_path / "src")
    edit_config(tmp_path / "src", quantization_config=None)
    with pytest.raises(ConversionError, match=r"quantized by FP8 in blocks .*put quantization_config back"):
        from_official(tmp_path / "src")
    edit_config(tmp_path / "src", quantization_config=FP8)
    edit_tensors(tmp_path / "src", **{"model.layers.1.mlp.experts.3.up_proj.weight_scale_inv": None})
    with pytest.raises(ConversionError, match=r"parts that are missing.*\n.*experts\.3\.up_proj\.weight_scale_inv"):
        from_official(tmp_path / "src")


def test_further_layers_in_fp8_are_left_out_and_the_note_says_so(tmp_path):
    quantized_folder(tmp_path / "src")
    edit_tensors(tmp_path / "src", **{"model.layers.3.eh_proj.weight": torch.randn(32, 64).to(torch.float8_e4m3fn)})
    edit_config(tmp_path / "src", num_nextn_predict_layers=1)
    report = convert(tmp_path / "src", tmp_path / "repo", verify=False)
    assert any("predict further tokens" in note and "left out" in note for note in report.notes)
    back = convert(tmp_path / "repo", tmp_path / "back", to_official=True, verify=False)
    assert any("predict further tokens" in note and "not written" in note for note in back.notes)
    assert not any("layers.3." in name for name in stored(tmp_path / "back"))
    assert entries_of(tmp_path / "back")["num_nextn_predict_layers"] == 0


REFUSED = [
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2 does not work with kv_lora_rank"),
    ("deepseek_v3", {"n_group": 3}, "num_expert_groups=3.* do not fit 8 experts"),
    ("deepseek_v3", {"topk_group": 1}, "num_experts_per_tok must be at most 2, not 3"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
    ("deepseek_v2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
]


@pytest.mark.parametrize(("family", "changes", "named"), REFUSED)
def test_settings_that_ours_cannot_express_are_refused(tmp_path, family, changes, named):
    latent_pair(tmp_path / "src", family, **SPARSE)
    edit_config(tmp_path / "src", **changes)
    with pytest.raises(ConversionError, match=named):
        from_official(tmp_path / "src")


@pytest.mark.parametrize("family", LATENT)
def test_ours_goes_out_only_as_what_it_is(tmp_path, family):
    """A scale of its own, another epsilon in the latent norms, a score of groups that the other family has."""
    method = {"topk_method": "group_limited_greedy"} if family == "deepseek_v2" else {}
    ours, _ = latent_pair(tmp_path / "src", family, **SPARSE, **method)
    for name, value in (("attention_scale", 0.3), ("latent_norm_eps", 1e-3)):
        kept = getattr(ours.config, name)
        setattr(ours.config, name, value)
        ours.save_pretrained(tmp_path / name)
        with pytest.raises(ConversionError, match=f"{name} must be"):
            convert(tmp_path / name, tmp_path / "back", to_official=True, family=family)
        setattr(ours.config, name, kept)
    ours.config.experts_per_group_score = 3 - ours.config.experts_per_group_score
    ours.save_pretrained(tmp_path / "repo")
    with pytest.raises(ConversionError, match="experts_per_group_score must be"):
        convert(tmp_path / "repo", tmp_path / "back", to_official=True, family=family)


def test_a_release_that_computes_it_wrongly_is_not_compared_with(tmp_path, monkeypatch):
    latent_pair(tmp_path / "src", "deepseek_v2", **SPARSE)
    monkeypatch.setattr(oracle.transformers, "__version__", "5.14.1")
    report = convert(tmp_path / "src", tmp_path / "repo")
    wrong = "transformers 5.14.1 computes deepseek_v2 wrongly; install 5.15 or later"
    assert report.not_verified == f"not compared with the official model: {wrong}"
