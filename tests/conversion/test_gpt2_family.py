"""GPT-2: every head, both ways, and every way in which its checkpoints are written."""

import json

import pytest
import torch
import transformers
from fork_server import program
from pairs import assert_close, assert_gradients_close
from safetensors.torch import load_file

import blockformer
from blockformer.conversion import ConversionError, convert, export_folder, from_official
from blockformer.conversion.families.registry import FAMILIES, family_for
from blockformer.conversion.probes import probes, run
from blockformer.conversion.storage.unused_tensors import UNUSED_FILE
from blockformer.conversion.storage.variant import CheckpointVariant
from blockformer.conversion.verify import compare
from blockformer.summary import summarize

from .oracles import (
    GPT2_SIZES,
    assert_loads_as,
    assert_verified,
    edit_config,
    edit_tensors,
    entries_of,
    fingerprint,
    labels_of,
    name_of,
    official_folder,
    stored,
    there_and_back,
    under_another_head,
)
from .outputs import WAYS_TO_WRITE, assert_same_outputs, nudged, padded, same_text

GPT2 = FAMILIES["gpt2"]
LENGTH = 20
LM = "GPT2LMHeadModel"
WTE = "transformer.wte.weight"


every_head = pytest.mark.parametrize("head", GPT2.heads, ids=name_of)


def gpt2_folder(folder, name=LM, **settings):
    return official_folder(folder, "gpt2", name, **settings)


def without_prefix(tensors):
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


def with_prefix(tensors):
    return {f"transformer.{name}": tensor for name, tensor in tensors.items()}


def masks(root, dtype=torch.uint8, size=64, layers=2):
    """What the first checkpoints hold beside their weights."""
    causal = torch.ones(size, size).tril().to(dtype)[None, None]
    return {f"{root}h.{layer}.attn.bias": causal for layer in range(layers)} | {
        f"{root}h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(layers)
    }


def assert_same_padded(ours, theirs):
    """The same outputs with padding on either side."""
    for side in ("left", "right"):
        assert_same_outputs(ours, theirs, padded(3, side), spread=0.3)


@pytest.mark.portable
@pytest.mark.versions
@every_head
def test_every_head_there_and_back(tmp_path, head):
    model = gpt2_folder(tmp_path / "src", head.official)
    before = fingerprint(tmp_path / "src")
    report = there_and_back(tmp_path, verify_back=True)
    assert report.parity.measured[0].same_text is (True if head.official == LM else None)
    assert report.notes == []
    assert fingerprint(tmp_path / "src") == before
    assert not (tmp_path / "dst" / UNUSED_FILE).exists()
    ours = getattr(blockformer, head.ours).from_pretrained(tmp_path / "dst")
    assert_same_padded(ours, model)
    assert_loads_as(tmp_path / "back", model)

    (tmp_path / "dst/conversion.json").unlink()
    convert(tmp_path / "dst", tmp_path / "fresh", to_official=True, verify=False)
    assert stored(tmp_path / "fresh") == stored(tmp_path / "src")
    before, after = (transformers.GPT2Config.from_pretrained(tmp_path / name).to_dict() for name in ("src", "fresh"))
    assert after == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_smaller_dtypes(tmp_path, dtype):
    gpt2_folder(tmp_path / "src", dtype=dtype)
    report = there_and_back(tmp_path)
    assert [measured.dtype for measured in report.parity.measured] == [str(dtype)[6:], "float32"]
    assert from_official(tmp_path / "src").dtype == dtype


def test_a_cast_on_the_way(tmp_path):
    gpt2_folder(tmp_path / "src")
    edit_tensors(tmp_path / "src", lambda tensors: without_prefix(tensors) | masks("", torch.float32))
    assert_verified(convert(tmp_path / "src", tmp_path / "dst", dtype="bfloat16"))
    assert_verified(convert(tmp_path / "dst", tmp_path / "back", to_official=True, dtype="bfloat16"))
    assert {dtype for dtype, _, _ in stored(tmp_path / "back").values()} == {"BF16"}
    # The masks were cast too, and are still what they must be: -10000 is -9984 there.
    assert_verified(convert(tmp_path / "back", tmp_path / "again"))


def test_the_model_in_memory_is_the_one_that_is_written(tmp_path):
    """Its tensors are laid out as a loaded model's, and each has its own memory."""
    gpt2_folder(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "dst", verify=False)
    ours = from_official(tmp_path / "src")
    loaded = blockformer.BlockformerDecoderForCausalLM.from_pretrained(tmp_path / "dst")
    for (name, one), other in zip(ours.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(one, other), name
        assert one.is_contiguous(), name
        assert one.untyped_storage().nbytes() == one.nbytes, name
    ours.save_pretrained(tmp_path / "saved")
    assert stored(tmp_path / "saved") == stored(tmp_path / "dst")


# The ways in which checkpoints have been written.


@pytest.mark.versions
@pytest.mark.parametrize(
    "dtype",
    [torch.bool, *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in (torch.uint8, torch.float32))],
    ids=str,
)
def test_the_first_checkpoint(tmp_path, dtype):
    """As `gpt2`: no prefix, although it says GPT2LMHeadModel; a mask in each layer; settings of those days."""
    model = gpt2_folder(tmp_path / "src")
    edit_tensors(tmp_path / "src", lambda tensors: without_prefix(tensors) | masks("", dtype))
    days = {"n_ctx": 64, "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}}
    edit_config(tmp_path / "src", **days, predict_special_tokens=True, reorder_and_upcast_attn=..., dtype=...)
    report = there_and_back(tmp_path)
    assert report.notes == [
        "config.json: settings that gpt2 does not use: 'n_ctx', 'predict_special_tokens', 'task_specific_params' "
        "(kept in config.json, for other libraries)"
    ]
    assert set(load_file(tmp_path / "dst" / UNUSED_FILE)) == set(masks(""))
    assert_same_padded(from_official(tmp_path / "src"), model)
    assert_same_padded(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "back").eval(), model)

    export_folder(tmp_path / "dst", tmp_path / "copy")
    convert(tmp_path / "copy", tmp_path / "back2", to_official=True, verify=False)
    assert stored(tmp_path / "back2") == stored(tmp_path / "src")
    (tmp_path / "copy/conversion.json").unlink()
    convert(tmp_path / "copy", tmp_path / "modern", to_official=True)
    assert set(stored(tmp_path / "modern")) == set(model.state_dict()) - {"lm_head.weight"}


@every_head
@pytest.mark.parametrize("kept", [False, True], ids=["bare", "masks"])
def test_the_other_spelling_of_every_head(tmp_path, head, kept):
    """A head without the prefix that its class has today, the stack alone with one that it does not have."""
    model = gpt2_folder(tmp_path / "src", head.official)
    root = "transformer." if head.bare else ""
    change = with_prefix if head.bare else without_prefix
    edit_tensors(tmp_path / "src", lambda tensors: change(tensors) | (masks(root) if kept else {}))
    there_and_back(tmp_path)
    assert_same_padded(from_official(tmp_path / "src"), model)
    edit_tensors(tmp_path / "src", lambda tensors: {**tensors, "mystery.weight": torch.ones(2)})
    with pytest.raises(ConversionError, match=r"no rule takes \(1\):\n  'mystery\.weight'"):
        convert(tmp_path / "src", tmp_path / "dst2")
    both = ("transformer.ln_f.bias", "ln_f.bias")
    edit_tensors(tmp_path / "src", lambda tensors: tensors | dict.fromkeys(both, torch.ones(48)))
    with pytest.raises(ConversionError, match=r"two ways to name[\s\S]*ln_f\.bias"):
        convert(tmp_path / "src", tmp_path / "dst2")


def test_masks_under_the_names_of_today(tmp_path):
    gpt2_folder(tmp_path / "src", "GPT2ForTokenClassification")
    edit_tensors(tmp_path / "src", lambda tensors: tensors | masks("transformer.", torch.float32))
    there_and_back(tmp_path)
    assert set(load_file(tmp_path / "dst" / UNUSED_FILE)) == set(masks("transformer."))


CAUSAL = torch.ones(1, 1, 8, 8).tril()


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("h.1.attn.bias", torch.ones(1, 1, 8, 8)),
        ("h.1.attn.bias", CAUSAL.transpose(2, 3).contiguous()),
        ("h.1.attn.bias", CAUSAL * 2),
        ("h.1.attn.bias", CAUSAL[0, 0]),
        ("h.1.attn.bias", CAUSAL[:, :, :5].contiguous()),
        ("h.1.attn.bias", CAUSAL.expand(1, 2, 8, 8).contiguous()),
        ("h.1.attn.bias", torch.tensor(1.0)),
        ("h.1.attn.bias", torch.ones(1, 1, 1, 3_000_000)),
        ("h.1.attn.masked_bias", torch.tensor(0.0)),
        ("h.1.attn.masked_bias", torch.tensor(-1e4 - 8)),
        ("h.1.attn.masked_bias", torch.tensor(-10000)),
        ("h.1.attn.masked_bias", torch.full((2,), -1e4)),
        ("h.1.attn.masked_bias", torch.zeros(0)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_mask_is_refused(tmp_path, name, tensor):
    root = "transformer." if tensor.dim() < 4 else ""
    gpt2_folder(tmp_path / "src")
    change = (lambda tensors: tensors) if root else without_prefix
    edit_tensors(tmp_path / "src", lambda tensors: change(tensors) | masks(root) | {root + name: tensor})
    with pytest.raises(ConversionError, match=rf"cannot be left out:\n  '{root}{name}' is not .*[^\n]$"):
        convert(tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()
    with pytest.raises(ConversionError, match=name):
        from_official(tmp_path / "src")


def test_a_stored_copy_of_the_head(tmp_path):
    model = gpt2_folder(tmp_path / "src")
    edit_tensors(tmp_path / "src", lambda tensors: {**tensors, "lm_head.weight": tensors[WTE]})
    there_and_back(tmp_path)
    ours = from_official(tmp_path / "src")
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    assert_same_padded(ours, model)
    edit_tensors(tmp_path / "src", lambda tensors: {**tensors, "lm_head.weight": tensors[WTE] + 1})
    with pytest.raises(ConversionError, match=r"config ties these tensors[\s\S]*lm_head\.weight"):
        convert(tmp_path / "src", tmp_path / "dst2")


@pytest.mark.parametrize("bare", [False, True], ids=["prefix", "bare"])
def test_a_head_of_its_own(tmp_path, bare):
    model = gpt2_folder(tmp_path / "src", tie_word_embeddings=False)
    if bare:
        edit_tensors(tmp_path / "src", without_prefix)
    there_and_back(tmp_path)
    ours = blockformer.BlockformerDecoderForCausalLM.from_pretrained(tmp_path / "dst")
    assert not torch.equal(ours.lm_head.weight, ours.model.embed_tokens.weight)
    assert_same_padded(ours, model)
    (tmp_path / "dst/conversion.json").unlink()
    assert_verified(convert(tmp_path / "dst", tmp_path / "fresh", to_official=True, verify="quick"))
    assert set(stored(tmp_path / "fresh")) == set(model.state_dict())
    edit_tensors(tmp_path / "src", lambda tensors: {n: t for n, t in tensors.items() if n != "lm_head.weight"})
    if bare:  # as the stack by itself is saved
        assert any("converted as GPT2Model" in note for note in convert(tmp_path / "src", tmp_path / "dst2").notes)
        return
    with pytest.raises(ConversionError, match=r"nothing fills[\s\S]*lm_head\.weight"):
        convert(tmp_path / "src", tmp_path / "dst2")


@every_head
def test_without_architectures_the_tensors_tell(tmp_path, head):
    gpt2_folder(tmp_path / "src", head.official)
    edit_config(tmp_path / "src", architectures=...)
    wanted = GPT2.heads[0].ours if head.bare else head.ours  # a tied head is not stored, so it may be there
    assert type(from_official(tmp_path / "src")).__name__ == wanted
    edit_config(tmp_path / "src", architectures=[])
    there_and_back(tmp_path)
    if head.bare:
        edit_config(tmp_path / "src", tie_word_embeddings=False)
        assert type(from_official(tmp_path / "src")).__name__ == head.ours


@pytest.mark.parametrize("framework", ["TF", "Flax"])
def test_the_class_of_another_framework(tmp_path, framework):
    gpt2_folder(tmp_path / "src", "GPT2ForSequenceClassification")
    edit_config(tmp_path / "src", architectures=[f"{framework}GPT2ForSequenceClassification"])
    there_and_back(tmp_path)


# What they compute.


def test_the_same_text_in_every_way(tmp_path):
    theirs = gpt2_folder(tmp_path / "src")
    ours, assistant = from_official(tmp_path / "src"), nudged(from_official(tmp_path / "src"))
    prompt = padded(3, "left")
    del prompt["position_ids"]
    for settings in WAYS_TO_WRITE:
        text = same_text(ours, theirs, **prompt, max_new_tokens=30, **settings)
        assert len({tuple(row) for row in text[:, LENGTH:].tolist()}) > 1
    single = {name: tensor[:1] for name, tensor in prompt.items()}
    plain = theirs.generate(**single, max_new_tokens=30, do_sample=False)
    assert torch.equal(ours.generate(**single, max_new_tokens=30, do_sample=False, assistant_model=assistant), plain)


def targets(head, tensors):
    """Labels for a head; padding and what it predicts have none."""
    generator, mask = torch.Generator().manual_seed(7), tensors["attention_mask"].bool()
    if head.official == LM:
        labels = tensors["input_ids"].masked_fill(~mask, -100)
        labels[1, mask[1].int().argmax()] = -100  # left padding predicts it, in the official loss
        return {"labels": labels}
    if labels_of(head.official):
        shape = mask.shape if "Token" in head.official else mask.shape[:1]
        labels = torch.randint(labels_of(head.official)["num_labels"], shape, generator=generator)
        return {"labels": labels.masked_fill(~mask, -100) if labels.dim() == 2 else labels}
    return {"start_positions": torch.tensor([8, 9, 10]), "end_positions": torch.tensor([11, 9, LENGTH])}


@pytest.mark.portable
@every_head
@pytest.mark.parametrize("side", ["left", "right"])
def test_loss_and_gradients(tmp_path, head, side):
    theirs = gpt2_folder(tmp_path / "src", head.official, n_layer=3)
    ours = from_official(tmp_path / "src")
    tensors = padded(3, side)
    mask = tensors["attention_mask"].bool()
    losses = []
    for model in (ours, theirs):
        if head.bare:
            states = model(**tensors).last_hidden_state[mask]
            losses.append((states * torch.linspace(-1, 1, states.numel()).view_as(states)).mean())
        else:
            losses.append(model(**tensors, **targets(head, tensors)).loss)
        losses[-1].backward()
    assert_close(*losses)
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    found = {}
    for group in GPT2.names.layout(CheckpointVariant(head.official), ours.config).plan(gradients, reverse=True):
        found.update(group.apply(gradients.__getitem__))
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert_gradients_close(found, expected)
    for name, gradient in expected.items():
        # What moves the logits of all positions alike changes no softmax over positions.
        alike = head.official.endswith("QuestionAnswering") and name in ("transformer.ln_f.bias", "qa_outputs.bias")
        assert alike or gradient.abs().max() > 1e-4, name


def test_dropout_before_a_head_of_tokens_is_the_official_one(tmp_path):
    gpt2_folder(tmp_path / "src", "GPT2ForTokenClassification", resid_pdrop=0.25, embd_pdrop=0.25, attn_pdrop=0.125)
    for said in ({}, {"hidden_dropout": 0.375}, {"classifier_dropout": 0.5}):
        edit_config(tmp_path / "src", **said)
        theirs = transformers.GPT2ForTokenClassification.from_pretrained(tmp_path / "src")
        ours = from_official(tmp_path / "src")
        config = ours.config
        assert (config.hidden_dropout, config.attention_dropout, config.activation_dropout) == (0.25, 0.125, 0.0)
        assert ours.dropout.p == theirs.dropout.p == next(iter(said.values()), 0.1)
        fresh_config = transformers.GPT2Config(**GPT2.config_to(config))
        assert transformers.GPT2ForTokenClassification(fresh_config).dropout.p == theirs.dropout.p


def test_no_dropout_before_a_head_of_rows(tmp_path):
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    theirs = gpt2_folder(tmp_path / "src", "GPT2ForSequenceClassification", **none)
    edit_config(tmp_path / "src", classifier_dropout=0.5)  # which its class does not look at
    assert_same_padded(from_official(tmp_path / "src").train(), theirs.train())
    there_and_back(tmp_path)


# Settings.


@pytest.mark.parametrize("name", [head.official for head in GPT2.heads])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_inner": None, "activation_function": "relu", "layer_norm_epsilon": 1e-6, "n_positions": 32},
        {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.3, "use_cache": False, "initializer_range": 0.01},
        {"scale_attn_weights": False, "tie_word_embeddings": False, "n_head": 8, "n_layer": 1},
        {"eos_token_id": [3, 4], "bos_token_id": None, "pad_token_id": 5, "dtype": "bfloat16"},
        {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}, "problem_type": "regression"},
        {"classifier_dropout": 0.4, "n_embd": 64, "vocab_size": 12},
    ],
)
def test_every_setting_there_and_back(name, changes):
    if name.endswith("ForSequenceClassification"):
        changes = {key: value for key, value in changes.items() if key != "classifier_dropout"}  # it has no use for it
    entries = {"model_type": "gpt2", "architectures": [name], **GPT2_SIZES, **changes}
    config = GPT2.settings.our_config(GPT2.config_from(entries))
    again = type(config).from_dict(config.to_dict())
    assert again.to_dict() == config.to_dict()
    before, after = (GPT2.settings.official_config(one).to_dict() for one in (entries, GPT2.config_to(config)))
    assert after == before


@pytest.mark.versions
def test_a_scale_of_one(tmp_path):
    model = gpt2_folder(tmp_path / "src", scale_attn_weights=False, initializer_range=0.2)
    there_and_back(tmp_path)
    assert from_official(tmp_path / "src").config.attention_scale == 1.0
    assert_same_padded(from_official(tmp_path / "src"), model)


@pytest.mark.parametrize("vocab_size", [97, 50256, 50257])
def test_the_usual_end_token_beyond_a_small_vocabulary_is_none(tmp_path, vocab_size):
    ends = {"bos_token_id": 50256, "eos_token_id": 50256}
    entries = {"model_type": "gpt2", **GPT2_SIZES, **ends, "vocab_size": vocab_size, "pad_token_id": -1}
    settings = GPT2.config_from(entries)
    there = 50256 if vocab_size > 50256 else None
    assert (settings["bos_token_id"], settings["eos_token_id"], settings["pad_token_id"]) == (there, there, None)
    with pytest.raises(ConversionError, match="eos_token_id must be a token from 0"):
        GPT2.config_from({**entries, "eos_token_id": vocab_size + 1})
    if vocab_size == 97:
        gpt2_folder(tmp_path / "src", **ends)
        there_and_back(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is 'True': .* by i \\+ 1, which"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn is 'True': it computes the same"),
        ({"add_cross_attention": True}, "add_cross_attention is 'True'"),
        ({"activation_function": "mystery"}, "hidden_act must be one of"),
        ({"n_head": 5}, "not a multiple of num_attention_heads"),
        ({"layer_norm_epsilon": 0.0}, "norm_eps must be a positive number"),
        ({"n_embd": "wide"}, "GPT2Config refuses it"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"architectures": ["GPT2DoubleHeadsModel"]}, r"GPT2DoubleHeadsModel.*two heads at once"),
        ({"architectures": ["GPT2LMHeadModel", "GPT2Model"]}, "cannot be converted"),
    ],
)
def test_settings_that_ours_cannot_express_are_named(changes, named):
    with pytest.raises(ConversionError, match=named):
        GPT2.config_from({"model_type": "gpt2", "architectures": [LM], **GPT2_SIZES, **changes})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"norm_type": "rms_norm"}, "norm_type must be 'layer_norm'"),
        ({"norm_placement": "post"}, "norm_placement must be 'pre'"),
        ({"final_norm": False}, "final_norm must be True"),
        ({"gated_mlp": True}, "gated_mlp must be False"),
        ({"position_type": "sinusoidal"}, "position_type must be 'learned'"),
        ({"position_offset": 2}, "position_offset must be 0"),
        ({"type_vocab_size": 2}, "type_vocab_size must be 0"),
        ({"qk_norm": True}, "qk_norm must be False"),
        ({"float32_down_proj": True}, "float32_down_proj must be False"),
        ({"lm_head_bias": True}, "lm_head_bias must be False"),
        ({"lm_head_transform": True}, "lm_head_transform must be False"),
        ({"embedding_norm": True}, "embedding_norm must be False"),
        ({"embedding_scale": 2.0}, "embedding_scale must be None"),
        ({"logit_scale": 2.0}, "logit_scale must be 1.0"),
        ({"attention_scale": 0.5}, "attention_scale must be 1.0, not 0.5"),
        ({"sliding_window": 8}, "sliding_window must be None"),
        ({"add_cross_attention": True}, "add_cross_attention must be False"),
        ({"activation_dropout": 0.1}, "activation_dropout must be 0.0"),
        ({"initializer_range": None}, "initializer_range must be set"),
        ({"num_key_value_heads": 4}, "num_key_value_heads must be 12"),
        ({"head_dim": 32}, "head_dim must be 64"),
        ({"head_dim": 64, "hidden_size": 770}, r"hidden_size \(770\) is not a multiple of num_attention_heads"),
        ({"architectures": ["BlockformerDecoderForMystery"]}, "architectures must be one of"),
    ],
)
def test_what_it_cannot_express_is_named_and_nothing_else(changes, named):
    config = blockformer.preset("gpt2", **changes)
    with pytest.raises(ConversionError, match=named) as caught:
        GPT2.config_to(config)
    assert str(caught.value).count("\n") == (
        2 if changes.keys() & {"norm_type", "norm_placement", "sliding_window"} else 1
    )


def test_an_encoder_is_none_of_it():
    assert GPT2.differences(blockformer.preset("bert")) == ["model_type must be 'blockformer_decoder'"]


@every_head
def test_a_preset_finds_its_family(head):
    assert family_for(blockformer.preset("gpt2")) is GPT2
    config = blockformer.preset("gpt2", architectures=[head.ours])
    assert family_for(config) is GPT2
    official = GPT2.config_to(config)
    wanted = transformers.GPT2Config(architectures=[head.official])
    assert GPT2.settings.official_config(official).to_dict() == wanted.to_dict()
    # None means the dropout of everything else; the official heads say their own.
    dropouts = {"GPT2ForSequenceClassification": 0.0, "GPT2ForTokenClassification": 0.1}
    wanted = {**config.to_dict(), "classifier_dropout": dropouts.get(head.official)}
    assert GPT2.settings.our_config(GPT2.config_from(official)).to_dict() == wanted


def test_the_dropout_of_everything_else_is_said_where_the_official_head_has_another():
    config = blockformer.preset("gpt2", architectures=["BlockformerDecoderForTokenClassification"], hidden_dropout=0.3)
    assert GPT2.config_to(config)["classifier_dropout"] == 0.3
    assert GPT2.config_from(GPT2.config_to(config))["classifier_dropout"] == 0.3


def test_what_ours_has_no_word_for_outlives_a_change(tmp_path):
    """Settings of a head that ours lacks, and those that no class knows; the masks too."""
    said = {"summary_type": "mean", "summary_first_dropout": 0.3, "summary_use_proj": True, "n_ctx": 64}
    gpt2_folder(tmp_path / "src")
    edit_tensors(tmp_path / "src", lambda tensors: without_prefix(tensors) | masks(""))
    edit_config(tmp_path / "src", **said)
    report = there_and_back(tmp_path)
    assert report.notes == [
        "config.json: settings that gpt2 does not use: 'n_ctx', 'summary_first_dropout', 'summary_type' "
        "('n_ctx': kept in config.json, for other libraries)"
    ]
    edit_config(tmp_path / "dst", attention_dropout=0.2, classifier_dropout=0.3)
    assert_verified(convert(tmp_path / "dst", tmp_path / "changed", to_official=True))
    wanted = {**entries_of(tmp_path / "src"), "attn_pdrop": 0.2, "classifier_dropout": 0.3}
    found = transformers.GPT2Config.from_pretrained(tmp_path / "changed")
    expected = transformers.GPT2Config(**wanted)
    assert {**found.to_dict(), "_name_or_path": "", "transformers_version": ""} == (
        {**expected.to_dict(), "_name_or_path": "", "transformers_version": ""}
    )
    assert found.summary_type == "mean"
    assert stored(tmp_path / "changed") == stored(tmp_path / "src")


def test_another_spelling_of_a_size_is_none_that_nobody_uses(tmp_path):
    gpt2_folder(tmp_path / "src")
    edit_config(tmp_path / "src", n_embd=..., hidden_size=48)
    assert there_and_back(tmp_path).notes == []
    edit_config(tmp_path / "dst", attention_dropout=0.2)
    convert(tmp_path / "dst", tmp_path / "changed", to_official=True, verify=False)
    assert "hidden_size" not in entries_of(tmp_path / "changed")
    assert entries_of(tmp_path / "changed")["n_embd"] == 48


def test_a_checkpoint_of_ours_with_another_head_goes_out_under_that_head(tmp_path):
    gpt2_folder(tmp_path / "src")
    ours, theirs = blockformer.BlockformerDecoderForSequenceClassification, transformers.GPT2ForSequenceClassification
    tuned, official = under_another_head(tmp_path, ours, theirs)
    assert_same_padded(tuned.eval(), official.eval())
    # Saved over the language model that came without a prefix, whose memory lies there.
    edit_tensors(tmp_path / "src", without_prefix)
    convert(tmp_path / "src", tmp_path / "repo", verify=False, force=True)
    tuned.save_pretrained(tmp_path / "repo")
    assert_verified(convert(tmp_path / "repo", tmp_path / "again", to_official=True))
    assert stored(tmp_path / "again") == stored(tmp_path / "out")
    assert entries_of(tmp_path / "again")["architectures"] == ["GPT2ForSequenceClassification"]


def test_heads_of_rows_are_compared_whatever_the_padding_token(tmp_path):
    """The official class takes no batch without one, and the token before where a text ends in it, as a probe does."""
    for number, token in enumerate((None, 47)):
        folder = tmp_path / str(number)
        gpt2_folder(folder / "src", "GPT2ForSequenceClassification", pad_token_id=token)
        there_and_back(folder)
    ours = from_official(tmp_path / "0/src")
    inputs = probes(ours.config)
    before = run(ours, inputs)
    assert compare(torch.float32, before, run(ours, inputs)).passed
    with torch.no_grad():
        ours.score.weight[0, 0] += 0.01
    assert not compare(torch.float32, before, run(ours, inputs)).passed


# Strictness, and what a repo can do.


@every_head
def test_missing_and_unexpected_tensors_are_listed(tmp_path, head):
    gpt2_folder(tmp_path / "src", head.official)
    whole, root = load_file(tmp_path / "src/model.safetensors"), "" if head.bare else "transformer."
    lost = f"{root}h.1.attn.c_attn.weight"
    edit_tensors(tmp_path / "src", lambda tensors: {name: t for name, t in tensors.items() if name != lost})
    with pytest.raises(ConversionError, match=r"nothing fills \(3\)[\s\S]*layers\.1\.self_attn\.q_proj\.weight"):
        convert(tmp_path / "src", tmp_path / "dst")
    edit_tensors(tmp_path / "src", lambda _: {**whole, f"{root}h.1.crossattention.bias": torch.zeros(2)})
    with pytest.raises(ConversionError, match=r"no rule takes[\s\S]*crossattention\.bias"):
        convert(tmp_path / "src", tmp_path / "dst")
    edit_tensors(tmp_path / "src", lambda _: {**whole, lost: whole[lost].t().contiguous()})
    with pytest.raises(
        ConversionError, match=r"c_attn\.weight': shape \[48, 144\] cannot be split into \[48, 48, 48\]"
    ):
        convert(tmp_path / "src", tmp_path / "dst")
    edit_tensors(tmp_path / "src", lambda _: {**whole, lost: whole[lost][:, :143]})
    with pytest.raises(ConversionError, match=r"c_attn\.weight'.*cannot be split into \[48, 48, 48\]"):
        convert(tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


@pytest.mark.versions
def test_a_converted_repo_where_blockformer_is_not(tmp_path, fresh):
    theirs = gpt2_folder(tmp_path / "src")
    edit_tensors(tmp_path / "src", lambda tensors: without_prefix(tensors) | masks(""))
    convert(tmp_path / "src", tmp_path / "repo", verify=False)
    ids = torch.randint(5, 97, (2, 9))
    found = json.loads(
        fresh(
            program("remote_converted"),
            tmp_path / "repo",
            tmp_path / "again",
            json.dumps(ids.tolist()),
            folder=tmp_path,
        )
    )
    with torch.no_grad():
        assert_close(torch.tensor(found["logits"]), theirs(ids).logits)
    mask = torch.ones_like(ids)
    assert found["written"] == [
        theirs.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False, num_beams=n).tolist()
        for n in (1, 3)
    ]
    convert(tmp_path / "again", tmp_path / "out", to_official=True)
    assert set(stored(tmp_path / "out")) == set(theirs.state_dict()) - {"lm_head.weight"}


def test_inspecting_an_official_config(tmp_path):
    model = gpt2_folder(tmp_path / "src")
    summary = summarize(tmp_path / "src")
    assert summary.parameters == model.num_parameters()
    assert summary.cache["float32"] == 2 * 2 * 48 * 4
    assert summarize("gpt2").parameters == 124_439_808
