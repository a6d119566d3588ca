"""`generate(custom_generate=...)`: a function, or the code of a folder, which must be trusted; contrastive search."""

import pytest
import torch
import transformers
from encoder_decoders import t5_pair
from fork_server import program
from packaging.version import Version
from pairs import left_padded, pair, token_ids

from blockformer.model.compat import CACHE

pytestmark = pytest.mark.versions

STEPS = 12


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Ours and transformers' by name, with the same weights."""
    mixed = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    return {"decoder": pair(), "windows": pair(**mixed), "encoder-decoder": t5_pair(tmp_path_factory.mktemp("t5"))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contrastive")
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(program("contrastive_search"))
    return folder


def text_of(a_model, **settings):
    ids, mask = left_padded(3, 9)
    if a_model.config.is_encoder_decoder:
        ids, mask = ids.flip(1), mask.flip(1)
    return a_model.generate(ids, attention_mask=mask, max_new_tokens=STEPS, **settings)


def second_best(model, input_ids, logits_processor, stopping_criteria, generation_config, rank=1, **model_kwargs):
    """Always the token of the second highest logit, of the tensors and the cache that the library has prepared."""
    cache, mask = model_kwargs[CACHE], model_kwargs["attention_mask"]
    positions = model_kwargs.get("position_ids")
    for _ in range(generation_config.max_length - input_ids.shape[1]):
        given, tokens = {"attention_mask": mask, "past_key_values": cache}, input_ids[:, cache.get_seq_length() :]
        if model.config.is_encoder_decoder:
            out = model(decoder_input_ids=tokens, encoder_outputs=model_kwargs["encoder_outputs"], **given)
        else:
            out = model(tokens, position_ids=positions, **given)
            positions, mask = positions[:, -1:] + 1, torch.nn.functional.pad(mask, (0, 1), value=1)
        logits = logits_processor(input_ids, out.logits[:, -1].float())
        input_ids = torch.cat([input_ids, logits.topk(rank + 1).indices[:, -1:]], dim=1)
    return input_ids


@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}], ids=["one row", "several rows"])
@pytest.mark.parametrize("name", ["decoder", "windows", "encoder-decoder"])
def test_a_function_writes_the_text_that_it_writes_with_transformers(models, name, settings):
    ours, theirs = models[name]
    settings = {"custom_generate": second_best, "min_new_tokens": STEPS, "do_sample": False, **settings}
    written = text_of(ours, **settings)
    assert torch.equal(written, text_of(theirs, **settings))
    assert len(torch.unique(written[:, -STEPS:], dim=0)) == 3
    others = text_of(ours, rank=2, **settings)  # an argument of the function
    assert torch.equal(others, text_of(theirs, rank=2, **settings))
    assert not torch.equal(written, others)


@pytest.mark.parametrize("name", ["decoder", "windows", "encoder-decoder"])
def test_contrastive_search_from_a_folder(models, folder, name):
    ours, theirs = models[name]
    settings = {"custom_generate": str(folder), "trust_remote_code": True}
    with torch.no_grad():
        written = text_of(ours, **settings)
        assert torch.equal(written, text_of(theirs, **settings))
        assert not torch.equal(written, text_of(ours, penalty_alpha=0.0, **settings))
        greedy = text_of(ours, penalty_alpha=0.0, top_k=1, **settings)
    assert len(torch.unique(written[:, -STEPS:], dim=0)) == 3
    assert torch.equal(greedy[:, -STEPS:], text_of(ours, do_sample=False, min_new_tokens=STEPS)[:, -STEPS:])


@pytest.mark.parametrize("name", ["decoder", "encoder-decoder"])
def test_code_of_a_folder_runs_only_if_it_is_trusted(models, folder, monkeypatch, capsys, name):
    if Version(transformers.__version__) < Version("5.11"):
        pytest.skip("transformers 5.5.0 and 5.10.4 run a folder's code without trust")
    ours, _ = models[name]
    monkeypatch.setattr("builtins.input", lambda *arguments: "n")
    for trust in ({}, {"trust_remote_code": False}):
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            text_of(ours, custom_generate=str(folder), **trust)
    assert "this code runs" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "settings", [{"penalty_alpha": 0.6, "top_k": 4}, {"dola_layers": "low"}], ids=["contrastive", "dola"]
)
def test_ways_that_transformers_has_given_up_are_refused_before_anything_runs(models, monkeypatch, settings):
    """They moved to repos on the Hub, whose code must be trusted."""
    for a_model in models["decoder"]:
        monkeypatch.setattr(a_model.lm_head, "forward", None)
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            a_model.generate(token_ids(1, 4), max_new_tokens=4, **settings)
