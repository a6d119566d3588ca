"""Presets with replaced fields, in the sizes of published checkpoints, and with names that a config does not have."""

import pytest
import torch

import blockformer
from blockformer import preset
from blockformer.conversion.plan import architecture_of
from blockformer.declared_fields import NEEDS
from blockformer.model.axes import axes
from blockformer.model.positions import LEARNED, SINUSOIDAL
from blockformer.presets import PRESETS, SIZES
from blockformer.presets.dependent import FITS, outdated

# The parameters that the repos of these checkpoints have, as the Hub counts them; BERT's with its pooler and no head.
PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "llama-3.2-1b": 1_235_814_400,
    "gemma-3-1b": 999_885_952,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "roberta-base": 124_645_632,
    "roberta-large": 355_359_744,
    "modernbert-base": 149_014_272,
    "modernbert-large": 394_781_696,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "bart-base": 139_420_416,
    "bart-large": 406_291_456,
}
POSITIONS = ["learned", "sinusoidal", "rotary", "relative_bias", "relative_key", "none"]


@pytest.mark.parametrize("name", SIZES)
def test_a_published_size_has_the_parameters_of_the_checkpoint(name):
    config = preset(name)
    with torch.device("meta"):
        model = getattr(blockformer, architecture_of(config))(config)
    assert model.num_parameters() == PARAMETERS[name]


def test_all_names_are_listed_and_a_size_is_a_preset_like_another():
    assert preset() == sorted([*PRESETS, *SIZES])
    assert not PRESETS.keys() & SIZES.keys()
    config = preset("qwen3-0.6b", num_hidden_layers=2, hidden_size=64)
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim, config.qk_norm) == (2, 64, 128, True)
    with pytest.raises(ValueError, match=r"no preset is called 'qwen3-0\.6'\. Did you mean 'qwen3-0.6b'\?"):
        preset("qwen3-0.6")


@pytest.mark.parametrize("name", PRESETS)
def test_what_depends_on_a_replaced_field_goes_with_it(name):
    config_class, _ = PRESETS[name]
    usual = {field: axis.default for field, axis in axes(config_class).items()}
    others = [*POSITIONS, "alibi"] if config_class.is_decoder else POSITIONS
    for position_type in others:
        config = preset(name, position_type=position_type)
        assert (config.rope_parameters is None) == (position_type != "rotary")
        assert config.position_offset == 0 or position_type in (*LEARNED, *SINUSOIDAL)
    for placement in ("pre", "post", "output", "pre_output"):
        assert preset(name, norm_placement=placement).final_norm == (placement != "post")
    for norm_type in ("layer_norm", "rms_norm"):
        assert preset(name, norm_type=norm_type).norm_type == norm_type
    if "num_experts" in usual:
        assert preset(name, num_experts=0).num_experts == 0
        assert preset(name, sliding_window=None).layer_types.count("sliding_attention") == 0


def test_what_a_preset_says_stays_where_nothing_is_replaced():
    for name in PRESETS:
        config_class, settings = PRESETS[name]
        defaults = {field: axis.default for field, axis in axes(config_class).items()}
        assert all(settings[field] == defaults[field] for field in outdated(settings, (), defaults)), name
    assert [preset(name).position_offset for name in ("xglm", "m2m_100", "mpnet")] == [2, 2, 2]


def test_what_a_replaced_part_takes_with_it():
    assert preset("deepseek_v3", kv_lora_rank=None).q_lora_rank is None
    assert preset("deepseek_v3", num_expert_groups=0).experts_per_group_score == 0
    config = preset("deberta-v2", position_type="rotary")
    assert config.relative_attention_num_buckets == axes(type(config))["relative_attention_num_buckets"].default


def test_dependent_fields_are_fields():
    classes = [
        getattr(blockformer, f"Blockformer{topology}Config") for topology in ("Encoder", "Decoder", "EncoderDecoder")
    ]
    known = {name for config_class in classes for name in axes(config_class)}
    assert {*FITS} | {name for names, other, _ in NEEDS for name in (*names, other)} <= known


def test_what_was_given_stays_and_is_refused_where_it_contradicts():
    with pytest.raises(ValueError, match="rope_parameters is set but position_type is 'learned'"):
        preset("qwen3", position_type="learned", rope_parameters={"rope_theta": 5.0})
    assert preset("opt", position_type="learned").position_offset == 2
    assert preset("gemma2", norm_type="layer_norm").norm_weight == "zero_centered"


def test_a_name_that_no_preset_has_gets_a_hint():
    with pytest.raises(
        ValueError, match=r"'Qwen/Qwen3-0\.6B'\. Did you mean 'qwen3-0\.6b'\? preset\(\) lists all names, and from"
    ):
        preset("Qwen/Qwen3-0.6B")
    with pytest.raises(ValueError, match=r"has no field 'num_experts'\. It is a field of BlockformerDecoderConfig\."):
        preset("bert", num_experts=4)


def test_all_unknown_fields_are_named_at_once_and_official_names_with_ours():
    with pytest.raises(ValueError, match="has no field") as caught:
        preset("gpt2", n_embd=64, hiden_size=64, rms_norm_eps=1e-5, d_kv=8, zzz=1)
    text = str(caught.value)
    for name, ours in (("n_embd", "hidden_size"), ("rms_norm_eps", "norm_eps"), ("d_kv", "head_dim")):
        assert f"no field '{name}'. It is called '{ours}' here." in text
    assert "no field 'hiden_size'. Did you mean 'hidden_size'?" in text
    assert "no field 'zzz'." in text
    with pytest.raises(ValueError, match=r"'qk_nrom'\. Did you mean 'qk_norm'\?.* has no field 'zzz'\."):
        blockformer.BlockformerDecoderConfig(qk_nrom=True, zzz=1)


def test_groups_of_experts_stay_where_they_fit():
    assert preset("deepseek_v3").num_expert_groups == 2
    assert preset("deepseek_v3", num_experts=12, num_expert_groups=3).num_expert_groups == 3
    assert preset("deepseek_v3", num_experts=7).num_expert_groups == 0
    assert preset("deepseek_v2", num_experts_per_tok=9).experts_per_group_score == 0
    with pytest.raises(ValueError, match="num_expert_groups=3"):
        preset("deepseek_v3", num_expert_groups=3)
