"""Faults that belong to no single module, and those where a user would meet them: loading and the command line.

`docs/guards.md` says for every fault which test stands for it.
"""

import ast
import json
import os
import pickle
import runpy
import shutil
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from pairs import assert_close, model, pair, token_ids
from safetensors.torch import load_file, save_file
from sizes import TINY
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    StaticCache,
)

import blockformer
from blockformer import (
    BlockformerDecoderConfig,
    BlockformerDecoderForCausalLM,
    BlockformerDecoderForSequenceClassification,
    BlockformerDecoderModel,
    BlockformerEncoderConfig,
    BlockformerEncoderDecoderConfig,
    BlockformerEncoderDecoderForConditionalGeneration,
    BlockformerEncoderForMaskedLM,
    BlockformerEncoderForMultipleChoice,
    BlockformerEncoderForSequenceClassification,
)
from blockformer.cli import main

SIZES = {
    **TINY,
    "vocab_size": 199,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
POSITIONS = ["learned", "rotary", "relative_bias", "relative_key"]
MODELS = {
    "decoder": (BlockformerDecoderConfig, BlockformerDecoderForCausalLM, {}),
    "encoder": (BlockformerEncoderConfig, BlockformerEncoderForMaskedLM, {}),
    "encoder-decoder": (
        BlockformerEncoderDecoderConfig,
        BlockformerEncoderDecoderForConditionalGeneration,
        {"decoder_start_token_id": 0},
    ),
}


def make(kind, cls=None, **settings):
    config_class, model_class, own = MODELS[kind]
    torch.manual_seed(0)
    return (cls or model_class)(config_class(**{**SIZES, **own, **settings})).eval()


def ones(*shape):
    return torch.ones(*shape, dtype=torch.long)


# Config


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("decoder", {"num_hidden_layers": 10**10, "hidden_size": 2, "num_attention_heads": 1}, "num_hidden_layers"),
        ("encoder-decoder", {"decoder_layers": 10**10, "hidden_size": 4}, "num_hidden_layers"),
        ("decoder", {"num_labels": 10**10}, "num_labels"),
        ("encoder", {"type_vocab_size": 10**15}, r"parameters, more than 1e\+13"),
        ("encoder", {"position_type": "learned", "position_offset": 10**15}, r"parameters, more than 1e\+13"),
        (
            "decoder",
            {"position_type": "relative_key", "max_position_embeddings": 10**15},
            r"parameters, more than 1e\+13",
        ),
        (
            "decoder",
            {
                "position_type": "relative_bias",
                "relative_attention_num_buckets": 10**15,
                "relative_attention_max_distance": 10**16,
            },
            r"parameters, more than 1e\+13",
        ),
        ("decoder", {"intermediate_size": 10**400}, "intermediate_size must be a positive integer"),
        ("decoder", {"norm_eps": 10**400}, "norm_eps must be a positive number"),
    ],
)
def test_sizes_beyond_the_bounds_are_refused_before_any_memory_is_taken(kind, fields, message):
    config_class, _, own = MODELS[kind]
    config_class(**{**SIZES, **own})
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message):
            config_class(**{**SIZES, **own, **fields})
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 64
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_labels": 0}, "num_labels must be a positive integer, not 0"),
        ({"num_labels": "3"}, "num_labels must be a positive integer, not '3'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "32"}}, "beta_fast must be a positive"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}}, "rope_theta must be above 1"),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor must be above low_freq_factor"),
        ({"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 0}}, "original_max_position_embeddings"),
        ({"rope_parameters": {**LONG, "short_factor": 1.0}}, "short_factor must list 4 numbers"),
        ({"rope_parameters": {**LONG, "long_factor": ["a"] * 4}}, "long_factor must list 4 numbers"),
        ({"rope_parameters": {"rope_thetta": 1e6}}, "rope_parameters have no 'rope_thetta'. Did you mean 'rope_theta'"),
        ({"rope_parameters": {"sliding_attention": {}}}, "need one dict for each of 'full_attention', not"),
        ({"position_type": "relative_bias", "relative_attention_max_distance": 16}, "must be above 16"),
    ],
)
def test_what_would_fail_later_is_refused_when_the_config_is_made(fields, message):
    with pytest.raises(ValueError, match=message):
        BlockformerDecoderConfig(**{**SIZES, **fields})


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("decoder", {"is_encoder_decoder": True}, "is_encoder_decoder=True contradicts BlockformerDecoderConfig"),
        ("encoder-decoder", {"is_encoder_decoder": False}, "contradicts BlockformerEncoderDecoderConfig"),
        ("encoder-decoder", {"add_cross_attention": True}, "add_cross_attention=True needs a decoder"),
        (
            "encoder-decoder",
            {"decoder_layer_types": ["sliding_attention"]},
            "decoder_layer_types must list one type for each",
        ),
        ("decoder", {"relative_bias_per_layer": True}, "needs position_type='relative_bias'"),
    ],
)
def test_flags_that_contradict_the_topology_are_refused(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        make(kind, **fields)


@pytest.mark.parametrize("types", [["sliding_attention"], ["full_attention"] * 7, "full_attention"])
def test_a_decoder_has_layers_of_the_types_that_its_encoder_has(types):
    """It would look for masks and rotations that are not made."""
    with pytest.raises(ValueError, match="decoder_layer_types must list one type for each"):
        make("encoder-decoder", decoder_layer_types=types)


def test_an_unknown_problem_type_is_refused():
    """By older releases of transformers themselves, with an error of their own."""
    with pytest.raises(Exception, match="problem_type"):
        BlockformerDecoderConfig(problem_type="regresion")


@pytest.mark.parametrize("kind", ["encoder", "encoder-decoder"])
def test_a_bias_that_looks_both_ways_needs_four_buckets(kind):
    with pytest.raises(ValueError, match="relative_attention_num_buckets must be 4 or more"):
        make(kind, position_type="relative_bias", relative_attention_num_buckets=3)
    make(kind, position_type="relative_bias", relative_attention_num_buckets=4)(
        token_ids(1, 9), **({"labels": token_ids(1, 9)} if kind == "encoder-decoder" else {})
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"hidden_size": 64', '"hidden_size": 32, "hidden_size": 64', "the key 'hidden_size' appears twice"),
        ('"norm_eps": 1e-06', '"norm_eps": NaN', "NaN is not a JSON value"),
        ('"id2label": null', '"id2label": {"0": -Infinity}', "-Infinity is not a JSON value"),
    ],
)
def test_auto_classes_read_a_local_config_as_strictly(tmp_path, old, new, message):
    model("qwen3").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    text = path.read_text()
    path.write_text(text.replace(old, new) if old in text else text.replace("{", "{" + new + ",", 1))
    for auto_class in (AutoConfig, AutoModelForCausalLM):
        with pytest.raises(ValueError, match=message):
            auto_class.from_pretrained(tmp_path)


# Inputs


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("position_type", POSITIONS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_row_of_padding_is_finite_everywhere(kind, position_type, backend, training):
    ours = make(kind, position_type=position_type)
    ours.set_attn_implementation(backend)
    ours.train(training)
    ids, mask = token_ids(3, 8), ones(3, 8)
    mask[1], mask[2, :3] = 0, 0
    outputs = ours(ids, attention_mask=mask, labels=ids)
    assert outputs.logits.isfinite().all()
    assert_close(outputs.logits[[0]], ours(ids[[0]], labels=ids[[0]]).logits, 1e-4)
    outputs.loss.backward()
    assert all(part.grad.isfinite().all() for part in ours.parameters() if part.grad is not None)
    if kind == "decoder":
        cache = ours(ids, attention_mask=mask, use_cache=True).past_key_values
        longer = torch.cat([mask, torch.tensor([[1], [0], [1]])], dim=1)
        assert ours(token_ids(3, 1), attention_mask=longer, past_key_values=cache).logits.isfinite().all()


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", MODELS)
def test_nan_stays_in_its_row_in_a_padded_batch(kind, backend):
    ours = make(kind)
    ours.set_attn_implementation(backend)
    ids, mask = token_ids(3, 8), ones(3, 8)
    mask[1, :2] = 0
    arguments = {"attention_mask": mask, **({"decoder_input_ids": ids} if kind == "encoder-decoder" else {})}
    embeds = ours.get_input_embeddings()(ids).detach().clone()
    expected = ours(inputs_embeds=embeds, **arguments).logits
    embeds[0, 2] = torch.nan
    logits = ours(inputs_embeds=embeds, **arguments).logits
    assert logits[0].isnan().any()
    assert_close(logits[1:], expected[1:])


def test_a_static_cache_of_another_batch_or_with_another_mask_is_refused():
    ours = make("decoder")
    cache = StaticCache(config=ours.config, max_cache_len=8)
    ours(token_ids(2, 4), past_key_values=cache)
    with pytest.raises(ValueError, match="past_key_values holds 2 rows, the input has 1"):
        ours(token_ids(1, 1), past_key_values=cache)
    for length in (1, 7, 9):
        with pytest.raises(ValueError, match=rf"covers {length} tokens, but there are 5 \(4 of them cached\)"):
            ours(token_ids(2, 1), attention_mask=ones(2, length), past_key_values=cache)
    ours(token_ids(2, 1), attention_mask=ones(2, 5), past_key_values=cache)
    ours(token_ids(2, 1), attention_mask=ones(2, 8), past_key_values=cache)


def test_a_source_that_does_not_fit_is_refused():
    ours, ids = make("encoder-decoder"), token_ids(2, 5)
    first = ours(ids, decoder_input_ids=ids)
    source = (first.encoder_last_hidden_state,)
    with pytest.raises(ValueError, match="past_key_values holds 2 rows, the input has 4"):
        ours(encoder_outputs=source, decoder_input_ids=token_ids(4, 1), past_key_values=first.past_key_values)
    for arguments, message in (
        ({"decoder_input_ids": token_ids(3, 2)}, "has 2 rows of 5 states, but what the decoder reads has 3 rows"),
        ({"decoder_input_ids": ids, "attention_mask": ones(2, 6)}, r"must be \[2, 5\], not \[2, 6\]"),
        ({"decoder_input_ids": ids, "attention_mask": 2 * ones(2, 5)}, "holds 1 for a token and 0 for padding"),
    ):
        with pytest.raises(ValueError, match=message):
            ours(encoder_outputs=source, **arguments)
    decoder = make("decoder", add_cross_attention=True)
    with pytest.raises(ValueError, match=r"encoder_hidden_states must be \[batch, length, 32\], not \[2, 5, 31\]"):
        decoder(ids, encoder_hidden_states=torch.randn(2, 5, 31))


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        (
            {"type_vocab_size": 2},
            {"token_type_ids": torch.zeros(1, 3)},
            "token_type_ids must be a tensor of int64 or int32",
        ),
        ({"type_vocab_size": 2}, {"token_type_ids": 2 * ones(1, 3)}, "holds 2, and type_vocab_size is 2"),
        ({"position_type": "learned"}, {"position_ids": torch.tensor([[-1, 0, 1]])}, "position_ids holds -1"),
        ({"position_type": "learned"}, {"position_ids": torch.tensor([[0, 1, 64]])}, "is 65 tokens long"),
        ({}, {"position_ids": torch.tensor([[0, 1]])}, r"must be \[batch=1, length=3\], not \[1, 2\]"),
    ],
)
def test_types_and_positions_that_cannot_be_right_are_refused(settings, arguments, message):
    with pytest.raises(ValueError, match=message):
        make("encoder", **settings)(token_ids(1, 3), **arguments)


def test_multiple_choice_needs_a_text_for_each_choice():
    for ids in (None, token_ids(2, 4)):
        with pytest.raises(ValueError, match=r"must be \[batch, choices, length\]"):
            make("encoder", BlockformerEncoderForMultipleChoice)(ids)


def test_an_empty_prompt_in_a_batch_is_refused_by_its_number():
    mask = ones(3, 4)
    mask[1] = 0
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        make("decoder").generate(token_ids(3, 4), attention_mask=mask, max_new_tokens=1)


# Loading a saved model: what transformers draws at random, with a warning


def saved(folder, ours, change):
    """A model saved, its tensors changed."""
    ours.save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


UP = "model.layers.{}.mlp.up_proj.weight"


def without(*names):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


@pytest.mark.parametrize(
    "auto_class", [AutoModelForCausalLM, AutoModel, AutoModelForSequenceClassification, BlockformerDecoderForCausalLM]
)
def test_missing_weights_are_all_listed_and_never_drawn_at_random(tmp_path, auto_class):
    saved(tmp_path, model("qwen3"), without(UP.format(0), UP.format(2)))
    with pytest.raises(ValueError, match=r"weights of \w+ are missing") as refusal:
        auto_class.from_pretrained(tmp_path)
    assert str(tmp_path) in str(refusal.value)
    assert "layers.0.mlp.up_proj.weight" in str(refusal.value)
    assert "layers.2.mlp.up_proj.weight" in str(refusal.value)
    assert "down_proj" not in str(refusal.value)


def test_a_checkpoint_of_which_no_name_matches_is_refused(tmp_path):
    saved(tmp_path, model("qwen3"), lambda tensors: {f"other.{name}": tensor for name, tensor in tensors.items()})
    for auto_class in (AutoModelForCausalLM, AutoModel):
        with pytest.raises(ValueError, match=r"are missing[\s\S]*and \d+ more"):
            auto_class.from_pretrained(tmp_path)


def test_the_head_of_the_class_that_was_saved_must_be_there(tmp_path):
    saved(tmp_path, model("qwen3", tie_word_embeddings=False), without("lm_head.weight"))
    with pytest.raises(ValueError, match=r"missing[\s\S]*lm_head\.weight") as refusal:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(refusal.value, RuntimeError)
    AutoModel.from_pretrained(tmp_path)


def test_wrong_shapes_are_all_listed(tmp_path):
    wrong = {UP.format(0): torch.zeros(7, 64), UP.format(1): torch.zeros(64, 96)}
    saved(tmp_path, model("qwen3"), lambda tensors: {**tensors, **wrong})
    with pytest.raises(ValueError, match="wrong shapes") as refusal:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(refusal.value, RuntimeError)  # as transformers raises, and its users catch
    for line in ("0.mlp.up_proj.weight is [7, 64], the model's is [96, 64]", "1.mlp.up_proj.weight is [64, 96]"):
        assert line in str(refusal.value)


@pytest.mark.parametrize("kind", [torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool], ids=str)
def test_integers_in_place_of_weights_are_all_listed_and_never_cast(tmp_path, kind):
    ours = model("qwen3")
    names = [UP.format(0), UP.format(2)]
    wrong = {name: torch.ones(96, 64).to(kind) for name in names}
    saved(tmp_path, ours, lambda tensors: {**tensors, **wrong})
    for auto_class in (AutoModelForCausalLM, AutoModel, AutoModelForSequenceClassification):
        with pytest.raises(ValueError, match="integers in place of floating-point weights") as refusal:
            auto_class.from_pretrained(tmp_path)
        assert all(name in str(refusal.value) for name in names)
    with pytest.raises(ValueError, match=rf"up_proj\.weight is {kind}"):
        type(ours).from_pretrained(None, config=ours.config, state_dict={**ours.state_dict(), **wrong})


@pytest.mark.versions
@pytest.mark.parametrize(
    "place", [{"variant": "fp16"}, {"subfolder": "deep"}, {"variant": "fp16", "subfolder": "deep"}]
)
def test_integers_are_found_wherever_the_weights_are_read_from(tmp_path, place):
    ours = model("qwen3")
    folder, variant = tmp_path / place.get("subfolder", ""), place.get("variant")
    ours.save_pretrained(folder, variant=variant, max_shard_size="60KB")
    type(ours).from_pretrained(tmp_path, **place)
    shard = next(path for path in folder.glob("*.safetensors") if UP.format(2) in (tensors := load_file(path)))
    save_file({**tensors, UP.format(2): torch.zeros(96, 64).int()}, shard, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.up_proj\.weight is torch\.int32"):
        type(ours).from_pretrained(tmp_path, **place)


@pytest.mark.versions
def test_what_loading_found_is_still_told_to_who_asks(tmp_path):
    saved(tmp_path, model("qwen3"), lambda tensors: {**tensors, "spare": torch.zeros(2)})
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["unexpected_keys"] == {"spare"}
    assert not info["missing_keys"]
    head = {"num_labels": 3, "output_loading_info": True}
    _, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, **head)
    assert info["missing_keys"] == {"score.weight"}


def test_sharded_integers_are_refused_and_spare_ones_are_not(tmp_path):
    """A tensor that no weight takes is the library's to warn of, whatever its dtype."""
    ours = model("qwen3")
    with torch.no_grad():
        ours.model.layers[2].mlp.up_proj.weight.zero_()
    ours.save_pretrained(tmp_path, max_shard_size="60KB")
    shard = next(path for path in tmp_path.glob("*.safetensors") if UP.format(2) in (tensors := load_file(path)))
    save_file({**tensors, "counter": torch.tensor([3])}, shard, metadata={"format": "pt"})
    AutoModelForCausalLM.from_pretrained(tmp_path)
    save_file({**tensors, UP.format(2): torch.zeros(96, 64, dtype=torch.int16)}, shard, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.up_proj\.weight is torch\.int16"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_new_heads_on_a_trained_body_are_welcome(tmp_path):
    """What users fine-tune by: of another task, with other labels, with a pooler or cross-attention that is new."""
    decoder = model("qwen3", tie_word_embeddings=False)
    decoder.save_pretrained(tmp_path / "decoder")
    decoder.model.save_pretrained(tmp_path / "body")
    for folder in ("decoder", "body"):
        classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / folder, num_labels=3)
        assert torch.equal(classifier.model.layers[0].mlp.up_proj.weight, decoder.model.layers[0].mlp.up_proj.weight)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "body").lm_head.weight.isfinite().all()
    classifier.save_pretrained(tmp_path / "classifier")
    with pytest.raises(ValueError, match=r"score\.weight is \[3, 64\], the model's is \[5, 64\]"):
        BlockformerDecoderForSequenceClassification.from_pretrained(tmp_path / "classifier", num_labels=5)
    more = BlockformerDecoderForSequenceClassification.from_pretrained(
        tmp_path / "classifier", num_labels=5, ignore_mismatched_sizes=True
    )
    assert more.score.weight.shape == (5, 64)
    with_cross = BlockformerDecoderModel.from_pretrained(tmp_path / "body", add_cross_attention=True)
    assert with_cross.layers[0].cross_attn.q_proj.weight.isfinite().all()

    encoder = make("encoder")
    encoder.save_pretrained(tmp_path / "encoder")
    pooled = BlockformerEncoderForSequenceClassification.from_pretrained(tmp_path / "encoder", pooler_act="tanh")
    assert pooled.model.pooler.dense.weight.isfinite().all()


def test_tied_and_resized_models_load(tmp_path):
    for kind in MODELS:
        ours = make(kind, tie_word_embeddings=True)
        ours.resize_token_embeddings(210)
        ours.save_pretrained(tmp_path / kind)
        again = type(ours).from_pretrained(tmp_path / kind)
        assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in ours.state_dict().items())


# The command line, given a hostile or damaged source


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    folder = tmp_path_factory.mktemp("official")
    theirs = pair("qwen3")[1]
    theirs.save_pretrained(folder / "one")
    theirs.save_pretrained(folder / "many", max_shard_size="60KB")
    return folder


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def add(name, tensor=None):
    def damage(folder):
        tensors = load_file(folder / WEIGHTS)
        save_file({**tensors, name: torch.zeros(2) if tensor is None else tensor}, folder / WEIGHTS)

    return damage


def replace(make_file, name=WEIGHTS):
    def damage(folder):
        (folder / name).unlink(missing_ok=True)
        make_file(folder / name)

    return damage


def remap(file):
    def damage(folder):
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][next(iter(index["weight_map"]))] = file
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def pickled(folder):
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Payload(folder.parent / "PWNED")}))


def settings(**changes):
    """Changes of config.json; `...` takes an entry away."""

    def damage(folder):
        entries = {**json.loads((folder / "config.json").read_text()), **changes}
        (folder / "config.json").write_text(json.dumps({k: v for k, v in entries.items() if v is not ...}))

    return damage


def contents(folder):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"
HOSTILE = {
    "a FIFO": ("one", replace(os.mkfifo), "not a regular file"),
    "a FIFO as config": ("one", replace(os.mkfifo, "config.json"), "not a regular file"),
    "a FIFO as tokenizer": ("one", replace(os.mkfifo, "tokenizer.json"), "not a regular file"),
    "a folder": ("one", replace(os.mkdir), "not a regular file"),
    "a device": ("one", replace(lambda path: path.symlink_to("/dev/zero")), "leaves the folder"),
    "an LFS pointer": ("one", replace(lambda path: path.write_bytes(LFS)), "git-LFS pointer"),
    "an LFS pointer as config": ("one", replace(lambda path: path.write_bytes(LFS), "config.json"), "git-LFS pointer"),
    "seven bytes": ("one", replace(lambda path: path.write_bytes(b"1234567")), "too few"),
    "a path as name": ("one", add("../../../etc/passwd"), "no rule takes"),
    "a regex as name": ("one", add("model.layers.(a+)+$"), "no rule takes"),
    "a placeholder as name": ("one", add("model.layers.{layer}.mlp.up_proj.weight"), "no rule takes"),
    "a terminal code as name": ("one", add("\x1b[31mred\x1b[0m\r\n"), r"\x1b[31mred"),
    "a very long name": ("one", add("x" * 100_000), "(100000 characters)"),
    "a wrong shape": ("one", add(UP.format(0), torch.zeros(7, 64)), "is [7, 64], the model's is [96, 64]"),
    "an integer weight": ("one", add(UP.format(0), torch.zeros(96, 64, dtype=torch.int32)), "torch.int32"),
    "a path in the index": ("many", remap("../one/model.safetensors"), "in the same folder"),
    "an absolute path in the index": ("many", remap("/etc/passwd"), "in the same folder"),
    "a Windows path in the index": ("many", remap("C:\\x.safetensors"), "in the same folder"),
    "code in a pickle": ("one", pickled, "nothing of it was run"),
    "unequal tied tensors": ("one", settings(tie_word_embeddings=True), "lm_head.weight"),
    "GPTQ": ("one", settings(quantization_config={"quant_method": "gptq", "bits": 4}), "quantization_config"),
    "a billion labels": ("one", settings(num_labels=10**9), "num_labels"),
    "a billion layers": ("one", settings(num_hidden_layers=10**9, layer_types=...), "num_hidden_layers"),
    "no such family": ("one", settings(model_type="../../qwen3"), "model_type"),
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX files")
@pytest.mark.parametrize("name", HOSTILE)
def test_the_command_line_refuses_a_hostile_source_in_one_sentence(tmp_path, capsys, official, name):
    base, damage, message = HOSTILE[name]
    source = tmp_path / "src"
    source.mkdir()
    for path in (official / base).iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    damage(source)
    plain = all(path.is_file() and not path.is_symlink() for path in source.iterdir())
    before = contents(source) if plain else None
    with pytest.raises(SystemExit) as end:
        main(["convert", str(source), str(tmp_path / "dst"), "--no-verify"])
    said = capsys.readouterr().err
    assert end.value.code == 1
    assert said.startswith("error: ")
    assert message in said
    assert "Traceback" not in said
    assert "\x1b" not in said
    assert len(said) < 2000
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
    assert before is None or contents(source) == before


def test_inspect_of_a_hostile_config_takes_no_memory(tmp_path, capsys):
    path = tmp_path / "config.json"
    for fields in ({"num_hidden_layers": 10**11, "hidden_size": 2, "num_attention_heads": 1}, {"num_labels": 10**11}):
        path.write_text(json.dumps({"model_type": "blockformer_decoder", **fields}))
        with pytest.raises(SystemExit) as end:
            main(["inspect", str(path)])
        assert end.value.code == 1
        assert "must be at most" in capsys.readouterr().err


MANY = 400_000_000
ENORMOUS = {
    "nested layers": ({"model_type": "t5gemma", "encoder": {"num_hidden_layers": MANY}}, "encoder.num_hidden_layers"),
    "layers by another name": ({"model_type": "gpt2", "n_layer": MANY}, "n_layer"),
    "two stacks": ({"model_type": "bart", "decoder_layers": MANY}, "decoder_layers"),
    "labels": ({"model_type": "bert", "num_labels": MANY}, "num_labels"),
    "more layers than are shown": ({"model_type": "bert", "num_hidden_layers": 90_000}, "90,000 layers"),
    "more labels than are shown": ({"model_type": "bert", "num_labels": 3_000_000}, "num_labels"),
    "heads": ({"model_type": "gptj", "n_head": MANY}, "heads"),
    "words": ({"model_type": "llama", "vocab_size": 10**15}, "vocab_size"),
    "positions": ({"model_type": "marian", "max_position_embeddings": 10**15}, "max_position_embeddings"),
}


@pytest.mark.parametrize("name", ENORMOUS)
def test_enormous_sizes_are_refused_before_anything_is_made(tmp_path, capsys, name, official):
    """Through `inspect`, and with weights that cannot hold them through `convert`, into another shape too."""
    entries, message = ENORMOUS[name]
    folder = tmp_path / "src"
    shutil.copytree(official / "one", folder)
    (folder / "config.json").write_text(json.dumps(entries))
    ways = [["inspect", str(folder / "config.json")]]
    convert = ["convert", str(folder), str(tmp_path / "dst")]
    ways += [[*convert, "--no-verify"], [*convert, "--layers", "0"]]
    for way in ways:
        before = time.process_time()
        with pytest.raises(SystemExit) as end:
            main(way)
        assert time.process_time() - before < 3, way
        assert end.value.code == 1
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert message in said or way[0] == "convert", said


def test_a_file_larger_than_the_limit_leaves_nothing(tmp_path, processes, official):
    """The system's own limit of file sizes (`ulimit -f`), in a process of its own, as a full disk would do it."""
    resource = pytest.importorskip("resource")
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from blockformer.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))\n"
        f"main(['convert', {str(official / 'one')!r}, {str(tmp_path / 'deep' / 'dst')!r}, '--no-verify'])\n"
    )
    assert resource.RLIMIT_FSIZE
    done = processes.run(code, folder=official, elsewhere=False)
    assert done.returncode == 1
    assert "not written, nothing was changed" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_every_config_and_preset_is_strict():
    for config_class in (BlockformerDecoderConfig, BlockformerEncoderConfig, BlockformerEncoderDecoderConfig):
        with pytest.raises(ValueError, match="Did you mean 'hidden_size'"):
            config_class(hidden_sise=3)
    for name in blockformer.PRESETS:
        with pytest.raises(ValueError, match="num_hidden_layers must be a positive integer"):
            blockformer.preset(name, num_hidden_layers=0)
        with pytest.raises(ValueError, match="hidden_size must be a positive integer"):
            blockformer.preset(name, hidden_size="wide")


# The tables


def test_every_test_that_the_tables_name_exists():
    """`python scripts/guard_table.py` writes the table of their files."""
    guard_table = runpy.run_path(str(Path(__file__).resolve().parents[1] / "scripts" / "guard_table.py"))
    text = guard_table["PAGE"].read_text(encoding="utf-8")
    assert text == guard_table["written"](text), "run python scripts/guard_table.py"
    named = set(guard_table["NAMED"].findall(text))
    assert len(named) > 120
    defined = {
        name: {node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if hasattr(node, "name")}
        for name, path in guard_table["test_files"](text).items()
    }
    assert not [f"{name}::{test}" for name, test in sorted(named) if test not in defined[name]]


def test_a_table_that_names_no_file_or_a_file_without_a_docstring_is_an_error(tmp_path):
    guard_table = runpy.run_path(str(Path(__file__).resolve().parents[1] / "scripts" / "guard_table.py"))
    with pytest.raises(ValueError, match="`nowhere::` names 0 files"):
        guard_table["written"]("| a fault | refused | `nowhere::test_refused` |")
    (tmp_path / "test_silent.py").write_text("import os\n")
    with pytest.raises(ValueError, match="has no docstring"):
        guard_table["first_line"](tmp_path / "test_silent.py")
