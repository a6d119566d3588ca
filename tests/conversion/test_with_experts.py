"""Checkpoints with experts: each expert's matrices by itself or stacked, in every dtype, with every head."""

import pytest
import torch
import transformers
from pairs import assert_close
from safetensors.torch import load_file
from sizes import OFFICIAL_DECODER

import blockformer
from blockformer.conversion import ConversionError, convert, from_official
from blockformer.conversion.families import oracle
from blockformer.conversion.families.registry import FAMILIES
from blockformer.conversion.rules.patterns import Pattern
from blockformer.conversion.rules.table import Rule, RuleTable
from blockformer.conversion.storage.experts import OneByOne, StackExperts
from blockformer.summary import summarize

from .oracles import assert_verified, edit_config, edit_tensors, entries_of, official_class, stored

OWN = {
    "mixtral": {"num_local_experts": 5},
    "qwen2_moe": {"num_experts": 6, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 24, "num_experts_per_tok": 3, "mlp_only_layers": [1]},
}


def published_folder(folder, family, dtype=torch.float32, name=None, **settings):
    """A saved model of transformers, in the form that is published."""
    chosen = FAMILIES[family]
    torch.manual_seed(0)
    config = chosen.settings.official_class(**{**OFFICIAL_DECODER, **OWN[family], **settings})
    model = getattr(transformers, name or chosen.heads[0].official)(config).to(dtype).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", OWN)
def test_stacked_experts_come_in_and_go_back_stacked(tmp_path, family):
    """As transformers has them in memory; another tool may write them so."""
    theirs = published_folder(tmp_path / "published", family)
    theirs.save_pretrained(tmp_path / "src", save_original_format=False)
    names = set(stored(tmp_path / "src"))
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    assert_verified(convert(tmp_path / "src", tmp_path / "repo"))
    convert(tmp_path / "repo", tmp_path / "back", to_official=True)
    assert stored(tmp_path / "back") == stored(tmp_path / "src")
    (tmp_path / "repo" / "conversion.json").unlink()  # nothing says any more how it came
    convert(tmp_path / "repo", tmp_path / "published again", to_official=True)
    assert stored(tmp_path / "published again") == stored(tmp_path / "published")


def test_a_wrong_rule_of_storage_is_seen(tmp_path, monkeypatch):
    """The official class reads the files by itself: fed by our rules, it would share their mistake."""
    published_folder(tmp_path / "src", "qwen3_moe")
    swapped = OneByOne(parts=("up_proj", "gate_proj", "down_proj"))
    monkeypatch.setattr(FAMILIES["qwen3_moe"].names, "published", swapped)
    with pytest.raises(ConversionError, match="does not compute what the original computes"):
        convert(tmp_path / "src", tmp_path / "repo")


def test_a_bfloat16_checkpoint_is_compared_in_float32_alone(tmp_path):
    """In bfloat16 a rounding chooses another expert for a token, in two models that are both right."""
    published_folder(tmp_path / "src", "qwen2_moe", torch.bfloat16)
    report = convert(tmp_path / "src", tmp_path / "repo")
    assert [measured.dtype for measured in report.parity.measured] == ["float32"]
    assert_verified(report)
    convert(tmp_path / "repo", tmp_path / "back", to_official=True)
    assert stored(tmp_path / "back") == stored(tmp_path / "src")


def test_an_expert_that_is_missing_is_named(tmp_path):
    published_folder(tmp_path / "src", "qwen3_moe")
    edit_tensors(tmp_path / "src", **{"model.layers.0.mlp.experts.4.up_proj.weight": None})
    with pytest.raises(ConversionError, match=r"parts that are missing.*\n.*experts\.4\.up_proj"):
        from_official(tmp_path / "src")


def test_another_number_of_experts_than_the_config_says_is_refused(tmp_path):
    published_folder(tmp_path / "src", "mixtral")
    edit_config(tmp_path / "src", num_local_experts=4)
    with pytest.raises(ConversionError, match=r"no rule takes.*\n.*experts\.4\.w1"):
        from_official(tmp_path / "src")


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ("qwen2_moe", {"num_experts": 0}, "num_experts"),
    ],
)
def test_settings_that_ours_cannot_express_are_refused(tmp_path, family, changes, named):
    published_folder(tmp_path / "src", family)
    edit_config(tmp_path / "src", **changes)
    with pytest.raises(ConversionError, match=named):
        from_official(tmp_path / "src")


def test_the_router_of_a_repo_goes_back_as_it_was_trained(tmp_path):
    """Its settings say how it is trained, too."""
    published_folder(tmp_path / "src", "qwen3_moe", router_aux_loss_coef=0.02, output_router_logits=True)
    ours = from_official(tmp_path / "src")
    assert (ours.config.router_aux_loss_coef, ours.config.output_router_logits) == (0.02, True)
    assert ours.config.mlp_layer_types == ["sparse", "dense"]
    convert(tmp_path / "src", tmp_path / "repo", verify=False)
    (tmp_path / "repo" / "conversion.json").unlink()
    convert(tmp_path / "repo", tmp_path / "back", to_official=True, verify=False)
    back, before = (transformers.AutoConfig.from_pretrained(tmp_path / name).to_dict() for name in ("back", "src"))
    differ = {name for name in before if back.get(name) != before[name]}
    assert differ <= {"_name_or_path", "sliding_window", "max_window_layers"}
    assert entries_of(tmp_path / "back")["router_aux_loss_coef"] == 0.02


FURTHER = {"eh_proj": (32, 64), "enorm": (32,), "self_attn.q_proj": (32, 32), "mlp.experts.0.up_proj": (24, 32)}


def folder_with_further_layers(folder, family, prefix):
    """A checkpoint with tensors of layers that predict further tokens: their names begin with the prefix."""
    sizes = {**OFFICIAL_DECODER, **FURTHER_SIZES[family]}
    torch.manual_seed(0)
    model = official_class(family)(FAMILIES[family].settings.official_class(**sizes)).eval()
    model.save_pretrained(folder)
    edit_tensors(folder, **{f"{prefix}{name}.weight": torch.randn(size) for name, size in FURTHER.items()})
    edit_config(folder, num_nextn_predict_layers=1)
    return model


LATENTS = {
    "kv_lora_rank": 16, "q_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
FURTHER_SIZES = {
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
    "mellum": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    "exaone_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "hy_v3": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    "glm4_moe_lite": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        **LATENTS,
    },
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
        **LATENTS,
        "first_k_dense_replace": 1,
    },
    "olmo_hybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "initializer_range": 0.1,
        "pad_token_id": 0,
    },
}
PREFIXES = [
    *(("glm4_moe", "model.layers.2."), ("deepseek_v3", "model.layers.2."), ("ernie4_5_moe", "model.mtp_block.0.")),
    *(("mellum", "mtp.layers.0."), ("exaone_moe", "mtp.layers.0."), ("hy_v3", "model.layers.2.")),
    *(("glm4_moe_lite", "model.layers.2."), ("olmo_hybrid", "mtp.layers.0.")),
]


@pytest.mark.parametrize(("family", "prefix"), PREFIXES)
def test_layers_that_predict_further_tokens_are_passed_over_and_come_back(tmp_path, family, prefix):
    theirs = folder_with_further_layers(tmp_path / "src", family, prefix)
    names = {f"{prefix}{name}.weight" for name in FURTHER}
    report = convert(tmp_path / "src", tmp_path / "repo", verify="full")
    assert_verified(report)
    (note,) = (note for note in report.notes if "predict further tokens" in note)
    assert prefix in note
    assert "kept for the way back" in note
    assert stored(tmp_path / "repo" / "conversion").keys() == names
    back = convert(tmp_path / "repo", tmp_path / "back", to_official=True, verify="quick")
    assert any("written unchanged" in note for note in back.notes)
    assert stored(tmp_path / "back") == stored(tmp_path / "src")
    assert entries_of(tmp_path / "back") == entries_of(tmp_path / "src")
    with pytest.warns(UserWarning, match="predict further tokens"):
        ours = from_official(tmp_path / "src")
    ids = torch.randint(3, 131, (2, 12))
    with torch.no_grad():
        assert_close(ours(ids).logits, theirs(ids).logits)
    (tmp_path / "repo" / "conversion.json").unlink()
    fresh = convert(tmp_path / "repo", tmp_path / "fresh", to_official=True, family=family, verify="quick")
    assert any("predict further tokens" in note and "not written" in note for note in fresh.notes)
    assert stored(tmp_path / "fresh").keys() == stored(tmp_path / "src").keys() - names
    assert not entries_of(tmp_path / "fresh").get("num_nextn_predict_layers")


def test_a_layer_too_many_is_refused_where_nothing_says_what_it_is(tmp_path):
    published_folder(tmp_path / "src", "qwen3_moe")
    edit_tensors(tmp_path / "src", **{"model.layers.2.self_attn.q_proj.weight": torch.randn(32, 32)})
    what = r"(?s)the model has no place for.*model\.layers\.2\.self_attn\.q_proj\S*: the model has 2 layers"
    with pytest.raises(ConversionError, match=what):
        from_official(tmp_path / "src")


def test_a_table_leaves_out_the_layers_that_it_is_told_to():
    table = RuleTable([Rule("layers.{layer}.a", "l.{layer}.b")], ["layers.{beyond}.*", "mtp_*"], layers=2)
    held = ["layers.2.a", "layers.46.b.weight", "mtp_c"]
    others = ["layers.1.a", "layers.02.a", "layers.x.a", "layers.2", "model.layers.2.a"]
    assert table.further_layers([*others, *held]) == held
    tensors = {name: torch.empty(2) for name in ("layers.0.a", *held, "layers.1.a")}
    groups = table.plan(tensors, {"l.0.b": (2,), "l.1.b": (2,)})
    assert [group.sources for group in groups] == [("layers.0.a",), ("layers.1.a",)]
    with pytest.raises(ConversionError, match=r"no rule takes \(1\):\s+'layers\.1\.c'"):
        table.plan({**tensors, "layers.1.c": torch.empty(2)})
    # In a first step they are copied like all else that it does not know.
    assert len(RuleTable(table.rules, layers=2).plan(tensors, rest=True)) == 5


def test_stacking_refuses_what_does_not_fit():
    op = StackExperts(experts=2, parts=2)
    matrices = [torch.randn(3, 4) for _ in range(4)]
    (stacked,) = op.forward(matrices)
    assert stacked.shape == (2, 6, 4)
    assert torch.equal(stacked[1], torch.cat(matrices[2:]))
    assert all(torch.equal(*pair) for pair in zip(op.inverse([stacked]), matrices, strict=True))
    with pytest.raises(ConversionError, match="differ"):
        op.forward_shapes([(3, 4), (3, 4), (3, 5), (3, 4)])
    with pytest.raises(ConversionError, match="does not hold"):
        op.inverse_shapes([(3, 6, 4)])


def test_names_of_thousands_of_experts_are_found_in_linear_time(monkeypatch):
    """Each name is tried with the patterns that differ from it in numbers alone, not with those of every expert."""
    sources = tuple(f"layers.{{layer}}.experts.{i}.up.weight" for i in range(128))
    table = RuleTable([Rule(sources, "layers.{layer}.experts.up", StackExperts(128, 1))])
    names = [source.format(layer=layer) for source in sources for layer in range(48)]
    tried, match = [], Pattern.match
    monkeypatch.setattr(Pattern, "match", lambda self, name: tried.append(name) or match(self, name))
    groups = table.plan({name: torch.empty(2, 2, device="meta") for name in names})
    assert [len(group.sources) for group in groups] == [128] * 48
    assert len(tried) == len(names)


def quantized_folder(folder):
    """gpt-oss as it is published: its experts with 4 bits, all else bfloat16; and the weights that they stand for."""
    sizes = {**OFFICIAL_DECODER, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_local_experts": 3}
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**sizes, num_experts_per_tok=2, sliding_window=8)
    model = transformers.GptOssForCausalLM(config).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    half = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat((half, -half))
    parts, plain = {}, {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = tensor.shape
            codes = torch.randint(16, (experts, rows, columns // 32, 32))
            scales = torch.randint(122, 127, (experts, rows, columns // 32))
            plain[name] = (values[codes] * 2.0 ** (scales - 127)[..., None]).flatten(-2).mT.contiguous().bfloat16()
            parts[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
            parts[f"{name}_scales"] = scales.to(torch.uint8)
    edit_tensors(folder, **dict.fromkeys(plain), **parts)
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": []})
    exact = transformers.GptOssForCausalLM(config)
    exact.load_state_dict({**model.state_dict(), **plain})
    return exact.eval()


def test_mxfp4_weights_become_bfloat16_and_go_back_out_so(tmp_path):
    theirs = quantized_folder(tmp_path / "src")
    report = convert(tmp_path / "src", tmp_path / "repo")
    assert_verified(report)
    assert any("MXFP4 weights have become bfloat16" in note for note in report.notes)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "repo", dtype=torch.float32)
    ids = torch.randint(3, 131, (2, 12))
    with torch.no_grad():
        expected, found = theirs(ids).logits, ours(ids).logits
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    convert(tmp_path / "repo", tmp_path / "back", to_official=True)
    assert "quantization_config" not in entries_of(tmp_path / "back")
    back = transformers.GptOssForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in back.state_dict().items())
    again = {name: kind for name, (kind, *_) in stored(tmp_path / "back").items()}
    assert set(again.values()) == {"BF16"}


def test_inspect_says_that_weights_are_mxfp4(tmp_path):
    quantized_folder(tmp_path / "src")
    summary = summarize(tmp_path / "src")
    assert "the experts' weights are stored in MXFP4; conversion makes bfloat16 of them" in summary.notes
    convert(tmp_path / "src", tmp_path / "repo", verify=False)
    assert summary.parameters == summarize(tmp_path / "repo").parameters


def test_parts_of_mxfp4_weights_that_do_not_fit_together_are_named(tmp_path):
    quantized_folder(tmp_path / "src")
    name = "model.layers.1.mlp.experts.down_proj"
    scales = load_file(tmp_path / "src/model.safetensors")[f"{name}_scales"]
    edit_tensors(tmp_path / "src", **{f"{name}_scales": scales[:, :-1].contiguous()})
    with pytest.raises(ConversionError, match=rf"(?s)wrong shapes.*{name}_blocks.*are not MXFP4 weights"):
        from_official(tmp_path / "src")
    edit_tensors(tmp_path / "src", **{f"{name}_scales": None})
    with pytest.raises(ConversionError, match=rf"parts that are missing.*\n.*{name}_blocks': needs '{name}_scales'"):
        from_official(tmp_path / "src")


def test_other_low_bits_than_mxfp4_are_refused(tmp_path):
    quantized_folder(tmp_path / "src")
    edit_config(tmp_path / "src", quantization_config={"quant_method": "mystery"})
    with pytest.raises(ConversionError, match="mystery"):
        from_official(tmp_path / "src")


@pytest.mark.parametrize("groups", [1, 2])
def test_groups_are_not_compared_with_a_release_that_takes_experts_of_others(tmp_path, monkeypatch, groups):
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 24}
    settings = {"n_group": groups, "topk_group": 1, "first_k_dense_replace": 1, **experts}
    sizes = {**OFFICIAL_DECODER, "pad_token_id": 0}
    model = transformers.Dots1ForCausalLM(transformers.Dots1Config(**sizes, **settings))
    model.save_pretrained(tmp_path / "src")
    monkeypatch.setattr(oracle.transformers, "__version__", "5.5.4")
    report = convert(tmp_path / "src", tmp_path / "repo")
    wrong = "transformers 5.5.4 computes dots1 wrongly; install 5.6 or later"
    assert report.not_verified == (f"not compared with the official model: {wrong}" if groups > 1 else "")


PHI = {"num_local_experts": 4, "router_jitter_noise": 0.25}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
    "short_mscale": 1.2,
    "long_mscale": 1.2,
}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"num_experts_per_tok": 3}, "num_experts_per_tok is '3'"),
        ({"rope_parameters": LONGROPE | {"long_mscale": 1.3}}, "'longrope', short_mscale '1.2', long_mscale '1.3'"),
        (
            {"rope_parameters": LONGROPE | {"rope_type": "linear", "factor": 2.0}},
            "rope_type is 'linear'.*only 'default' can be",
        ),
    ],
)
def test_phimoe_refuses_what_ours_does_not_compute(settings, told):
    family = FAMILIES["phimoe"]
    entries = {"architectures": ["PhimoeForCausalLM"], **OFFICIAL_DECODER, **PHI, **settings}
    with pytest.raises(ConversionError, match=told):
        family.config_from(entries)


def test_conversion_says_that_phimoe_trains_otherwise(tmp_path):
    config = transformers.PhimoeConfig(**{**OFFICIAL_DECODER, **PHI, "pad_token_id": 0})
    transformers.PhimoeForCausalLM(config).save_pretrained(tmp_path / "src")
    report = convert(tmp_path / "src", tmp_path / "repo")
    assert any("draws experts at random" in note for note in report.notes)
    assert_verified(report)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"router_margin": None}, "router_margin must be set"),
        ({"num_experts_per_tok": 3}, "num_experts_per_tok must be 2"),
        ({"routed_scaling_factor": 2.0}, "routed_scaling_factor must be 1.0"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "rope_parameters must be 'default', or 'longrope'",
        ),
    ],
)
def test_ours_goes_out_as_phimoe_only_as_what_it_computes(settings, told):
    config = blockformer.preset("phimoe", num_experts=4, **settings)
    with pytest.raises(ConversionError, match=told):
        FAMILIES["phimoe"].config_to(config)
