"""Whole numbers as llm-compressor writes them: kept in 4 bits or made plain; the oracle is what each number means.

Where compressed-tensors is installed, transformers reads the same checkpoints with it.
"""

import shutil

import pytest
import torch
import transformers
from compressed_layout import entries, loose, packed, words
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from sizes import OFFICIAL_DECODER

from blockformer.conversion import ConversionError, convert, from_official
from blockformer.conversion.storage.awq import AWQ
from blockformer.doctor.diagnosing import diagnose
from blockformer.files.checkpoint import Checkpoint
from blockformer.model.awq_linear import QuantizedLinear
from blockformer.summary import summarize

from .oracles import assert_verified, edit_config, edit_tensors, entries_of, fingerprint
from .rows import Row, model_of

IDS = torch.arange(5, 25)[None]
KINDS = {
    "4 bits in groups": (packed, {"groups": 2}, entries("group", group=16)),
    "4 bits in groups with zero points": (packed, {"groups": 2, "symmetric": False}, entries("group", False, group=16)),
    "4 bits in rows": (packed, {"groups": 1}, entries("channel")),
    "4 bits in rows with zero points": (packed, {"groups": 1, "symmetric": False}, entries("channel", False)),
}
PLAIN = {
    "8 bits, packed": (packed, {"groups": 2, "bits": 8}, entries("group", bits=8, group=16)),
    "8 bits, packed, with zero points": (
        packed,
        {"groups": 1, "bits": 8, "symmetric": False},
        entries("channel", False, 8),
    ),
    "8 bits": (loose, {"groups": 1}, entries("channel", bits=8, format="int-quantized")),
    "8 bits with zero points": (
        loose,
        {"groups": 2, "symmetric": False},
        entries("group", False, 8, 16, format="int-quantized"),
    ),
}


def folder_of(folder, kind, family="qwen3", dtype=torch.bfloat16, shards=False, stays="lm_head", **settings):
    """An official checkpoint whose linear maps are of a kind; gives the weights that it stands for."""
    made, arguments, told = kind
    settings = {"head_dim": 16, "intermediate_size": 64, "initializer_range": 0.25, **settings}
    model = model_of(Row(family, settings), OFFICIAL_DECODER).to(dtype)
    model.save_pretrained(folder)
    plain = {}

    def low(tensors):
        changed = {}
        for name, weight in tensors.items():
            plain[name] = weight
            if weight.dim() != 2 or "embed" in name or ".gate.weight" in name or stays in name:
                changed[name] = weight
                continue
            groups = arguments["groups"] * weight.shape[1] // 32 if arguments["groups"] > 1 else 1
            parts, plain[name] = made(weight, **{**arguments, "groups": groups})
            changed |= {name.removesuffix("weight") + part: each for part, each in parts.items()}
        return changed

    edit_tensors(folder, low)
    if shards:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        save_torch_state_dict(tensors, folder, max_shard_size="30KB")
    edit_config(folder, quantization_config=told, dtype=str(dtype).removeprefix("torch."))
    return plain


def plain_of(folder, dtype=torch.bfloat16):
    """The plain weights of a checkpoint in AWQ's layout."""
    with Checkpoint(folder) as checkpoint:
        return AWQ.read_plain(checkpoint, dtype)


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    assert [name for name, weight in wanted.items() if not torch.equal(found[name], weight)] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_4_bits_stay(tmp_path, kind, dtype):
    plain = folder_of(tmp_path / "src", KINDS[kind], dtype=dtype)
    before = fingerprint(tmp_path / "src")
    report = convert(tmp_path / "src", tmp_path / "repo")
    assert_verified(report)
    assert report.notes[0] == "the 4-bit weights stay, in AWQ's layout; the way back writes that layout"
    convert(tmp_path / "repo", tmp_path / "back", to_official=True)
    assert entries_of(tmp_path / "back")["quantization_config"]["quant_method"] == "awq"
    assert_equal(plain_of(tmp_path / "back", dtype), plain)
    with pytest.warns(UserWarning, match="4-bit weights stay"):
        model = from_official(tmp_path / "src")
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert len(layers) == 14
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            assert torch.equal(module.dequantized(dtype).t(), plain[f"{name}.weight"])
    assert "QuantizedLinear" in summarize(tmp_path / "src").tree
    assert diagnose(tmp_path / "src", quick=True).status == 0
    assert fingerprint(tmp_path / "src") == before


@pytest.mark.parametrize("kind", PLAIN)
def test_others_become_plain(tmp_path, kind):
    plain = folder_of(tmp_path / "src", PLAIN[kind])
    report = convert(tmp_path / "src", tmp_path / "repo")
    assert_verified(report)
    assert report.notes[0] == "the 8-bit weights have become plain; the way back writes plain ones too"
    convert(tmp_path / "repo", tmp_path / "back", to_official=True)
    assert "quantization_config" not in entries_of(tmp_path / "back")
    assert_equal(load_file(tmp_path / "back" / "model.safetensors"), plain)
    assert any("stored in 8 bits" in note for note in summarize(tmp_path / "src").notes)
    assert diagnose(tmp_path / "src", quick=True).status == 0


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
        ("phi3", {"pad_token_id": 0}),
        ("llama", {"stays": "down_proj"}),
    ],
)
def test_they_become_plain_where_not_all_layers_can_keep_them(tmp_path, family, settings):
    """Experts, matrices that a family joins, and layers that the checkpoint itself has left as they were."""
    ignored = ["lm_head", f"re:.*{settings.get('stays', 'mlp.gate')}"]
    kind = (packed, {"groups": 2}, entries("group", group=16, ignore=ignored))
    plain = folder_of(tmp_path / "src", kind, family, shards=family == "llama", **settings)
    report = convert(tmp_path / "src", tmp_path / "repo")
    assert_verified(report)
    assert report.notes[0] == "the 4-bit weights have become plain; the way back writes plain ones too"
    convert(tmp_path / "repo", tmp_path / "back", to_official=True, verify="quick")
    assert_equal(load_file(tmp_path / "back" / "model.safetensors"), plain)
    assert any("stored in 4 bits; conversion makes plain ones" in note for note in summarize(tmp_path / "src").notes)


def test_tied_embeddings_and_shards(tmp_path):
    kind = KINDS["4 bits in groups"]
    plain = folder_of(tmp_path / "src", kind, "qwen2", shards=True, tie_word_embeddings=True)
    assert_verified(convert(tmp_path / "src", tmp_path / "repo"))
    convert(tmp_path / "repo", tmp_path / "back", to_official=True)
    assert_equal(plain_of(tmp_path / "back"), plain)


def test_a_head_of_4_bits_becomes_plain(tmp_path):
    kind = (packed, {"groups": 2}, entries("group", group=16, ignore=[]))
    plain = folder_of(tmp_path / "src", kind, stays="nothing")
    assert_verified(convert(tmp_path / "src", tmp_path / "repo"))
    convert(tmp_path / "repo", tmp_path / "back", to_official=True)
    assert_equal(plain_of(tmp_path / "back"), plain)


@pytest.mark.parametrize("name", ["bf16", "float32"])
def test_dequantize_makes_them_plain(tmp_path, name):
    plain = folder_of(tmp_path / "src", KINDS["4 bits in groups with zero points"])
    convert(tmp_path / "src", tmp_path / "repo", dequantize=name)
    convert(tmp_path / "repo", tmp_path / "back", to_official=True, verify="quick")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert_equal(back, {key: weight.to(back[key].dtype) for key, weight in plain.items()})


def test_groups_in_another_order_of_the_inputs(tmp_path):
    """`weight_g_idx`, which compressed-tensors wrote up to 0.13."""
    told = entries("group", group=16)
    told["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    plain = folder_of(tmp_path / "src", (packed, {"groups": 2}, told))
    order = {size: torch.randperm(size) for size in (32, 64)}

    def turned(tensors):
        changed = dict(tensors)
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            stem = name.removesuffix("weight_scale")
            turn = order[plain[f"{stem}weight"].shape[1]]
            groups = torch.empty(len(turn), dtype=torch.int32)
            groups[turn] = torch.arange(len(turn), dtype=torch.int32) // 16
            back = turn.argsort()
            numbers = (plain[f"{stem}weight"].double() / tensors[name].double().repeat_interleave(16, 1)).round().int()
            changed[f"{stem}weight_packed"] = words(numbers[:, back], 4)
            plain[f"{stem}weight"] = plain[f"{stem}weight"][:, back]
            changed[f"{stem}weight_g_idx"] = groups
        return changed

    edit_tensors(tmp_path / "src", turned)
    report = convert(tmp_path / "src", tmp_path / "repo")
    assert_verified(report)
    convert(tmp_path / "repo", tmp_path / "back", to_official=True)
    assert_equal(load_file(tmp_path / "back" / "model.safetensors"), plain)


def test_what_else_a_checkpoint_has_rounded_is_said(tmp_path):
    told = entries("channel", bits=8, format="int-quantized", kv_cache_scheme={"num_bits": 8, "type": "float"})
    told |= {"sparsity_config": {"format": "dense", "global_sparsity": 0.1}, "quantization_status": "frozen"}
    told["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int", "strategy": "token"}
    folder_of(tmp_path / "src", (loose, {"groups": 1}, told))
    edit_tensors(tmp_path / "src", **{f"model.layers.0.self_attn.{part}_scale": torch.ones(1) for part in "kv"})
    report = convert(tmp_path / "src", tmp_path / "repo")
    assert_verified(report)
    assert any("round inputs of linear layers and cached keys and values" in note for note in report.notes)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Checkpoints that tests copy."""
    folder = tmp_path_factory.mktemp("compressed")
    folder_of(folder / "4", KINDS["4 bits in groups with zero points"])
    folder_of(folder / "8", PLAIN["8 bits with zero points"])
    return folder


@pytest.mark.parametrize("dequantize", [None, "bfloat16"])
@pytest.mark.parametrize(
    ("bits", "part", "change", "named"),
    [
        (4, "weight_packed", None, "parts that are missing|nothing fills|unexpected|no rule takes"),
        (4, "weight_scale", None, r"needs .*up_proj\.weight_scale"),
        (4, "weight_shape", None, r"needs .*up_proj\.weight_shape"),
        (4, "weight_shape", lambda t: t[:1], r"weight_shape' says \[\]"),
        (4, "weight_shape", lambda t: t.flip(0), r"weight_shape' says \[32, 64\]"),
        (4, "weight_shape", lambda t: t - torch.tensor([0, 8]), "do not fit together, for 24 inputs"),
        (4, "weight_shape", lambda t: t * torch.tensor([1, -1]), "do not fit together, for -32 inputs"),
        (4, "weight_shape", lambda t: t.float(), "float32, not torch.int64"),
        (4, "weight_packed", lambda t: t.long(), "int64, not torch.int32"),
        (4, "weight_scale", lambda t: t[:-1], "do not fit together"),
        (4, "weight_scale", lambda t: t.to(torch.int32), "int32, not torch.bfloat16"),
        (4, "weight_zero_point", lambda t: t[:-1], "do not fit together"),
        (4, "weight_zero_point", lambda t: t.float(), "float32, not torch.int32"),
        (8, "weight_scale", None, r"needs .*up_proj\.weight_scale"),
        (8, "weight_scale", lambda t: t[:, :0], "do not fit together"),
        (8, "weight_zero_point", lambda t: t[:, :1], "do not fit together"),
        (8, "weight", lambda t: t.to(torch.uint8), "uint8"),
    ],
)
def test_what_does_not_fit_together_is_named(tmp_path, shared, bits, part, change, named, dequantize):
    src, name = tmp_path / "src", f"model.layers.1.mlp.up_proj.{part}"
    shutil.copytree(shared / str(bits), src)
    edit_tensors(src, lambda all_: {**all_, name: change(all_[name]) if change else None})
    with pytest.raises(ConversionError, match=named) as error:
        convert(src, tmp_path / "repo", dequantize=dequantize, verify=False)
    assert "layers.1.mlp.up_proj" in str(error.value)
    assert not (tmp_path / "repo").exists()


def test_scales_that_4_bit_layers_cannot_have(tmp_path, shared):
    shutil.copytree(shared / "4", tmp_path / "src")
    name = "model.layers.1.mlp.up_proj.weight_scale"
    edit_tensors(tmp_path / "src", lambda tensors: {**tensors, name: tensors[name] * 1e-9})
    with pytest.raises(ConversionError, match=r"up_proj.weight': its scales do not fit into float16.*--dequantize"):
        convert(tmp_path / "src", tmp_path / "repo")
    assert_verified(convert(tmp_path / "src", tmp_path / "repo", dequantize="bf16"))
    edit_tensors(tmp_path / "src", lambda tensors: {**tensors, name: tensors[name] * torch.nan})
    report = convert(tmp_path / "src", tmp_path / "broken", verify=False)
    assert any("NaN" in note and "up_proj.scales" in note for note in report.notes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"format": "nvfp4-pack-quantized"}, "quantization_config is"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is"),
        ({"transform_config": {"config_groups": {}}}, "transform_config is"),
        ({"ignore": "lm_head"}, "ignore is 'lm_head', not a list"),
        ({"mystery": 1}, "'mystery' is not understood"),
        ({"num_bits": 3}, "num_bits is 3, not 4 or 8"),
        ({"type": "mystery"}, "type is 'mystery', not 'int'"),
        ({"strategy": "token"}, "strategy is 'token'"),
    ],
)
def test_others_are_refused_by_name(tmp_path, shared, changes, named):
    shutil.copytree(shared / "4", tmp_path / "src")
    told = entries_of(tmp_path / "src")["quantization_config"]
    weights = told["config_groups"]["group_0"]["weights"]
    told |= {name: value for name, value in changes.items() if name not in weights}
    weights |= {name: value for name, value in changes.items() if name in weights}
    edit_config(tmp_path / "src", quantization_config=told)
    with pytest.raises(ConversionError, match=named):
        convert(tmp_path / "src", tmp_path / "repo")
    assert not (tmp_path / "repo").exists()


@pytest.mark.parametrize("kind", {**KINDS, **PLAIN})
def test_they_are_what_compressed_tensors_makes_of_them(tmp_path, kind):
    pytest.importorskip("compressed_tensors")
    plain = folder_of(tmp_path / "src", {**KINDS, **PLAIN}[kind])
    told = {**entries_of(tmp_path / "src")["quantization_config"], "dequantize": True}
    edit_config(tmp_path / "src", quantization_config=told)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "src", dtype=torch.bfloat16)
    assert_equal(theirs.state_dict(), plain)
