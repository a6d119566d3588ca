"""T5Gemma 2: the text out of a repo with a vision tower in its encoder, compared with the whole, and put back."""

import shutil

import pytest
import torch
import transformers
from pairs import assert_close
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

import blockformer
from blockformer.conversion import ConversionError, convert
from blockformer.conversion.families.head import RELEASED
from blockformer.doctor import diagnose
from blockformer.summary import summarize

from .oracles import assert_verified, edit_config, entries_of, fingerprint, randomize_biases_and_norms, stored
from .test_composites import PATCHES, TEXT, contents, trained

pytestmark = pytest.mark.skipif(
    "T5Gemma2ForConditionalGeneration" not in RELEASED, reason="transformers has no T5Gemma 2"
)
FULL, SLIDING = "full_attention", "sliding_attention"
SIDE = {
    **TEXT,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "query_pre_attn_scalar": 16,
    "sliding_window": 6,
    "layer_types": [SLIDING, FULL, SLIDING],
    "rope_parameters": {
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    },
}
ONE_TYPE = {"num_hidden_layers": 2, "layer_types": [FULL, FULL]}
SETTINGS = {
    "usual": ({}, {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL]}),
    "odd window": ({"sliding_window": 5, "num_key_value_heads": 1}, {"sliding_window": 5, "num_key_value_heads": 1}),
    "no window": (ONE_TYPE, ONE_TYPE),
    "other numbers": (
        {"query_pre_attn_scalar": 9, "final_logit_softcapping": 20.0, "hidden_activation": "gelu"},
        {"query_pre_attn_scalar": 9, "final_logit_softcapping": 20.0, "hidden_activation": "gelu"},
    ),
}
USUALLY = [name if name == "usual" else pytest.param(name, marks=pytest.mark.exhaustive) for name in SETTINGS]


def whole_model(kind="usual", **changes):
    encoder, decoder = SETTINGS[kind]
    vision = {"model_type": "siglip_vision_model", **PATCHES}
    both = {
        "encoder": {"text_config": SIDE | encoder, "vision_config": vision, "mm_tokens_per_image": 4}
        | {"eoi_token_index": 102},
        "decoder": SIDE | decoder,
        "image_token_index": 101,
    }
    torch.manual_seed(0)
    config = transformers.T5Gemma2Config(**both | changes)
    model = transformers.T5Gemma2ForConditionalGeneration(config).eval()
    randomize_biases_and_norms(model, spread=0.2)
    return model


def texts():
    torch.manual_seed(2)
    source, target = torch.randint(3, 100, (3, 21)), torch.randint(3, 100, (3, 11))
    source[0, 4] = source[1, 9] = target[2, 3] = 102
    mask = torch.ones_like(source)
    mask[0, 15:] = mask[1, :5] = 0
    return {"input_ids": source, "attention_mask": mask}, target


@torch.no_grad()
def assert_same_text(ours, whole):
    """Logits, loss and states with padding on either side, in chunks, greedy text and beams."""
    source, target = texts()
    wanted = whole(**source, decoder_input_ids=target, output_hidden_states=True)
    found = ours(**source, decoder_input_ids=target, output_hidden_states=True)
    assert_close(found.logits, wanted.logits)
    assert_close(found.decoder_hidden_states, wanted.decoder_hidden_states)
    real = source["attention_mask"] == 1
    assert_close(found.encoder_last_hidden_state[real], wanted.encoder_last_hidden_state[real])
    assert_close(ours(**source, labels=target).loss, whole(**source, labels=target).loss)
    first = ours(**source, decoder_input_ids=target[:, :6], use_cache=True)
    kept = {"encoder_outputs": (first.encoder_last_hidden_state,), "past_key_values": first.past_key_values}
    rest = ours(attention_mask=source["attention_mask"], decoder_input_ids=target[:, 6:], **kept)
    assert_close(torch.cat((first.logits, rest.logits), dim=1), wanted.logits)
    for model in (ours, whole):
        model.generation_config = GenerationConfig(pad_token_id=0, decoder_start_token_id=2)
    for more in ({}, {"num_beams": 3, "num_return_sequences": 2}):
        settings = {**source, "max_new_tokens": 9, "do_sample": False, **more}
        assert torch.equal(ours.generate(**settings), whole.generate(**settings))


@pytest.mark.parametrize("kind", USUALLY)
def test_a_text_is_taken_out_and_put_back(tmp_path, kind):
    src, dst, out = (tmp_path / name for name in ("src", "dst", "out"))
    whole = whole_model(kind)
    whole.save_pretrained(src, max_shard_size="60KB")
    (src / "preprocessor_config.json").write_text('{"image_processor_type": "AnyImageProcessor"}\n')
    before = fingerprint(src)
    report = convert(src, dst)
    assert_verified(report)
    assert report.family == "t5gemma2"
    left = [name for name in stored(src) if "vision" in name or "projector" in name]
    assert f"this is the text model of a t5gemma2 checkpoint; {len(left)} tensors" in " ".join(report.notes)
    ours = blockformer.from_official(dst)
    assert_same_text(ours, whole)
    assert_verified(convert(dst, out, to_official=True, into=src))
    assert contents(out) == contents(src)
    assert fingerprint(src) == before


def test_only_a_trained_text_differs(tmp_path):
    src, dst, tuned, out = (tmp_path / name for name in ("src", "dst", "tuned", "out"))
    whole_model().save_pretrained(src, max_shard_size="60KB")
    convert(src, dst, verify=False)
    ours = trained(dst, tuned)
    assert_verified(convert(tuned, out, to_official=True, into=src))
    old, new = stored(src), stored(out)
    assert old.keys() == new.keys()
    assert {name for name in old if old[name] == new[name]} == {
        name for name in old if "vision" in name or "projector" in name
    }
    assert_same_text(ours, transformers.T5Gemma2ForConditionalGeneration.from_pretrained(out))


def test_names_as_the_class_has_them_are_read_too(tmp_path):
    src, dst, out = (tmp_path / name for name in ("src", "dst", "out"))
    whole = whole_model()
    whole.save_pretrained(src)
    tensors = load_file(src / "model.safetensors")
    parts = ("embed_tokens.", "layers.", "norm.")
    named = {
        name.replace("model.encoder.", "model.encoder.text_model.")
        if name.removeprefix("model.encoder.").startswith(parts)
        else name: tensor
        for name, tensor in tensors.items()
    }
    assert named.keys() != tensors.keys()
    save_file(named, src / "model.safetensors", metadata={"format": "pt"})
    assert_verified(convert(src, dst))
    assert_same_text(blockformer.from_official(dst), whole)
    assert_verified(convert(dst, out, to_official=True, into=src))
    assert contents(out) == contents(src)


def test_other_commands_see_the_text(tmp_path):
    whole_model().save_pretrained(tmp_path / "src")
    assert summarize(tmp_path / "src").config.merged_attention
    found = diagnose(tmp_path / "src")
    assert {each.kind for each in found.findings if each.severity != "note"} <= {"fresh"}  # its numbers are random
    assert found.family == "t5gemma2"


def test_it_does_not_go_out_by_itself(tmp_path):
    whole_model().save_pretrained(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "dst", verify=False)
    with pytest.raises(ConversionError, match=r"without its vision tower; name the repo .* as into \(--into\)"):
        convert(tmp_path / "dst", tmp_path / "out", to_official=True)
    assert not (tmp_path / "out").exists()


REFUSED = {
    "the vocabulary has 131 tokens": ("encoder", {"eoi_token_index": 256000}),
    "sliding_window is 6 in the encoder and 8 in the decoder": ("decoder", {"sliding_window": 8}),
    "attention_bias is true": ("decoder", {"attention_bias": True}),
    "attn_logit_softcapping is set, which T5Gemma 2 does not use": ("decoder", {"attn_logit_softcapping": 30.0}),
    "is_causal is false in the decoder": ("decoder", {"is_causal": False}),
    "tie_word_embeddings": (None, {"tie_word_embeddings": False}),
    "only T5Gemma2ForConditionalGeneration is read": (None, {"architectures": ["T5Gemma2Model"]}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_ours_cannot_express_is_refused(tmp_path, message):
    side, changes = REFUSED[message]
    src = tmp_path / "src"
    whole_model().save_pretrained(src)
    entries = entries_of(src)
    edit_config(src, **(changes if side is None else {side: entries[side] | changes}))
    with pytest.raises(ConversionError, match=message):
        convert(src, tmp_path / "dst", verify=False)
    assert not (tmp_path / "dst").exists()


def test_a_text_of_another_repo_is_refused(tmp_path):
    whole_model().save_pretrained(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "dst", verify=False)
    shutil.copytree(tmp_path / "src", tmp_path / "other")
    edit_config(tmp_path / "other", note="another")
    with pytest.raises(ConversionError, match=r"config\.json differs"):
        convert(tmp_path / "dst", tmp_path / "out", to_official=True, into=tmp_path / "other")
