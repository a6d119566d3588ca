"""The configuration: what it settles, what it refuses and in which words, and that a file gives it back exactly."""

import dataclasses
import importlib
import inspect
import json
import math
import os
import re
import typing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import CHOICES
from transformers import AutoConfig

import blockformer
from blockformer import BlockformerDecoderConfig, preset
from blockformer.model.axes import Part, axes, axis, parts_of
from blockformer.model.release import FORMAT, STAMP
from blockformer.model.rotary import ROPE_TYPES
from blockformer.summary import shown_settings

ROPE_EXTRAS = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "short_factor": [1.0] * 32,
        "long_factor": [2.0] * 32,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
    },
    "proportional": {"partial_rotary_factor": 0.25},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def test_none_is_settled_by_the_other_fields():
    config = BlockformerDecoderConfig(hidden_size=96, num_attention_heads=6, norm_type="layer_norm", sliding_window=8)
    assert (config.head_dim, config.num_key_value_heads) == (16, 6)
    assert (config.norm_bias, config.final_norm) == (True, True)
    assert config.layer_types == ["sliding_attention"] * 8
    post = BlockformerDecoderConfig(norm_placement="post")
    assert (post.norm_bias, post.final_norm) == (False, False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer, not 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
        ({"vocab_size": -1}, "vocab_size must be a positive integer"),
        ({"vocab_size": "32000"}, "vocab_size must be a positive integer, not '32000'"),
        ({"hidden_size": 512.0}, "hidden_size must be a positive integer"),
        ({"hidden_size": True}, "hidden_size must be a positive integer"),
        ({"hidden_size": 100, "num_attention_heads": 8}, "(100) is not a multiple of num_attention_heads (8)"),
        ({"num_key_value_heads": 3}, "num_attention_heads (8) is not a multiple of num_key_value_heads (3)"),
        ({"head_dim": 33}, "head_dim (33) must be even with rotary positions"),
        ({"layer_types": ["full_attention"]}, "layer_types must list one type for each of the 8 layers"),
        ({"layer_types": ["fulll_attention"] * 8}, "Did you mean 'full_attention'?"),
        ({"layer_types": ["sliding_attention"] * 8}, "sliding_window is None"),
        ({"sliding_window": 4, "layer_types": ["full_attention"] * 8}, "layer_types has no 'sliding_attention'"),
        ({"sliding_window": 0}, "sliding_window must be an integer above 1"),
        ({"sliding_window": 1}, "sliding_window must be an integer above 1, not 1"),
        ({"sliding_window": 4, "position_type": "relative_bias"}, "sliding_window is not supported with"),
        ({"norm_eps": 0.0}, "norm_eps must be a positive number"),
        ({"norm_eps": math.nan}, "norm_eps must be a positive number, not nan"),
        ({"norm_eps": "1e-6"}, "norm_eps must be a positive number"),
        ({"initializer_range": math.inf}, "initializer_range must be a positive number"),
        ({"attention_dropout": 1.5}, "attention_dropout must be a probability from 0 to 1, not 1.5"),
        ({"hidden_dropout": -0.1}, "hidden_dropout must be a probability"),
        ({"classifier_dropout": "0.1"}, "classifier_dropout must be a probability"),
        ({"attention_scale": -1.0}, "attention_scale must be a positive number"),
        ({"hidden_act": "sillu"}, "Did you mean 'silu'?"),
        ({"rope_parameters": {"rope_type": "yarm"}}, "Did you mean 'yarn'?"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters of type 'linear' need 'factor'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor must be a positive number"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": math.nan}}, "rope_theta must be a positive number"),
        ({"rope_theta": -1.0}, "rope_theta must be a positive number"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "times partial_rotary_factor, 96, must be even"),
        ({"rope_parameters": "default"}, "rope_parameters must be a dict"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor must list 32 numbers",
        ),
        ({"position_type": "learned", "rope_theta": 1e4}, "rope_theta is set but position_type is 'learned'"),
        ({"position_type": "rotery"}, "Did you mean 'rotary'?"),
        ({"norm_type": "layernorm"}, "Did you mean 'layer_norm'?"),
        ({"norm_placement": "sandwich"}, "norm_placement must be one of pre, post"),
        ({"norm_bias": True}, "an RMS norm has no bias"),
        ({"norm_placement": "post", "final_norm": True}, "set final_norm=False"),
        ({"is_decoder": False}, "is_decoder=False contradicts BlockformerDecoderConfig"),
        ({"token_embedding_size": 0}, "token_embedding_size must be a positive integer, not 0"),
        (
            {"token_embedding_size": 64, "embedding_size": 128},
            "embedding_size (128) is not hidden_size (512): make them equal, which an encoder-decoder and token_emb",
        ),
        ({"pooler_act": "tanh"}, "pooler_act needs an encoder"),
        ({"pooler_act": "tanhh"}, "Did you mean 'tanh'?"),
        ({"type_vocab_size": -1}, "type_vocab_size must be an integer of 0 or more"),
        ({"chunk_size_feed_forward": -4}, "chunk_size_feed_forward must be an integer of 0 or more"),
        ({"qk_norm": 1}, "qk_norm must be one of true, false, per_head, projection, rotated, not 1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be a positive integer"),
        ({"relative_attention_num_buckets": 1}, "relative_attention_num_buckets must be an integer above 1"),
        ({"dtype": "bfloat61"}, "Did you mean 'bfloat16'?"),
        ({"torch_dtype": "float"}, "dtype must be one of"),
        ({"pad_token_id": 32000}, "pad_token_id must be a token from 0 to 31999, not 32000"),
        ({"bos_token_id": -1}, "bos_token_id must be a token"),
        ({"pad_token_id": -1}, "pad_token_id must be a token"),
        ({"eos_token_id": [2, 99999]}, "eos_token_id must be a token from 0 to 31999, not 99999"),
        ({"hidden_sise": 512}, "has no field 'hidden_sise'. Did you mean 'hidden_size'?"),
        ({"zzz": 1}, "BlockformerDecoderConfig has no field 'zzz'."),
        ({"per_layer_config": {0: {"intermediate_size": 64}}}, "has no field 'per_layer_config'"),
        ({"vocab_size": 10**12}, "1.5e+15 parameters, more than 1e+13"),
    ],
)
def test_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        BlockformerDecoderConfig(**fields)


CLASSES = (
    blockformer.BlockformerEncoderConfig,
    blockformer.BlockformerDecoderConfig,
    blockformer.BlockformerEncoderDecoderConfig,
)


@pytest.mark.parametrize("config_class", CLASSES)
def test_help_shows_every_field_with_its_meaning(config_class):
    text = inspect.getdoc(config_class)
    for name, declared in axes(config_class).items():
        assert f"    {name} (" in text
        assert f"default {declared.default!r}): {declared.meaning}." in text
    assert "\nArgs:\n" in text
    assert "\n    vocab_size (a positive integer; default 32000): tokens of the vocabulary, V.\n" in text


def test_one_declaration_drives_checks_docstring_and_summary():
    class WithOneMore(BlockformerDecoderConfig):
        """A config with two fields that were made up here."""

        model_type = "with_one_more"
        made_up_axis: str = axis("plain", ("plain", "fancy"), "norm", "nothing at all")
        made_up_number: float | None = axis(None, "a positive number", "norm", "nothing either")

    assert WithOneMore(made_up_axis="fancy").made_up_axis == "fancy"
    with pytest.raises(ValueError, match=r"must be one of plain, fancy, not 'fanci'\. Did you mean 'fancy'"):
        WithOneMore(made_up_axis="fanci")
    with pytest.raises(ValueError, match="made_up_number must be a positive number, not 0"):
        WithOneMore(made_up_number=0)
    assert "made_up_axis (plain, fancy; default 'plain'): nothing at all." in WithOneMore.__doc__
    assert axes(WithOneMore)["made_up_number"] == (None, "a positive number", "norm", "nothing either", True)
    assert shown_settings(WithOneMore())["norm"]["made_up_axis"] == "plain"
    assert WithOneMore.from_dict(WithOneMore(made_up_axis="fancy").to_dict()).made_up_axis == "fancy"


def test_a_vocabulary_of_its_own_needs_embeddings_of_its_own():
    with pytest.raises(ValueError, match="decoder_vocab_size is set but share_embeddings is True"):
        blockformer.BlockformerEncoderDecoderConfig(decoder_vocab_size=100)


# By what a field is annotated with: values of another kind, each of which Python would take.
WRONG = {
    int: ["3", 1.5, True, -1, math.nan, [2]],
    float: ["0.5", True, -0.5, math.nan, math.inf, [0.5]],
    bool: [1, 0, "true", "no", 0.0],
    str: [3, True, ["silu"], ""],
}


@pytest.mark.parametrize("config_class", CLASSES)
def test_every_field_refuses_values_of_another_kind(config_class):
    taken, count = [], 0
    kinds_of = {field.name: typing.get_args(field.type) or (field.type,) for field in dataclasses.fields(config_class)}
    for name in axes(config_class):
        kinds = kinds_of[name]
        wanted = next((each for each in WRONG if each in kinds), None)
        if wanted is None:
            continue
        values = [value for value in WRONG[wanted] if (name, value) != ("linear_group_size", -1)]  # one group for all
        values += [] if type(None) in kinds else [None]
        for value in (value for value in values if not (isinstance(value, list) and list in kinds)):
            count += 1
            try:
                config_class(**{name: value})
                taken.append((name, value))
            except Exception as refusal:  # of the base class, for a field that it has too
                taken += [] if name in str(refusal) else [(name, value, str(refusal))]
    assert not taken
    assert count > 200


def test_a_model_larger_than_the_machine_can_still_be_described():
    config = preset(
        "qwen3", hidden_size=5120, num_hidden_layers=40, num_attention_heads=40, num_key_value_heads=8, head_dim=128,
        intermediate_size=17408, vocab_size=151936,
    )  # fmt: skip
    with torch.device("meta"):
        model = blockformer.BlockformerDecoderForCausalLM(config)
    assert sum(parameter.numel() for parameter in model.parameters()) > 14e9


@pytest.mark.parametrize("name", sorted(blockformer.PRESETS))
def test_presets_are_configs_and_survive_a_file(name, tmp_path):
    config = preset(name, num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is type(config)
    assert again.to_json_string() == config.to_json_string()


def test_an_unknown_preset_names_the_near_one():
    with pytest.raises(ValueError, match="Did you mean 'qwen3'"):
        preset("qwen33")


settled = st.fixed_dictionaries(
    {
        "num_attention_heads": st.sampled_from([2, 4, 8]),
        "norm_type": st.sampled_from(CHOICES["norm_type"]),
        "norm_placement": st.sampled_from(CHOICES["norm_placement"]),
        "position_type": st.sampled_from([name for name in CHOICES["position_type"] if name != "disentangled"]),
        "gated_mlp": st.booleans(),
        "qk_norm": st.booleans(),
        "attention_bias": st.booleans(),
        "norm_eps": st.floats(1e-8, 1e-2),
        "attention_scale": st.none() | st.floats(0.1, 2.0),
        "hidden_dropout": st.floats(0, 1),
        "eos_token_id": st.none() | st.integers(0, 99) | st.lists(st.integers(0, 99), min_size=1, max_size=3),
        "dtype": st.sampled_from([None, "float32", "bfloat16"]),
        "num_labels": st.integers(2, 5),
    }
)


@settings(max_examples=40, deadline=None)
@given(fields=settled)
def test_json_round_trip_is_exact(fields, tmp_path_factory):
    folder = tmp_path_factory.mktemp("config")
    config = BlockformerDecoderConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2, **fields)
    config.save_pretrained(folder)
    text = (folder / "config.json").read_text()
    for again in (BlockformerDecoderConfig.from_pretrained(folder), AutoConfig.from_pretrained(folder)):
        assert type(again) is BlockformerDecoderConfig
        assert again.to_json_string() == config.to_json_string() == text
        for name, value in fields.items():
            assert str(getattr(again, name)).removeprefix("torch.") == str(value).removeprefix("torch.")


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_rope_parameters_survive_a_file_and_leave_the_callers_dict_alone(rope_type, tmp_path):
    rope = {"rope_type": rope_type, "rope_theta": 5e5, **ROPE_EXTRAS[rope_type]}
    given_copy = json.loads(json.dumps(rope))
    config = BlockformerDecoderConfig(rope_parameters=rope)
    assert rope == given_copy
    config.save_pretrained(tmp_path)
    assert BlockformerDecoderConfig.from_pretrained(tmp_path).rope_parameters == config.rope_parameters
    assert config.rope_parameters["rope_theta"] == 5e5


def test_rope_under_its_old_names():
    config = BlockformerDecoderConfig(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    assert config.rope_parameters["rope_type"] == "linear"
    assert config.rope_parameters["rope_theta"] == 5e5


def test_every_field_is_written_to_the_file_unless_it_is_off(tmp_path):
    """Also those at their default, so that a later default changes no saved model."""
    BlockformerDecoderConfig().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    config = BlockformerDecoderConfig()
    for name in ("hidden_act", "norm_eps", "gated_mlp", "position_type", "layer_types", "final_norm", "logit_scale"):
        assert written[name] == getattr(config, name)
    assert written["auto_map"]["AutoModelForCausalLM"] == "modeling_decoder.BlockformerDecoderForCausalLM"
    assert set(written["auto_map"]) == set(BlockformerDecoderConfig.auto_classes)
    assert not written.keys() & {"qk_norm", "attention_sinks", "sliding_window", "num_experts", "hidden_dropout"}
    on = {"qk_norm": True, "attention_sinks": True, "sliding_window": 8, "num_experts": 4, "hidden_dropout": 0.1}
    BlockformerDecoderConfig(**on).save_pretrained(tmp_path)
    assert on.items() <= json.loads((tmp_path / "config.json").read_text()).items()


def test_the_file_says_which_release_wrote_it_and_a_later_one_is_named(tmp_path):
    config = BlockformerDecoderConfig(qk_norm=True)
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    assert (written["blockformer_version"], written["blockformer_format"]) == (blockformer.__version__, FORMAT)
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.to_diff_dict() == config.to_diff_dict()
    assert not STAMP.keys() & vars(again).keys()
    later = {**written, "blockformer_version": "7.1.0"}
    path.write_text(json.dumps(later))
    assert AutoConfig.from_pretrained(tmp_path).to_diff_dict() == config.to_diff_dict()
    for entries, named in (
        ({"new_block": 3}, "new_block"),
        ({"blockformer_format": FORMAT + 1}, f"format {FORMAT + 1}"),
    ):
        path.write_text(json.dumps(later | entries))
        told = rf"Blockformer 7\.1\.0 wrote .* does not know '{named}': install blockformer 7\.1\.0 or later"
        with pytest.raises(ValueError, match=told):
            AutoConfig.from_pretrained(tmp_path)
    for number in ("1", -1.5, [1]):
        path.write_text(json.dumps(later | {"blockformer_format": number}))
        with pytest.raises(ValueError, match="does not know 'format"):
            AutoConfig.from_pretrained(tmp_path)


def test_a_file_that_names_code_on_the_hub_is_saved_with_its_own(tmp_path):
    """transformers writes `user/repo--file.Class` into the config of a repo that it loads from the Hub."""
    moving = {name: f"somebody/repo--{code}" for name, code in BlockformerDecoderConfig.auto_classes.items()}
    BlockformerDecoderConfig(auto_map=moving).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == BlockformerDecoderConfig.auto_classes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"hidden_size": 64, "hidden_size": 128}', "the key 'hidden_size' appears twice"),
        ('{"norm_eps": NaN}', "NaN is not a JSON value"),
        ('{"norm_eps": -Infinity}', "-Infinity is not a JSON value"),
        ('{"hidden_size": 64', "not valid JSON"),
        ("[1, 2]", "must hold a JSON object"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_malformed_file_is_refused_by_name(text, message, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises((ValueError, OSError)) as refusal:
        BlockformerDecoderConfig.from_pretrained(tmp_path)
    assert "config.json" in str(refusal.value)
    assert message in str(refusal.value) or "not a valid JSON file" in str(refusal.value)


def test_unknown_fields_in_a_file_are_refused(tmp_path):
    BlockformerDecoderConfig(qk_norm=True).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"qk_norm"', '"qk_nrom"'))
    with pytest.raises(ValueError, match=r"has no field 'qk_nrom'\. Did you mean 'qk_norm'\?"):
        AutoConfig.from_pretrained(tmp_path)


def test_num_labels_and_names():
    config = BlockformerDecoderConfig(num_labels=3)
    assert config.num_labels == 3
    named = BlockformerDecoderConfig(id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1})
    assert named.num_labels == 2


@pytest.mark.parametrize(
    ("preset", "field"),
    [
        *(("deepseek_v3", name) for name in "kv_lora_rank q_lora_rank v_head_dim moe_intermediate_size".split()),
        ("deepseek_v3", "shared_expert_intermediate_size"),
        ("ernie", "task_type_vocab_size"),
    ],
)
def test_every_width_has_a_bound(preset, field):
    with pytest.raises(ValueError, match="more than 1e\\+13"):
        blockformer.preset(preset, **{field: 2**40})


@pytest.mark.parametrize("pages", [1 << 14, 1 << 34])
def test_what_is_valid_is_the_same_on_every_machine(pages, monkeypatch):
    """On one of 64 MiB and on one of 64 TiB."""
    monkeypatch.setattr(os, "sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else pages)
    large = {"hidden_size": 16384, "intermediate_size": 65536, "num_attention_heads": 128}
    assert BlockformerDecoderConfig(**large, num_hidden_layers=200, num_labels=100_000).num_hidden_layers == 200
    with pytest.raises(ValueError, match="more than 1e\\+13: check vocab_size"):
        BlockformerDecoderConfig(**large, num_hidden_layers=9_000)
    with pytest.raises(ValueError, match=r"num_hidden_layers \(100001\) must be at most 100,000"):
        BlockformerDecoderConfig(num_hidden_layers=100_001)
    with pytest.raises(ValueError, match=r"num_labels \(4000001\) must be at most 4,000,000"):
        BlockformerDecoderConfig(num_labels=4_000_001)


def test_every_part_of_a_config_is_asked_and_a_config_has_the_last_word():
    """Whatever `check` a base has runs, in one order, although none of them calls another."""
    seen = []

    @dataclasses.dataclass(eq=False, repr=False)
    class First(Part):
        def check(self):
            seen.append("first")

    class WithParts(First, BlockformerDecoderConfig):
        """A config with a part of its own."""

        model_type = "with_parts"

        def check(self):
            seen.append("config")

    WithParts()
    assert seen == ["first", "config"]
    assert [part.__name__ for part in parts_of(WithParts, "check")[-2:]] == ["First", "WithParts"]
    with pytest.raises(ValueError, match="final_norm=True with norm_placement='post'"):
        WithParts(norm_placement="post", final_norm=True)


def test_annotations_that_are_strings_leave_a_field_optional(tmp_path, monkeypatch):
    """As `from __future__ import annotations` makes them."""
    words = """
from __future__ import annotations
from blockformer import BlockformerDecoderConfig
from blockformer.model.axes import axis

class Postponed(BlockformerDecoderConfig):
    'A config whose annotations are strings.'
    model_type = 'postponed'
    made_up: float | None = axis(2.0, 'a positive number', 'norm', 'nothing')
    needed: float = axis(2.0, 'a positive number', 'norm', 'nothing')
"""
    (tmp_path / "postponed_annotations.py").write_text(words)
    monkeypatch.syspath_prepend(tmp_path)
    config_class = importlib.import_module("postponed_annotations").Postponed
    assert config_class(made_up=None).made_up is None
    with pytest.raises(ValueError, match="made_up must be a positive number, not -1"):
        config_class(made_up=-1)
    with pytest.raises(ValueError, match="needed must be a positive number, not None"):
        config_class(needed=None)


def test_a_field_of_an_unknown_kind_is_refused_where_it_is_declared():
    with pytest.raises(KeyError, match=r"'a positive intger' is not one of axes\.KINDS"):
        axis(1, "a positive intger", "norm", "nothing")
