"""Each family's record: configs survive the round trip, and what ours or the official side cannot express is named."""

import copy
import functools

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import blockformer
from blockformer.conversion import ConversionError, convert
from blockformer.conversion.families import registry
from blockformer.conversion.families.base import NOT_COMPUTED, OF_LANGUAGE_MODELS
from blockformer.conversion.families.decoder import DecoderNames
from blockformer.conversion.families.registry import FAMILIES, family_by_name, family_for, family_of
from blockformer.conversion.plan import expected_tensors
from blockformer.declared_fields import axes_of
from blockformer.model.axes import flag

from .oracles import SIZES, SPECIAL, official_folder

MIXED = ["full_attention", "sliding_attention"]
OTHER_VALUES = {
    "vocab_size": 260001,
    "norm_eps": 0.25,
    "qk_norm": True,
    "relative_attention_num_buckets": 20,
    "relative_attention_max_distance": 77,
    "linear_group_size": 16,
    "attention_scale": 0.3,
    "embedding_scale": 3.0,
    "logit_scale": 0.7,
    "embedding_norm": True,
    "lm_head_transform": True,
    "lm_head_bias": True,
    "float32_down_proj": True,
    "hidden_dropout": 0.35,
    "attention_dropout": 0.35,
    "activation_dropout": 0.35,
    "max_position_embeddings": 1234,
    "position_offset": 5,
    "type_vocab_size": 7,
    "tie_word_embeddings": False,
    "share_embeddings": False,
    "decoder_layers": 1,
    "decoder_starts_with_last_label": True,
    "decoder_reads_source": False,
    "bos_token_id": 5,
    "eos_token_id": 6,
    "pad_token_id": 7,
    "use_cache": False,
    "initializer_range": 0.5,
}
ROPE = {
    "default": {"rope_theta": 5e5},
    "linear": {"rope_theta": 1e4, "factor": 2.0},
    "dynamic": {"rope_theta": 1e4, "factor": 4.0},
    "yarn": {"rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0},
    "longrope": {
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
        "factor": 4.0,
    },
    "llama3": {
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def official(family, **changes):
    """An official config.json with these settings."""
    head = {"head_dim": 16} if family == "qwen3" else {}  # its class has a default of its own
    return {"model_type": family, "architectures": [FAMILIES[family].heads[0].official], **SIZES, **head, **changes}


def canonical(family, entries):
    """What transformers makes of a config.json."""
    fields = FAMILIES[family].settings.official_class.from_dict(copy.deepcopy(entries)).to_dict()
    for name in ("transformers_version", "_name_or_path"):
        fields.pop(name, None)
    fields["rope_parameters"].pop("type", None)  # the old spelling of rope_type
    return fields


def there_and_back(family, entries):
    """official -> ours -> official, without any memory of the first."""
    chosen = FAMILIES[family]
    config = chosen.settings.our_config(chosen.config_from(entries))
    again = type(config).from_dict(config.to_dict())
    assert again.to_dict() == config.to_dict()
    return config, chosen.config_to(config)


COMMON = [
    {},
    {"tie_word_embeddings": True, "use_cache": False, "attention_dropout": 0.1, "hidden_act": "gelu"},
    {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "initializer_range": 0.1, "pad_token_id": 0},
    {"eos_token_id": [2, 3], "bos_token_id": None, "torch_dtype": "bfloat16"},
    {"dtype": "float16", "head_dim": 32},
    {"rope_theta": 12345.0},
    {"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_theta": 1e5, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    *({"rope_parameters": {"rope_type": kind, **parameters}} for kind, parameters in ROPE.items()),
    *(
        {"rope_theta": p["rope_theta"], "rope_scaling": {"rope_type": k, **p}}
        for k, p in ROPE.items()
        if k != "default"
    ),
]
OWN = {
    "llama": [{"attention_bias": True}, {"mlp_bias": True}, {"pretraining_tp": 1}, {"attention_dropout": None}],
    "mistral": [{"sliding_window": 16}, {"sliding_window": None}, {"num_key_value_heads": 4}],
    "qwen2": [
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
        {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 2},
    ],
    "qwen3": [
        {"attention_bias": True},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "attention_bias": True},
        {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 2},
    ],
}
CASES = [(family, changes) for family in SPECIAL for changes in COMMON + OWN[family]]


@pytest.mark.versions
@pytest.mark.parametrize(("family", "changes"), CASES)
def test_the_official_class_gives_an_equal_config_after_a_round_trip(family, changes):
    entries = official(family, **changes)
    _, back = there_and_back(family, entries)
    before, after = canonical(family, entries), canonical(family, back)
    if before.get("attention_dropout", 0.0) is None:
        before["attention_dropout"] = 0.0
    if "layer_types" in before:
        # it only says where layer_types come from, and they are there
        before.pop("max_window_layers"), after.pop("max_window_layers")
    assert after == before


@pytest.mark.parametrize(("family", "changes"), [(family, changes) for family in OWN for changes in [{}, *OWN[family]]])
def test_rules_and_settings_fit_both_models_tensor_by_tensor(family, changes):
    chosen = FAMILIES[family]
    entries = official(family, **changes)
    config = chosen.settings.our_config(chosen.config_from(entries))
    ours, tied, parameters = expected_tensors(chosen.heads[0].model_class, config)
    theirs, their_tied, their_parameters = expected_tensors(
        getattr(transformers, chosen.heads[0].official), chosen.settings.official_config(entries)
    )
    assert (tied, parameters) == (their_tied, their_parameters)
    headers = {name: torch.empty(shape, device="meta") for name, shape in theirs.items()}
    rules = chosen.names.layout(chosen.names.variant_of(entries), config)
    groups = rules.plan(headers, ours)
    made = {target.name: torch.empty(target.shape, device="meta") for group in groups for target in group.targets}
    assert made.keys() == ours.keys()
    rules.plan(made, theirs, reverse=True)
    assert rules.shapes_before(ours) == theirs  # so that the way back need not ask the class


def test_old_rotary_frequencies_are_left_out_and_nothing_else():
    chosen = FAMILIES["llama"]
    config, back = there_and_back("llama", official("llama"))
    theirs, _, _ = expected_tensors(transformers.LlamaForCausalLM, chosen.settings.official_config(back))
    shapes, _, _ = expected_tensors(chosen.heads[0].model_class, config)
    headers = {name: torch.empty(shape, device="meta") for name, shape in theirs.items()}
    buffers = ("layers.0.self_attn.rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.cos_cached")
    for name in (*buffers, "rotary_emb.sin_cached"):
        headers[f"model.{name}"] = torch.empty(8, device="meta")
    rules = chosen.names.layout(chosen.names.variant_of(back), config)
    assert len(rules.plan(headers, shapes)) == len(shapes)
    headers["model.layers.0.self_attn.extra"] = torch.empty(8, device="meta")
    with pytest.raises(ConversionError, match=r"no rule takes.*\n.*self_attn\.extra"):
        rules.plan(headers, shapes)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"rope_scaling": {"type": "mystery", "factor": 2.0}}, "mystery"),
        ("llama", {"hidden_act": "mystery"}, "mystery"),
        ("llama", {"architectures": ["LlamaForMystery"]}, "LlamaForMystery"),
        ("llama", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ("llama", {"num_attention_heads": 5}, "LlamaConfig"),
        ("llama", {"hidden_size": "64"}, "hidden_size"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("llama", {"eos_token_id": 500}, "eos_token_id"),
        ("llama", {"dtype": "float8_e4m3fn"}, "dtype"),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder"),
        ("mistral", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ("qwen2", {"layer_types": ["sliding_attention", "full_attention"]}, "use_sliding_window"),
        ("qwen3", {"layer_types": ["sliding_attention"]}, "layer"),
        ("qwen3", {"layer_types": ["conv", "full_attention"]}, "layer_types names conv"),
        ("qwen3", {"rms_norm_eps": -1.0}, "norm_eps"),
        (
            "qwen3",
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
            "rope_parameters",
        ),
    ],
)
def test_an_official_setting_that_ours_cannot_express_is_named(family, changes, named):
    with pytest.raises(ConversionError, match=named):
        FAMILIES[family].config_from(official(family, **changes))


def test_all_unsupported_settings_are_named_at_once():
    entries = official("llama", is_encoder_decoder=True, quantization_config={"bits": 4})
    with pytest.raises(ConversionError, match=r"(?s)is_encoder_decoder.*quantization_config"):
        FAMILIES["llama"].config_from(entries)


def test_entries_that_can_name_code_are_dropped():
    entries = official("llama", auto_map={"AutoConfig": "evil.Config"}, attn_implementation="somebody/kernel")
    config = FAMILIES["llama"].settings.our_config(FAMILIES["llama"].config_from(entries))
    assert "evil" not in str(config.to_dict())
    assert FAMILIES["llama"].settings.official_config(entries)._attn_implementation is None


def test_a_negative_padding_token_means_none():
    entries = official("llama", pad_token_id=-1)
    assert FAMILIES["llama"].config_from(entries)["pad_token_id"] is None


def test_a_source_is_told_by_model_type_alone():
    assert family_of({"model_type": "qwen2", "_name_or_path": "meta-llama/Llama-3"}).name == "qwen2"
    with pytest.raises(
        ConversionError,
        match=r"'gpt_ossi' is not supported\. docs/supported.md lists every type that is",
    ):
        family_of({"model_type": "gpt_ossi"})
    with pytest.raises(ConversionError, match="model_type is missing"):
        family_of({})
    with pytest.raises(ConversionError, match="Did you mean 'qwen3'"):
        family_by_name("qwen-3")


@pytest.mark.parametrize(
    ("stated", "meant"), [("BERT", "bert"), ("XLM-RoBERTa", "xlm-roberta"), ("gpt-neox", "gpt_neox"), ("T5 ", "t5")]
)
def test_a_type_in_another_spelling_is_named(stated, meant):
    said = rf'model_type {stated!r} is not known; write "model_type": "{meant}"$'
    with pytest.raises(ConversionError, match=said):
        family_of({"model_type": stated})


def test_an_unknown_type_names_what_it_is_like_and_what_is_strange():
    entries = {**official("llama"), "model_type": "llambada", "attention_bias": False, "secret_factor": 3.0}
    entries |= {"mlp_bias": False, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "pretraining_tp": 1}
    said = r"'llambada' is not supported; its settings are closest to 'llama', which does not know "
    said += r"'secret_factor'; and to '\w+'.*\. docs/supported.md lists every type that is"
    with pytest.raises(ConversionError, match=said):
        family_of(entries)


def test_a_type_of_another_kind_is_like_none():
    entries = {"model_type": "clip", "text_config": {}, "vision_config": {}, "projection_dim": 512}
    with pytest.raises(
        ConversionError, match=r"'clip' is not supported\. docs/supported\.md lists every type that is$"
    ):
        family_of(entries)


def test_a_type_that_only_a_newer_release_has_says_so(monkeypatch):
    monkeypatch.setattr(registry, "RELEASED", registry.RELEASED - {"Olmo3Config"})
    assert "olmo3" not in FAMILIES
    with pytest.raises(ConversionError, match=r"'olmo3' is not supported by transformers .*install a newer one"):
        family_of({"model_type": "olmo3"})


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({"qk_norm": True}, "qwen3"),
        ({"attention_bias": True}, "qwen2"),
        (
            {"attention_bias": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
            "qwen2",
        ),
        ({}, "llama"),
        ({"attention_bias": True, "attention_output_bias": True}, "llama"),
        ({"mlp_bias": True}, "llama"),
        ({"sliding_window": 8}, "mistral"),
        ({"embedding_scale": 2.0, "logit_scale": 0.7}, "hyperclovax"),
        ({"qk_norm": True, "layer_types": ["conv", "full_attention"]}, "lfm2"),
    ],
)
def test_on_the_way_out_the_family_is_found_from_the_fields(changes, family):
    sizes = {name: value for name, value in SIZES.items() if name != "initializer_range"}
    config = blockformer.BlockformerDecoderConfig(**sizes, **changes)
    assert family_for(config).name == family
    there_and_back(family, FAMILIES[family].config_to(config))


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_placement": "post"},
        {"position_type": "learned"},
        {"lm_head_bias": True},
        {"embedding_norm": True},
        {"clip_qkv": 2.0},
        {"attn_logit_softcapping": 2.0},
        {"add_cross_attention": True},
        {"qk_norm": True, "mlp_bias": True},
    ],
)
def test_a_config_that_no_family_expresses_is_refused_with_its_fields(changes):
    config = blockformer.BlockformerDecoderConfig(**{**SIZES, "head_dim": 16}, **changes)
    with pytest.raises(ConversionError, match="no official family can express") as caught:
        family_for(config)
    named = {"position_type": "position_type", "sliding_window": "attention_bias|qk_norm|layer_types|sliding_window"}
    field = next(iter(changes)) if "mlp_bias" not in changes else "mlp_bias"
    assert caught.match(named.get(field, field))


def test_a_size_of_head_that_the_official_class_refuses_is_an_error():
    config = blockformer.BlockformerDecoderConfig(**{**SIZES, "hidden_size": 66, "head_dim": 16})
    with pytest.raises(ConversionError, match="LlamaConfig refuses it"):
        FAMILIES["llama"].config_to(config)


@settings(max_examples=40, deadline=None)
@given(
    family=st.sampled_from(sorted(SPECIAL)),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (8, 8)]),
    layers=st.integers(1, 4),
    vocab=st.integers(4, 300),
    tied=st.booleans(),
    theta=st.floats(1.0, 1e7),
    eps=st.floats(1e-12, 1e-2),
    window=st.integers(2, 64),
    slides=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_any_config_survives_the_round_trip(family, heads, layers, vocab, tied, theta, eps, window, slides):
    changes = {
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "rope_theta": theta,
        "rms_norm_eps": eps,
    }
    if family.startswith("qwen"):
        kinds = ["sliding_attention" if slide else "full_attention" for slide in slides[:layers]]
        changes.update(layer_types=kinds)
        if any(slides[:layers]):
            changes.update(use_sliding_window=True, sliding_window=window)
    elif family == "mistral":
        changes["sliding_window"] = window if slides[0] else None
    entries = official(family, **changes)
    _, back = there_and_back(family, entries)
    before, after = canonical(family, entries), canonical(family, back)
    before.pop("max_window_layers", None), after.pop("max_window_layers", None)
    assert after == before


def test_the_special_settings_of_the_oracles_are_real():
    for family, changes in SPECIAL.items():
        assert there_and_back(family, official(family, **changes))


@functools.cache
def with_one_more(config_class):
    """A class with one more axis, that no family has heard of."""

    class Newer(config_class):
        made_up: bool = flag(False, "attention", "made up")

    return Newer


def with_a_new_axis(config, **changes):
    """The same config, of such a class."""
    settings = {name: getattr(config, name) for name in axes_of(config)}
    return with_one_more(type(config))(architectures=config.architectures, **settings, **changes)


SMALL_T5 = {"d_model": 48, "d_ff": 96, "num_layers": 2, "num_heads": 4}
SMALL = {
    "deberta-v2": {
        "relative_attention": True,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
        "pos_att_type": "p2c|c2p",
        "position_buckets": 8,
    },
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "distilbert": {"dim": 48, "hidden_dim": 96, "n_layers": 2, "n_heads": 4},
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4},
    "t5": SMALL_T5,
    "mt5": SMALL_T5,
    "umt5": SMALL_T5,
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "nemotron_h": {"hybrid_override_pattern": "M-*-"},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "falcon_h1": {"num_hidden_layers": 2},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "token_dropout": True},
}


def config_of(family, head):
    """A config of ours for a head of a family."""
    entries = {"architectures": [head.official], **SMALL.get(family, {})}
    if isinstance(FAMILIES[family].names, DecoderNames):  # some classes have a default that their vocabulary has not
        entries |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if getattr(head, "is_decoder", False):
        entries["is_decoder"] = True
    return FAMILIES[family].settings.our_config(FAMILIES[family].config_from(entries))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_axis_that_a_family_does_not_name_must_have_its_default(family):
    chosen = FAMILIES[family]
    for head in chosen.heads:
        config = config_of(family, head)
        assert config.architectures == [head.ours]
        assert chosen.differences(with_a_new_axis(config)) == []
        assert chosen.differences(with_a_new_axis(config, made_up=True)) == ["made_up must be False, not True"]
    with pytest.raises(ConversionError, match="made_up must be False, not True"):
        chosen.config_to(with_a_new_axis(config, made_up=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_ours_comes_back_or_is_refused(family):
    """Each field in turn with another value: what is not refused is the same after the way out and in."""
    chosen = FAMILIES[family]
    config = config_of(family, next((head for head in chosen.heads if head.writes_text), chosen.heads[0]))
    known = {name: getattr(config, name) for name in axes_of(config)}
    refused, kept = set(), set()
    not_computed = NOT_COMPUTED | {*chosen.settings.without_effect}
    if not any(head.writes_text for head in chosen.heads):
        not_computed |= OF_LANGUAGE_MODELS
    for name, value in OTHER_VALUES.items():
        if name not in known:
            continue
        try:
            changed = type(config)(architectures=config.architectures, **{**known, name: value})
        except ValueError:  # our own config refuses it
            refused.add(name)
            continue
        try:
            official = chosen.config_to(changed)
        except ConversionError:
            refused.add(name)
            continue
        again = chosen.settings.our_config(chosen.config_from(official, chosen.names.variant_for(changed)))
        assert getattr(again, name) == value or name in not_computed, name
        kept.add(name)
    assert {"qk_norm", "linear_group_size", "relative_attention_num_buckets"} & refused
    assert {"vocab_size", "hidden_dropout"} & kept


def test_the_way_back_without_a_record_names_families_that_compute_the_same(tmp_path):
    official_folder(tmp_path / "src", "xlm-roberta", "ForMaskedLM")
    convert(tmp_path / "src", tmp_path / "ours", verify=False)
    assert convert(tmp_path / "ours", tmp_path / "back", to_official=True, verify=False).family == "xlm-roberta"
    (tmp_path / "ours/conversion.json").unlink()
    report = convert(tmp_path / "ours", tmp_path / "other", to_official=True, verify=False)
    assert report.family == "roberta"
    assert any("written as 'roberta'; 'xlm-roberta' or" in note for note in report.notes), report.notes
    said = {"to_official": True, "family": "xlm-roberta", "verify": False}
    assert not any("written as" in note for note in convert(tmp_path / "ours", tmp_path / "third", **said).notes)
