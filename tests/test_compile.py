"""torch.compile(fullgraph=True) and torch.export: the whole forward is one graph, with the logits of plain Python."""

import pytest
import torch
from encoder_decoders import t5_pair
from pairs import assert_close, left_padded, model, official_copy, pair, token_ids
from transformers import Qwen3ForSequenceClassification, StaticCache
from transformers.integrations.executorch import Seq2SeqLMExportableModule, TorchExportableModuleForDecoderOnlyLM

from blockformer import BlockformerDecoderForSequenceClassification

MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
WINDOWS = {"full": {"num_hidden_layers": 1}, "mixed": MIXED}
EXHAUSTIVE = pytest.mark.exhaustive
# Peaky weights would magnify the different order of a compiled kernel's sums.
MILD = {"initializer_range": 0.2}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(a_model, backend="aot_eager", **settings):
    """aot_eager traces and functionalises like the default backend, without building kernels: quick."""
    return torch.compile(a_model, fullgraph=True, backend=backend, **settings)


@pytest.mark.parametrize(
    ("windows", "use_cache"),
    [("mixed", True), *(pytest.param(windows, False, marks=EXHAUSTIVE) for windows in ("full", "mixed"))],
)
def test_forward_is_one_graph(windows, use_cache):
    ours, theirs = pair(**MILD, **WINDOWS[windows])
    ids, mask = left_padded(2, 12)
    with torch.no_grad():
        logits = compiled(ours)(ids, attention_mask=mask, use_cache=use_cache).logits
        assert_close(logits[mask.bool()], theirs(ids, attention_mask=mask).logits[mask.bool()])


@pytest.mark.parametrize("axes", [
    {"position_type": "learned", "rope_parameters": None, "norm_type": "layer_norm", "gated_mlp": False},
    {"position_type": "relative_bias", "rope_parameters": None},
    *(pytest.param(axes, marks=EXHAUSTIVE) for axes in (
        {"position_type": "sinusoidal", "rope_parameters": None, "norm_placement": "post"},
        {"position_type": "relative_key_query", "rope_parameters": None},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}},
    )),
])  # fmt: skip
def test_the_other_axes_are_one_graph_too(axes):
    ours, ids = model(num_hidden_layers=1, **MILD, **axes), token_ids(2, 9)
    with torch.no_grad():
        assert_close(compiled(ours)(ids, use_cache=False).logits, ours(ids).logits)


def test_a_training_step_is_one_graph():
    ours, ids = model(num_hidden_layers=1, **MILD).train(), token_ids(2, 9)
    gradients = []
    for a_model in (ours, compiled(ours)):
        ours.zero_grad()
        a_model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in ours.parameters()])
    assert_close(*gradients)


@pytest.mark.slow
def test_a_static_cache_is_one_graph_for_all_steps():
    ours, theirs = pair(**MILD, **MIXED)
    ids, cache, run = token_ids(2, 16), StaticCache(config=ours.config, max_cache_len=32), compiled(ours)
    with torch.no_grad():
        logits = [run(ids[:, :10], past_key_values=cache).logits, run(ids[:, 10:11], past_key_values=cache).logits]
        with torch._dynamo.config.patch(error_on_recompile=True):
            logits += [run(ids[:, step : step + 1], past_key_values=cache).logits for step in range(11, 16)]
        assert_close(torch.cat(logits, dim=1), theirs(ids).logits)


@pytest.mark.slow
def test_generate_with_a_compiled_forward():
    ours, theirs = pair(num_hidden_layers=1)
    ids, mask = left_padded(2, 9)
    settings = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    expected = theirs.generate(ids, **settings)
    ours.forward = compiled(ours.forward)
    assert torch.equal(ours.generate(ids, **settings), expected)


@pytest.mark.exhaustive
def test_the_default_backend_gives_the_same_logits():
    """Builds kernels with a C++ compiler."""
    ours, theirs = pair(num_hidden_layers=1, **MILD)
    ids, cache = token_ids(2, 8), StaticCache(config=ours.config, max_cache_len=16)
    with torch.no_grad():
        ours(ids[:, :7], past_key_values=cache)
        logits = compiled(ours, "inductor")(ids[:, 7:], past_key_values=cache).logits
        assert_close(logits, theirs(ids).logits[:, 7:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("windows", "strict"),
    [("mixed", False), *(pytest.param(*each, marks=EXHAUSTIVE) for each in (("mixed", True), ("full", False)))],
)
def test_export_with_a_batch_and_a_length_of_any_size(windows, strict):
    ours, theirs = pair(**MILD, **WINDOWS[windows])
    ids, mask = left_padded(2, 12)
    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", min=2, max=128)
    with torch.no_grad():
        program = torch.export.export(
            ours,
            (),
            {"input_ids": ids, "attention_mask": mask, "use_cache": False},
            dynamic_shapes={
                "input_ids": {0: batch, 1: length},
                "attention_mask": {0: batch, 1: length},
                "use_cache": None,
            },
            strict=strict,
        )
        for rows, tokens in ((3, 17), (1, 5)):
            ids, mask = left_padded(rows, tokens, seed=4)
            logits = program.module()(input_ids=ids, attention_mask=mask, use_cache=False).logits
            assert_close(logits[mask.bool()], theirs(ids, attention_mask=mask).logits[mask.bool()])


@pytest.mark.slow
def test_export_of_a_classifier_with_a_batch_of_any_size():
    ours = model(cls=BlockformerDecoderForSequenceClassification, num_hidden_layers=1, num_labels=2, use_cache=False)
    theirs = official_copy("qwen3", ours, Qwen3ForSequenceClassification)
    ids, mask = left_padded(2, 12)
    sizes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", min=2, max=128)}
    with torch.no_grad():
        batch, shapes = {"input_ids": ids, "attention_mask": mask}, {"input_ids": sizes, "attention_mask": sizes}
        program = torch.export.export(ours, (), batch, dynamic_shapes=shapes, strict=False).module()
        for rows, tokens in ((3, 17), (1, 5)):
            ids = token_ids(rows, tokens, seed=4)
            logits = program(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            assert_close(logits, theirs(ids).logits)


@pytest.mark.slow
def test_export_with_the_cache_inside():
    """The library's own recipe for devices: one token in, its logits out, the keys and values in buffers."""
    ours, theirs = pair(**MILD, **MIXED)
    ids = token_ids(1, 12)
    ours.generation_config.cache_implementation = "static"
    recipe = TorchExportableModuleForDecoderOnlyLM(ours, batch_size=1, max_cache_len=16)
    with torch.no_grad():
        program = recipe.export(input_ids=ids[:, :1], cache_position=torch.tensor([0])).module()
        steps = [program(input_ids=ids[:, i : i + 1], cache_position=torch.tensor([i])) for i in range(12)]
        assert_close(torch.cat(steps, dim=1), theirs(ids).logits)


@pytest.mark.slow
def test_export_of_an_encoder_decoder_by_the_librarys_recipe(tmp_path):
    """Two programs, of which the decoder's has its cache inside; the recipe asks the config for `d_model`."""
    ours, theirs = t5_pair(tmp_path)
    source = token_ids(1, 9)
    recipe = Seq2SeqLMExportableModule(ours, max_hidden_seq_length=32, max_cache_length=16)
    written = recipe.export().generate(source, 6)  # the start token counts
    assert written == theirs.generate(source, max_new_tokens=5, do_sample=False)[0].tolist()
