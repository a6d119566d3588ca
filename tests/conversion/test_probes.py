"""The inputs of a verification: texts that users have, which the two models must read alike."""

import pytest
import torch
from pairs import model as small_model
from pairs import official_copy
from transformers import Qwen3ForSequenceClassification

import blockformer
from blockformer.conversion.probes import probes, run
from blockformer.conversion.verify import compare
from blockformer.model import modeling_decoder
from blockformer.model.stack import last_of

KINDS = ["qwen3", "gpt2", "bert", "roberta", "t5", "bart", "m2m_100"]


def rows_of(config, **settings):
    """The probes' rows: the name of the probe, the tokens [T] and the mask [T]."""
    return [
        (probe.name, ids, mask.bool())
        for probe in probes(config, **settings)
        for ids, mask in zip(probe.input_ids, probe.attention_mask, strict=True)
    ]


def config_of(kind, pad=7, end=9):
    tokens = {"decoder_start_token_id": 1} if kind in ("t5", "bart", "m2m_100") else {"bos_token_id": 1}
    return blockformer.preset(kind, vocab_size=60, pad_token_id=pad, eos_token_id=end, **tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_end_in_the_end_token_and_hold_the_padding_token(kind):
    config = config_of(kind)
    rows = rows_of(config)
    assert sum(int(ids[mask][-1]) == 9 for _, ids, mask in rows) >= len(rows) - 1
    assert all((ids[~mask] == 7).all() for _, ids, mask in rows)
    assert all((ids[mask] == 7).any() and len(ids[mask].unique()) > 2 for _, ids, mask in rows)
    if config.is_encoder_decoder:  # some heads need as many end tokens in each row
        assert all((ids == 9).sum() == 1 for _, ids, _ in rows)
        assert all((probe.target == 7).any() for probe in probes(config))
    else:
        assert [int(ids[-1]) for name, ids, _ in rows if name == "structured"] == [9, 7]


@pytest.mark.parametrize(("kind", "counts_itself"), [("m2m_100", True), ("roberta", True), ("opt", False)])
def test_a_class_that_tells_padding_by_its_token_counts_positions_itself(kind, counts_itself):
    assert {probe.position_ids is None for probe in probes(config_of(kind))} == {counts_itself}


@pytest.mark.parametrize("kind", KINDS)
def test_the_padding_token_may_be_the_end_token(kind):
    config = config_of(kind, end=7)
    rows = rows_of(config)
    if config.is_encoder_decoder:
        assert all((ids == 7).sum() == 1 and ids[mask][-1] == 7 for _, ids, mask in rows)
    else:
        assert all(ids[mask][-1] == 7 for _, ids, mask in rows)


def test_a_decoder_gets_padding_on_both_sides():
    masks = [(name, mask) for name, _, mask in rows_of(config_of("qwen3"))]
    assert any(not mask[0] and mask[-1] for _, mask in masks)
    assert any(mask[0] and not mask[-1] for name, mask in masks if name == "random")  # from which none writes a text
    assert all(mask[-1] for name, mask in masks if name != "random")


@pytest.mark.parametrize("tokens", [{}, {"pad_token_id": None, "eos_token_id": None}, {"eos_token_id": [9, 10]}])
@pytest.mark.parametrize("kind", ["qwen3", "bert"])
def test_models_without_such_tokens_or_with_several(kind, tokens):
    config = blockformer.preset(kind, vocab_size=60, **tokens)
    assert all(int(ids.min()) >= 0 and int(ids.max()) < 60 for _, ids, _ in rows_of(config))


SMALL = {"num_hidden_layers": 2, "num_labels": 3}


@pytest.mark.parametrize("pad", [0, 2, None])
def test_a_classifier_that_reads_another_token_is_found(pad, monkeypatch):
    """One that finds the last token by the mask agrees with the official class only while no text ends in padding."""
    cls = blockformer.BlockformerDecoderForSequenceClassification
    ours = small_model(cls=cls, pad_token_id=pad, **SMALL)
    inputs = probes(ours.config)
    config = official_copy("qwen3", small_model(pad_token_id=pad, num_hidden_layers=2)).config
    config.num_labels = 3
    theirs = Qwen3ForSequenceClassification(config).eval()
    names = {name.replace(".self_attn_pre_norm.", ".input_layernorm."): name for name in ours.state_dict()}
    names = {name.replace(".mlp_pre_norm.", ".post_attention_layernorm."): own for name, own in names.items()}
    theirs.load_state_dict({name: ours.state_dict()[own] for name, own in names.items()})
    expected = run(theirs, inputs)
    assert compare(torch.float32, expected, run(ours, inputs)).passed
    assert ours.config.pad_token_id == theirs.config.pad_token_id == pad

    def by_the_mask(config, input_ids, attention_mask, shape):
        return last_of(attention_mask != 0) if attention_mask is not None else torch.full(shape[:1], shape[1] - 1)

    monkeypatch.setattr(modeling_decoder, "last_tokens", by_the_mask)
    assert not compare(torch.float32, expected, run(ours, inputs)).passed
