"""OPT with narrow token vectors, as its model of 350 million parameters has them: every head, both ways."""

import pytest
import torch
from pairs import assert_close, assert_gradients_close
from sizes import OFFICIAL_DECODER

from blockformer.conversion import from_official
from blockformer.conversion.families.registry import FAMILIES
from blockformer.conversion.storage.variant import CheckpointVariant

from .oracles import assert_same_state, edit_tensors, entries_of, labels_of, name_of, there_and_back
from .outputs import WAYS_TO_WRITE, assert_same_outputs, padded, same_text
from .rows import Row, model_of

OPT = FAMILIES["opt"]
WIDTH = 20
NARROW = Row("opt", {"word_embed_proj_dim": WIDTH, "do_layer_norm_before": False})
every_head = pytest.mark.parametrize("head", OPT.heads, ids=name_of)


def narrow(folder, head):
    """An official model with a head, saved as `src`, and ours with its weights."""
    theirs = model_of(NARROW, {**OFFICIAL_DECODER, "pad_token_id": 0}, head)
    theirs.save_pretrained(folder / "src")
    return from_official(folder / "src"), theirs


@pytest.mark.versions
@every_head
def test_every_head_there_and_back(tmp_path, head):
    ours, theirs = narrow(tmp_path, head)
    there_and_back(tmp_path, verify_back=True)
    assert entries_of(tmp_path / "back")["word_embed_proj_dim"] == ours.config.token_embedding_size == WIDTH
    for side in ("left", "right"):
        assert_same_outputs(ours, theirs, padded(3, side), spread=0.1)


@every_head
def test_names_with_and_without_the_prefix_of_a_head(tmp_path, head):
    ours, _ = narrow(tmp_path, head)

    def renamed(tensors):
        old, new = ("decoder.", "model.decoder.") if head.bare else ("model.decoder.", "decoder.")
        return {name.replace(old, new): tensor for name, tensor in tensors.items()}

    edit_tensors(tmp_path / "src", renamed)
    there_and_back(tmp_path)
    assert_same_state(from_official(tmp_path / "src"), ours)


@torch.no_grad()
def test_the_states_of_each_layer_are_as_wide_as_the_officials(tmp_path):
    ours, theirs = narrow(tmp_path, next(head for head in OPT.heads if head.bare))
    given = padded(3, "left") | {"output_hidden_states": True}
    found, expected = (model(**given).hidden_states for model in (ours, theirs))
    real = given["attention_mask"].bool()
    assert [states.shape[-1] for states in found] == [32, 32, WIDTH]
    for one, other in zip(found, expected, strict=True):
        assert_close(one[real], other[real])


@torch.no_grad()
def test_texts_and_given_embeddings(tmp_path):
    ours, theirs = narrow(tmp_path, OPT.heads[0])
    given = padded(3, "left")
    ids, mask = given["input_ids"], given["attention_mask"]
    settings = {"input_ids": ids, "attention_mask": mask, "pad_token_id": 0, "max_new_tokens": 8}
    for way in WAYS_TO_WRITE:
        same_text(ours, theirs, **settings, **way)
    embeddings = [model.get_input_embeddings()(ids) for model in (ours, theirs)]
    pair = [
        model(inputs_embeds=states, attention_mask=mask).logits
        for model, states in zip((ours, theirs), embeddings, strict=True)
    ]
    assert_close(*(logits[mask.bool()] for logits in pair))
    with pytest.raises(ValueError, match=rf"inputs_embeds must be \[batch, length, {WIDTH}\], not \[1, 3, 32\]"):
        ours(inputs_embeds=torch.zeros(1, 3, 32))


def answers(head, given):
    """What a head is trained to give."""
    mask, labels = given["attention_mask"].bool(), labels_of(head.official)
    if head.bare:
        return {}
    if head.writes_text:
        return {"labels": given["input_ids"].masked_fill(~mask, -100)}
    if labels:
        return {"labels": torch.arange(len(mask)) % labels["num_labels"]}
    return {"start_positions": torch.tensor([2, 3, 4]), "end_positions": torch.tensor([5, 9, 6])}


@every_head
def test_a_step_of_training_has_the_gradients_of_transformers(tmp_path, head):
    ours, theirs = narrow(tmp_path, head)
    given, losses = padded(3, "right"), []
    if "start_positions" in answers(head, given):  # padding is read, and the official table never learns from it
        given = {"input_ids": given["input_ids"].clamp(min=5), "attention_mask": torch.ones(3, 20, dtype=torch.long)}
    for model in (ours, theirs):
        if head.bare:
            states = model(**given).last_hidden_state[given["attention_mask"].bool()]
            losses.append((states * torch.linspace(-1, 1, states.numel()).view_as(states)).mean())
        else:
            losses.append(model(**given, **answers(head, given)).loss)
        losses[-1].backward()
    assert_close(*losses)
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    found = {}
    for group in OPT.names.layout(CheckpointVariant(head.official), ours.config).plan(gradients, reverse=True):
        found.update(group.apply(gradients.__getitem__))
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert expected.keys() == found.keys()
    assert_gradients_close(found, expected)
