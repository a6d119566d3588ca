"""T5 in all versions, mT5 and umT5: every head, both ways, and every way in which their checkpoints are written."""

import pytest
import torch

import blockformer
from blockformer.conversion import ConversionError, convert, from_official
from blockformer.conversion.families.registry import FAMILIES, family_for
from blockformer.conversion.storage.unused_tensors import UNUSED_FILE
from blockformer.summary import summarize

from .oracles import (
    T5_SIZES,
    assert_loads_as,
    assert_verified,
    edit_config,
    edit_tensors,
    entries_of,
    official_class,
    official_folder,
    official_model,
    stored,
    there_and_back,
)
from .outputs import WAYS_TO_WRITE, assert_same_outputs, nudged, same_text

T5 = ("t5", "mt5", "umt5")
VERSIONS = {
    "t5": {"feed_forward_proj": "relu"},
    "v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "silu": {"feed_forward_proj": "gated-silu", "num_decoder_layers": 3},
}
FIRST = FAMILIES["mt5"].heads[0]
HEADS = [(family, head) for family in T5 for head in FAMILIES[family].heads]
# The classes of mT5 are those of T5; its first head is asked for its names alone.
USUALLY = [
    pytest.param(*each, marks=[pytest.mark.exhaustive] if each[0] == "mt5" and each[1] is not FIRST else [])
    for each in HEADS
]
UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
SHARED = "shared.weight"


def name_of(value):
    return getattr(value, "ours", str(value))


def inputs(side="right", config=None):
    """A source of three rows, one of them padded, each with one end token at its end; and a target."""
    generator = torch.Generator().manual_seed(3)
    ids, mask = torch.randint(2, 97, (3, 30), generator=generator), torch.ones(3, 30, dtype=torch.long)
    gap = slice(0, 9) if side == "left" else slice(21, 30)
    ids[1, gap], mask[1, gap] = 0, 0
    ids[torch.arange(3), (torch.arange(30) * mask).argmax(-1)] = 1
    tensors = {"input_ids": ids, "attention_mask": mask}
    if config is None or config.is_encoder_decoder:
        tensors["decoder_input_ids"] = torch.randint(2, 97, (3, 30), generator=generator)
    return tensors


@pytest.mark.portable
@pytest.mark.versions
@pytest.mark.parametrize(("family", "head"), USUALLY, ids=name_of)
def test_every_head_there_and_back(tmp_path, family, head):
    src, dst, back = (tmp_path / name for name in ("src", "dst", "back"))
    model = official_folder(src, family, head.official)
    report = there_and_back(tmp_path, verify_back=family == "t5")  # the others' classes are the same
    assert report.parity.measured[0].same_text is (True if head.writes_text else None)
    assert report.notes == []

    ours = getattr(blockformer, head.ours).from_pretrained(dst)
    for side in ("left", "right"):
        assert_same_outputs(ours, model, inputs(side, ours.config), spread=0.1)
    assert_loads_as(back, model)

    (dst / "conversion.json").unlink()
    convert(dst, tmp_path / "fresh", to_official=True, family=family, verify=False)
    assert stored(tmp_path / "fresh") == stored(src)
    config_class = FAMILIES[family].settings.official_class
    configs = [config_class.from_pretrained(folder).to_dict() for folder in (tmp_path / "fresh", src)]
    if "EncoderDecoder" not in head.ours:  # what an encoder has no use for; the official classes do not agree on it
        for config in configs:
            config.pop("is_encoder_decoder"), config.pop("decoder_start_token_id", None)
    assert configs[0] == configs[1]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.exhaustive)], ids=str)
def test_versions_and_dtypes(tmp_path, version, dtype):
    src, dst, back = (tmp_path / name for name in ("src", "dst", "back"))
    official_folder(src, "t5", dtype=dtype, **VERSIONS[version])
    assert_verified(convert(src, dst))
    convert(dst, back, to_official=True, verify=False)
    assert stored(back) == stored(src)
    wide = from_official(src, dtype="float32")
    assert wide.config.logit_scale == (1.0 if version == "v1.1" else 48**-0.5)
    assert wide.config.gated_mlp is (version != "t5")
    assert wide.config.decoder_layers == (3 if version == "silu" else 2)
    assert wide.config.tie_word_embeddings
    half = from_official(src, dtype="float16")
    assert half.model.decoder.layers[0].mlp.down_proj.weight.dtype == torch.float32
    assert half.model.decoder.layers[0].mlp.up_proj.weight.dtype == torch.float16


@pytest.mark.versions
@pytest.mark.parametrize(
    ("family", "said"), [("t5", False), ("t5", True), ("mt5", False), ("umt5", False), ("umt5", True)]
)
def test_a_head_of_its_own(tmp_path, family, said):
    """Stored since it differs from the embeddings; configs of today say that it is tied, older ones that it is not."""
    src, dst, back = (tmp_path / name for name in ("src", "dst", "back"))
    official_folder(src, family, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    edit_tensors(src, **{"lm_head.weight": torch.randn(97, 48)})
    edit_config(src, tie_word_embeddings=said)
    model = official_class(family).from_pretrained(src).eval()
    assert model.lm_head.weight is not model.shared.weight
    assert_verified(convert(src, dst))
    ours = blockformer.BlockformerEncoderDecoderForConditionalGeneration.from_pretrained(dst)
    assert not ours.config.tie_word_embeddings
    assert ours.lm_head.weight is not ours.model.encoder.embed_tokens.weight
    assert ours.model.decoder.embed_tokens.weight is ours.model.encoder.embed_tokens.weight
    assert_same_outputs(ours, model, inputs("left"), spread=0.1)
    convert(dst, back, to_official=True, verify=False)
    assert stored(back) == stored(src)
    assert entries_of(back) == entries_of(src)
    (dst / "conversion.json").unlink()
    assert_verified(convert(dst, tmp_path / "fresh", to_official=True, verify="quick"))
    assert stored(tmp_path / "fresh") == stored(src)


@pytest.mark.parametrize(
    ("head", "names"),
    [
        ("ForConditionalGeneration", ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"]),
        ("ForConditionalGeneration", ["decoder.embed_tokens.weight"]),
        ("EncoderModel", ["encoder.embed_tokens.weight"]),
        ("Model", ["-shared.weight", "encoder.embed_tokens.weight"]),
        ("EncoderModel", ["-shared.weight", "encoder.embed_tokens.weight"]),
        ("ForConditionalGeneration", ["-shared.weight", "lm_head.weight", "decoder.embed_tokens.weight"]),
    ],
)
def test_embeddings_under_several_names(tmp_path, head, names):
    src, dst, back = (tmp_path / name for name in ("src", "dst", "back"))
    model = official_folder(src, "t5", head)
    changes = {name: model.shared.weight.detach() for name in names if name[0] != "-"}
    edit_tensors(src, **changes, **({SHARED: None} if names[0][0] == "-" else {}))
    assert_verified(convert(src, dst))
    assert from_official(src).config.tie_word_embeddings
    convert(dst, back, to_official=True, verify=False)
    assert stored(back) == stored(src)


def test_copies_that_differ_are_refused_by_name(tmp_path):
    official_folder(tmp_path / "src", "t5")
    edit_tensors(tmp_path / "src", **{"decoder.embed_tokens.weight": torch.randn(97, 48)})
    with pytest.raises(ConversionError, match=r"shared\.weight.*decoder\.embed_tokens\.weight"):
        convert(tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_what_old_checkpoints_hold(tmp_path):
    """The first T5: all copies, a bias that nothing reads, the class's old name, settings that no class knows."""
    src, dst, back = (tmp_path / name for name in ("src", "dst", "back"))
    model = official_folder(src, "t5")
    copies = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}
    edit_tensors(src, **dict.fromkeys(copies, model.shared.weight.detach()), **{UNUSED: torch.randn(12, 4)})
    edit_config(src, architectures=["T5WithLMHeadModel"], n_positions=512, dense_act_fn=..., is_gated_act=...)
    report = convert(src, dst)
    assert_verified(report)
    assert (dst / UNUSED_FILE).exists()
    convert(dst, back, to_official=True, verify=False)
    assert stored(back) == stored(src)
    assert entries_of(back) == entries_of(src)


@pytest.mark.parametrize("head", ["ForConditionalGeneration", "EncoderModel"])
def test_without_architectures_the_tensors_tell(tmp_path, head):
    official_folder(tmp_path / "src", "t5", head)
    edit_config(tmp_path / "src", architectures=...)
    wanted = "BlockformerEncoderModel" if head == "EncoderModel" else f"BlockformerEncoderDecoder{head}"
    assert type(from_official(tmp_path / "src")).__name__ == wanted


@pytest.mark.parametrize("family", T5)
def test_the_same_text_in_every_way(tmp_path, family):
    official_folder(tmp_path / "src", family, initializer_factor=1.6)
    theirs = official_class(family).from_pretrained(tmp_path / "src").eval()
    ours = from_official(tmp_path / "src")
    assistant = nudged(from_official(tmp_path / "src"))
    for side in ("left", "right") if family == "t5" else ("right",):
        source = inputs(side)
        del source["decoder_input_ids"]
        for settings in WAYS_TO_WRITE:
            text = same_text(ours, theirs, **source, max_new_tokens=20, **settings)
            assert len({tuple(row) for row in text.tolist()}) > 1
        single = {name: tensor[:1] for name, tensor in source.items()}
        plain = theirs.generate(**single, max_new_tokens=20, do_sample=False)
        assisted = ours.generate(**single, max_new_tokens=20, do_sample=False, assistant_model=assistant)
        assert torch.equal(assisted, plain)


@pytest.mark.parametrize("family", T5)
@pytest.mark.parametrize(
    "changes",
    [
        {"feed_forward_proj": "gated-relu", "dropout_rate": 0.25, "classifier_dropout": 0.5},
        {"layer_norm_epsilon": 1e-5, "use_cache": False, "eos_token_id": 3, "pad_token_id": 2},
        {"num_decoder_layers": 5, "relative_attention_max_distance": 64, "d_kv": 8},
        {"decoder_start_token_id": 7, "dtype": "bfloat16", "problem_type": "regression"},
    ],
)
def test_every_setting_there_and_back(family, changes):
    chosen = FAMILIES[family]
    entries = {"model_type": family, "architectures": [chosen.heads[0].official], **T5_SIZES, **changes}
    config = chosen.settings.our_config(chosen.config_from(entries))
    again = type(config).from_dict(config.to_dict())
    assert again.to_dict() == config.to_dict()
    before = chosen.settings.official_class.from_dict(dict(entries)).to_dict()
    after = chosen.settings.official_class.from_dict(chosen.config_to(config)).to_dict()
    assert {**after, "_name_or_path": ""} == {**before, "_name_or_path": ""}


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("t5", {"attention_scale": None}, "attention_scale must be 1.0"),
        ("t5", {"hidden_dropout": 0.2}, "attention_dropout must be 0.2, not 0.1"),
        ("t5", {"share_embeddings": False}, "share_embeddings must be True"),
        ("t5", {"logit_scale": 0.5}, "logit_scale must be 0.14"),
        ("t5", {"num_key_value_heads": 2}, "num_key_value_heads must be 4"),
        ("t5", {"relative_bias_per_layer": True}, "relative_bias_per_layer must be False"),
        ("mt5", {"logit_scale": 48**-0.5}, "logit_scale must be 1.0"),
        ("umt5", {"relative_bias_per_layer": False}, "relative_bias_per_layer must be True"),
        ("t5", {"architectures": ["BlockformerDecoderForCausalLM"]}, "architectures must be one of"),
    ],
)
def test_what_a_family_cannot_express_is_named(family, changes, named):
    small = {"vocab_size": 97, "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = blockformer.preset(family, **{**small, **changes})
    with pytest.raises(ConversionError, match=named):
        FAMILIES[family].config_to(config)


def test_the_family_follows_from_the_settings():
    small = {"vocab_size": 97, "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    for name, wanted in (("t5", "t5"), ("t5-v1.1", "t5"), ("mt5", "t5"), ("umt5", "umt5")):
        assert family_for(blockformer.preset(name, **small)).name == wanted
    assert family_for(blockformer.preset("bert")).name == "bert"


def test_quantized_checkpoints_and_other_heads_are_refused(tmp_path):
    official_folder(tmp_path / "src", "t5")
    edit_config(tmp_path / "src", quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(ConversionError, match="quantization_config"):
        convert(tmp_path / "src", tmp_path / "dst")
    edit_config(tmp_path / "src", quantization_config=..., architectures=["T5ForMagic"])
    with pytest.raises(ConversionError, match=r"T5ForMagic.*T5ForConditionalGeneration"):
        convert(tmp_path / "src", tmp_path / "dst")


def test_inspecting_an_official_config(tmp_path):
    official_folder(tmp_path / "src", "t5", num_decoder_layers=3)
    summary = summarize(tmp_path / "src")
    assert summary.parameters == official_model("t5", num_decoder_layers=3).num_parameters()
    # Keys and values of self-attention in the decoder's three layers.
    assert summary.cache["float32"] == 2 * 3 * 4 * 16 * 4
