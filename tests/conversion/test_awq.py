"""AWQ checkpoints: kept in 4 bits, made plain, and back; the oracle is the official model with the weights they mean.

transformers runs such a checkpoint with another package only, so its own plain class stands for it, with weights
unpacked by the layout's definition (`awq_layout`).
"""

import json
import shutil

import pytest
import torch
import transformers
from awq_layout import ENTRIES, ORDER, UNTOUCHED, state_of
from pairs import assert_close
from safetensors.torch import load_file, save_file

import blockformer
from blockformer.cli import main
from blockformer.conversion import ConversionError, convert, export_folder, from_official
from blockformer.conversion.families.registry import FAMILIES
from blockformer.conversion.storage import awq
from blockformer.model.awq_linear import QuantizedLinear
from blockformer.summary import summarize

from .oracles import (
    SIZES,
    SPECIAL,
    edit_config,
    edit_tensors,
    entries_of,
    fingerprint,
    official_folder,
    official_model,
    stored,
)

IDS = torch.randint(3, SIZES["vocab_size"], (2, 17), generator=torch.Generator().manual_seed(0))
SMALL = {"head_dim": 32, "initializer_range": 0.25}


def awq_folder(folder, family="qwen3", group=32, entries=ENTRIES, tokenizer=None, **settings):
    """An official checkpoint with 4-bit projections; returns the official model of the weights that it means."""
    settings = {**({"head_dim": 32} if family in ("qwen3", "llama") else {}), "initializer_range": 0.25, **settings}
    model = official_folder(folder, family, dtype=torch.float16, tokenizer=tokenizer, **settings)
    low, meant = state_of(model, group)
    if getattr(model.config, "tie_word_embeddings", False):
        low = {name: tensor for name, tensor in low.items() if name not in UNTOUCHED}
    low = {name: tensor.contiguous() for name, tensor in low.items()}
    save_file(low, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, quantization_config={**entries, "group_size": group})
    plain = official_model(family, **settings)
    plain.load_state_dict({name: tensor.float() for name, tensor in meant.items()})
    return plain


@torch.no_grad()
def assert_same(model, plain, tolerance=1e-5):
    ours, theirs = model.float()(IDS).logits, plain(IDS).logits
    assert_close(ours, theirs, tolerance)
    texts = [m.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0) for m in (model, plain)]
    assert torch.equal(*texts)


@pytest.mark.portable
@pytest.mark.parametrize(
    ("family", "group", "settings"),
    [
        ("qwen3", 32, {}),
        ("qwen3", -1, {"tie_word_embeddings": True}),
        ("qwen2", 16, {"use_sliding_window": False}),
        pytest.param("llama", 32, {}, marks=pytest.mark.exhaustive),
        pytest.param("mistral", 32, {}, marks=pytest.mark.exhaustive),
    ],
)
def test_there_and_back(tmp_path, family, group, settings):
    plain = awq_folder(tmp_path / "official", family, group, **settings)
    before = fingerprint(tmp_path / "official")
    report = convert(tmp_path / "official", tmp_path / "ours")
    assert sorted(report.dtypes) == ["float16", "int32"]
    assert [m.dtype for m in report.parity.measured] == ["float16", "float32"]
    assert "4-bit" in (tmp_path / "ours" / "README.md").read_text()
    model = FAMILIES[family].heads[0].model_class.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 14
    assert_same(model, plain)
    convert(tmp_path / "ours", tmp_path / "back", to_official=True)
    assert stored(tmp_path / "back") == stored(tmp_path / "official")
    assert entries_of(tmp_path / "back") == entries_of(tmp_path / "official")
    assert fingerprint(tmp_path / "official") == before
    assert_same(from_official(tmp_path / "official"), plain)
    export_folder(tmp_path / "ours", tmp_path / "again")
    assert stored(tmp_path / "again") == stored(tmp_path / "ours")


def test_where_matrices_are_fused_only_plain_weights_can_be_made(tmp_path):
    """As in Phi-3, whose families keep no 4 bits."""
    plain = awq_folder(tmp_path / "official", "phi3", head_dim=16, pad_token_id=0)
    with pytest.raises(ConversionError, match=r"quantization_config is .*AWQ with 4 bits"):
        convert(tmp_path / "official", tmp_path / "ours")
    convert(tmp_path / "official", tmp_path / "ours", dequantize="float32")
    assert_same(blockformer.BlockformerDecoderForCausalLM.from_pretrained(tmp_path / "ours"), plain)


LATER = [name for name, family in FAMILIES.items() if family.names.low_bits and name not in SPECIAL]
REFUSED = ("bamba", "falcon_h1", "olmo_hybrid", "embedding_gemma2_text")
"""Families whose layers do not keep 4-bit weights: some have a state, or other heads than the rest."""
WIDE = {
    "olmo_hybrid": {"pad_token_id": 0},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "smollm3": {"pad_token_id": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name in ("phi", "gemma2") else pytest.mark.exhaustive)
        for name in LATER
        if name not in REFUSED
    ],
)
def test_there_and_back_of_later_families(tmp_path, family):
    """Those whose matrices are neither fused nor reordered."""
    plain = awq_folder(tmp_path / "official", family, head_dim=16, **WIDE.get(family, {}))
    assert convert(tmp_path / "official", tmp_path / "ours").parity.passed
    model = FAMILIES[family].heads[0].model_class.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert any(isinstance(module, QuantizedLinear) for module in model.modules())
    assert_same(model, plain)
    convert(tmp_path / "ours", tmp_path / "back", to_official=True)
    assert stored(tmp_path / "back") == stored(tmp_path / "official")
    assert entries_of(tmp_path / "back") == entries_of(tmp_path / "official")


@pytest.mark.parametrize("family", REFUSED)
def test_other_layers_keep_no_such_weights(tmp_path, family):
    awq_folder(tmp_path / "official", family, head_dim=16, **WIDE.get(family, {}))
    with pytest.raises(ConversionError, match=r"not supported with linear_bits=4.*--dequantize bf16"):
        convert(tmp_path / "official", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_model_of_ours_gets_entries_that_are_understood(tmp_path):
    awq_folder(tmp_path / "official")
    convert(tmp_path / "official", tmp_path / "ours", verify=False)
    (tmp_path / "ours" / "conversion.json").unlink()
    convert(tmp_path / "ours", tmp_path / "back", to_official=True)
    assert stored(tmp_path / "back") == stored(tmp_path / "official")
    assert entries_of(tmp_path / "back")["quantization_config"] == ENTRIES
    assert_same(from_official(tmp_path / "back"), awq_folder(tmp_path / "again"))


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("float32", torch.float32)])
def test_plain_weights_of_them(tmp_path, capsys, name, dtype):
    plain = awq_folder(tmp_path / "official")
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(tmp_path / "official"), str(tmp_path / "ours"), "--dequantize", name])
    assert not ended.value.code, capsys.readouterr().err
    config = entries_of(tmp_path / "ours")
    assert "linear_bits" not in config  # nor the code of such layers
    convert(tmp_path / "ours", tmp_path / "back", to_official=True)
    official = entries_of(tmp_path / "back")
    assert "quantization_config" not in official
    tensors = load_file(tmp_path / "back" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    for key, tensor in plain.state_dict().items():
        assert torch.equal(tensors[key], tensor.to(dtype)), key
    loaded = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    assert torch.isfinite(loaded(IDS).logits).all()


def test_the_repo_runs_without_the_package(tmp_path, fresh, tiny_tokenizer):
    awq_folder(tmp_path / "official", tokenizer=tiny_tokenizer, vocab_size=len(tiny_tokenizer))
    convert(tmp_path / "official", tmp_path / "ours", verify=False)
    code = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, dtype=torch.float32)
ids = torch.tensor([[5, 6, 7]])
text = model.generate(ids, max_new_tokens=6, do_sample=False)[0].tolist()
kind = type(model.model.layers[0].mlp.up_proj)
print(json.dumps([text, kind.__name__, kind.__module__, "gptqmodel" in sys.modules]))
"""
    text, kind, module, other = json.loads(fresh(code, tmp_path / "ours", folder=tmp_path))
    here = from_official(tmp_path / "official").float()
    assert text == here.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False)[0].tolist()
    assert kind == "QuantizedLinear"
    assert module.startswith("transformers_modules")
    assert not other


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """An AWQ checkpoint that tests copy."""
    folder = tmp_path_factory.mktemp("awq") / "official"
    awq_folder(folder)
    return folder


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"bits": 8}, "bits is 8"),
        ({"version": "gemv"}, "version is 'gemv'"),
        ({"version": "gemv_fast"}, "version is 'gemv_fast'"),
        ({"version": "exllama"}, "version is 'exllama'"),
        ({"version": None, "format": "llm-awq"}, "format is 'llm-awq'"),
        ({"zero_point": False}, "zero_point is False"),
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": "128"}, "group_size is '128'"),
        ({"group_size": 48}, "linear_group_size"),
        ({"modules_to_not_convert": ["down_proj"]}, "modules_to_not_convert is"),
        ({"desc_act": True}, "desc_act is True"),
        ({"mystery": 1}, "'mystery' is not understood"),
        ({"quant_method": "gptq"}, r"needs .*g_idx"),
        ({"quant_method": "hqq"}, "quantization_config is"),
        ({"quant_method": None}, "quantization_config is"),
    ],
)
def test_another_quantization_is_refused_by_name(tmp_path, shared, entries, named):
    shutil.copytree(shared, tmp_path / "official")
    edit_config(tmp_path / "official", quantization_config={**ENTRIES, **entries})
    before = fingerprint(tmp_path / "official")
    with pytest.raises(ConversionError, match=named):
        convert(tmp_path / "official", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    assert fingerprint(tmp_path / "official") == before


def damaged(tensors, part, change):
    name = f"model.layers.1.mlp.up_proj.{part}"
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name]).contiguous()
    return tensors


@pytest.mark.parametrize("dequantize", [None, "bfloat16"])
@pytest.mark.parametrize(
    ("part", "change", "named"),
    [
        ("qweight", None, r"up_proj\.qweight"),
        ("scales", None, r"up_proj\.scales"),
        ("qweight", lambda t: t[:, :-1], "shape|fit together"),
        ("qweight", lambda t: t[:-1], "shape|fit together"),
        ("qzeros", lambda t: t[:-1], "shape|fit together"),
        ("scales", lambda t: t[:, :-8], "shape|fit together"),
        ("scales", lambda t: t[0], "shape|no matrices"),
        ("scales", lambda t: t.float(), "float32, not torch.float16"),
        ("scales", lambda t: t.bfloat16(), "bfloat16, not torch.float16"),
        ("qweight", lambda t: t.long(), "int64, not torch.int32"),
        ("qzeros", lambda t: t.float(), "float32, not torch.int32"),
    ],
)
def test_wrong_tensors_are_listed(tmp_path, shared, part, change, named, dequantize):
    shutil.copytree(shared, tmp_path / "official")
    edit_tensors(tmp_path / "official", lambda tensors: damaged(tensors, part, change))
    with pytest.raises(ConversionError, match=named) as error:
        convert(tmp_path / "official", tmp_path / "ours", dequantize=dequantize, verify=False)
    assert "layers.1.mlp.up_proj" in str(error.value)
    assert not (tmp_path / "ours").exists()


def test_a_plain_checkpoint_that_calls_itself_one_and_the_reverse(tmp_path):
    official_folder(tmp_path / "plain", **SMALL)
    edit_config(tmp_path / "plain", quantization_config=ENTRIES)
    with pytest.raises(ConversionError, match="all weights are plain: the model was merged"):
        convert(tmp_path / "plain", tmp_path / "ours")
    awq_folder(tmp_path / "low")
    edit_config(tmp_path / "low", quantization_config=...)
    with pytest.raises(ConversionError, match=r"_proj\.qweight.*put quantization_config back"):
        convert(tmp_path / "low", tmp_path / "ours")


def test_dequantizing_what_is_plain_and_what_goes_out(tmp_path):
    official_folder(tmp_path / "plain", **SMALL)
    with pytest.raises(ConversionError, match="has no 4-bit weights to dequantize; use dtype"):
        convert(tmp_path / "plain", tmp_path / "ours", dequantize="bfloat16")
    awq_folder(tmp_path / "low")
    convert(tmp_path / "low", tmp_path / "ours", verify=False)
    for options in ({"to_official": True}, {"dtype": "float32"}):
        with pytest.raises(ConversionError, match=r"\(--dequantize\) cannot be combined with"):
            convert(tmp_path / "ours", tmp_path / "back", dequantize="bfloat16", **options)
    with pytest.raises(ConversionError, match="dtype must be one of"):
        convert(tmp_path / "low", tmp_path / "other", dequantize="int8")


def plain_weight_by_hand(qweight, qzeros, scales):
    def numbers(words):
        out = torch.zeros(len(words), words.shape[1] * 8)
        for place, column in enumerate(ORDER):
            out[:, column::8] = ((words >> (4 * place)) & 15).float()
        return out

    size = len(qweight) // len(scales)
    zeros, factors = (part.repeat_interleave(size, 0) for part in (numbers(qzeros), scales.float()))
    return ((numbers(qweight) - zeros) * factors).t().contiguous()


def test_a_wrong_weight_fails_the_comparison(tmp_path, monkeypatch):
    awq_folder(tmp_path / "official")
    monkeypatch.setattr(awq, "plain_weight", plain_weight_by_hand)  # the original stays right
    monkeypatch.setattr(blockformer.model.awq_linear, "SHIFTS", (0, 8, 4, 12))
    with pytest.raises(ConversionError, match="does not compute what the original computes"):
        convert(tmp_path / "official", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_another_family_has_no_such_layout(tmp_path):
    config = blockformer.preset(
        "gpt2", vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        linear_bits=4, linear_group_size=32, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    blockformer.BlockformerDecoderForCausalLM(config).save_pretrained(tmp_path / "ours")
    with pytest.raises(ConversionError, match="linear_bits"):
        convert(tmp_path / "ours", tmp_path / "back", to_official=True, family="gpt2")


def test_on_paper_it_is_the_tree_of_the_article(tmp_path, capsys):
    entries = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "quantization_config": {**ENTRIES, "group_size": 128},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(entries))
    summary = summarize(path)
    assert summary.parameters == 14_768_307_200
    assert "(down_proj): QuantizedLinear(in_features=17408, out_features=5120, bias=False, bits=4, group_size=128)" in (
        summary.tree
    )
    assert "(lm_head): Linear(in_features=5120, out_features=151936, bias=False)" in summary.tree
    low = 40 * (2 * 5120 * 5120 + 2 * 5120 * 1024 + 3 * 5120 * 17408)
    scales_and_zeros = low // 128 * 2 + low // 128 // 2
    plain = summary.parameters - low
    packed = low // 2 + scales_and_zeros
    assert summary.memory == {"4 bits and float32": packed + 4 * plain, "4 bits and bfloat16": packed + 2 * plain}
    with pytest.raises(SystemExit):
        main(["inspect", str(path)])
    out = capsys.readouterr().out
    assert "weights in 4 bits and bfloat16: 9,976,576,000 bytes (9.3 GiB)" in out
    assert "linear_bits" in out
