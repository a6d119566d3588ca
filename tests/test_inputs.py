"""The description of a model's inputs against the models: `forward` takes them, runs on them and refuses others."""

import inspect

import pytest
import torch
from sizes import TINY
from strategies import MODELS

from blockformer.inputs import inputs_of

SIZES = {**TINY, "vocab_size": 61, "position_type": "rotary", "pad_token_id": 0}
LENGTHS = {True: 5, False: 7}
TYPES = {"type_vocab_size": 2, "task_type_vocab_size": 3}


def made(topology):
    """A small model, its inputs, and an example of each."""
    config_class, model_class, own = MODELS[topology]
    types = TYPES if topology != "encoder-decoder" else {"decoder_vocab_size": 53, "share_embeddings": False}
    torch.manual_seed(0)
    model = model_class(config_class(**{**SIZES, **types, **own})).eval()
    inputs = inputs_of(model.config)
    generator = torch.Generator().manual_seed(0)
    return model, inputs, {each.name: each.example(2, LENGTHS[each.of_source], generator) for each in inputs}


@pytest.mark.parametrize("topology", MODELS)
def test_forward_names_all_inputs_and_the_library_the_main_one(topology):
    model, inputs, given = made(topology)
    assert model.main_input_name == inputs[0].name
    assert set(given) <= set(inspect.signature(model.forward).parameters)
    assert model(**given).logits.shape[:2] == (2, LENGTHS[False])


@pytest.mark.parametrize("topology", MODELS)
def test_each_input_says_something(topology):
    model, inputs, given = made(topology)
    expected = model(**given).logits
    for each in inputs:
        other = {**given, each.name: given[each.name].flip(-1)}  # cross-attention knows no order of states
        assert not torch.allclose(model(**other).logits, expected), each.name


@pytest.mark.parametrize("topology", MODELS)
def test_forward_takes_what_is_described_and_no_more(topology):
    model, inputs, given = made(topology)
    for each in inputs:
        wrong = torch.full_like(given[each.name], each.size)
        if each.kind == "states":
            wrong = torch.cat((wrong, wrong), dim=-1)
        name = "encoder_hidden_states" if each.kind == "states" else each.name.removeprefix("decoder_")
        with pytest.raises(ValueError, match=f"{name} (holds|must be)"):
            model(**{**given, each.name: wrong})
        if each.kind != "states":
            model(**{**given, each.name: torch.full_like(given[each.name], each.size - 1)})
