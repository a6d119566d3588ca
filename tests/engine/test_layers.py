"""Compiled layers give the states of the uncompiled encoder for every batch, by one graph."""

import copy
import io
import threading

import pytest
import torch
from pairs import assert_close, token_ids
from sizes import STRONG
from test_unpadding import masked

import blockformer
from blockformer import preset
from blockformer.engine import compiled, compiling, layers, linear, measure, prepare, step_functions
from blockformer.engine.layers import CompiledLayers, _Layer
from blockformer.engine.runtime import TrainingRuntime

pytestmark = pytest.mark.usefixtures("folder")

# Lengths of the rows and of the longest: mixed, full, one row, one token, all padding, one long row among short ones.
BATCHES = [([9, 4, 1], 9), ([6, 6], 6), ([7], 7), ([1], 1), ([3, 0, 2], 4), ([60, 2, 3, 3, 3], 60)]


def pair(family="bert", cls=None, dtype=torch.float32, **settings):
    """A model, and a compiled copy of it."""
    torch.manual_seed(0)
    config = preset(family, **{**STRONG, **settings})
    names = {"blockformer_encoder": "EncoderModel", "blockformer_decoder": "DecoderModel"}
    cls = cls or getattr(blockformer, "Blockformer" + names.get(config.model_type, "EncoderDecoderModel"))
    plain = cls(config).to(dtype).eval()
    return plain, copy.deepcopy(plain).prepare_for_inference(compile=True)


def stack_of(model):
    return model.get_encoder() if model.config.is_encoder_decoder else model.base_model


def is_compiled(model) -> bool:
    """Whether the layers were compiled."""
    return stack_of(model).runtime.compiled_layers.__dict__.get("_functions") is not None


def assert_same_states(quick, plain, tolerance=1e-5):
    for lengths, longest in BATCHES:
        mask = masked(lengths, longest)
        ids = token_ids(len(lengths), longest, vocab=STRONG["vocab_size"]) * mask
        ours, theirs = (stack_of(model)(ids, attention_mask=mask).last_hidden_state for model in (quick, plain))
        assert_close(ours * mask[..., None], theirs * mask[..., None], tolerance)


@torch.no_grad()
def test_states_are_the_same_for_every_batch(untraced, monkeypatch):
    plain, quick = pair()
    calls, call = [], _Layer.forward
    monkeypatch.setattr(_Layer, "forward", lambda *given: calls.append(1) or call(*given))
    assert_same_states(quick, plain)
    assert len(calls) == 2 * (len(BATCHES) - 1)  # both layers, of all but the single token
    for again in (copy.deepcopy(quick), pickled(quick)):
        assert_same_states(again, plain)

    calls.clear()
    ids, mask = token_ids(2, 9, vocab=97), masked([9, 5], 9)
    holes = mask.clone()
    holes[0, 4] = 0
    for way in ({"attention_mask": holes}, {"output_hidden_states": True}, {"head_mask": torch.rand(2, 4)}):
        assert_close(dict(quick(ids, **way)), dict(plain(ids, **way)))
    assert not calls
    assert quick.train()(ids).last_hidden_state.shape == (2, 9, 32)
    assert type(stack_of(quick.prepare_for_training()).runtime) is TrainingRuntime
    assert_same_states(quick.eval(), plain)
    assert not calls


def pickled(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def assert_same_prompts(quick, plain):
    """Of one row and of several; keys and values are there for what comes next."""
    for rows in (1, 3):
        ids, more = token_ids(rows, 9, vocab=97), token_ids(rows, 4, 1, vocab=97)
        outputs = [model(ids, use_cache=True) for model in (quick, plain)]
        assert_close(*[output.logits for output in outputs])
        for ours, theirs in zip(*(output.past_key_values.layers for output in outputs), strict=True):
            assert_close((ours.keys, ours.values), (theirs.keys, theirs.values))
        pairs = zip((quick, plain), outputs, strict=True)
        assert_close(*[model(more, past_key_values=output.past_key_values).logits for model, output in pairs])


DECODERS = [
    ("qwen3", {"num_key_value_heads": 2, "attention_gate": True}),
    ("gpt2", {}),
    ("gpt_neox", {}),
    ("opt", {"token_embedding_size": 20}),
]


@pytest.mark.parametrize(("family", "settings"), DECODERS)
@torch.no_grad()
def test_a_prompt_gives_the_same_logits_and_cache(family, settings, untraced, monkeypatch):
    plain, quick = pair(family, blockformer.BlockformerDecoderForCausalLM, **settings)
    calls, call = [], _Layer.forward
    monkeypatch.setattr(_Layer, "forward", lambda *given: calls.append(1) or call(*given))
    assert_same_prompts(quick, plain)
    assert len(calls) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@torch.no_grad()
def test_a_prompt_by_weights_of_4_bits(dtype, untraced, monkeypatch):
    """Only in bfloat16, where the processor has it, and for more tokens than have a product of packed weights."""
    for is_widened in (False, True):
        monkeypatch.setitem(measure._verdicts, f"widened, {dtype}", is_widened)
        plain, quick = pair(
            "qwen3", blockformer.BlockformerDecoderForCausalLM, dtype, linear_bits=4, linear_group_size=16
        )
        for model in (plain, quick):
            for tensor in low_tensors(model):
                tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) * 2654435761 % 2**31)
        calls, call = [], _Layer.forward
        monkeypatch.setattr(_Layer, "forward", lambda *given, calls=calls, call=call: calls.append(1) or call(*given))
        for tokens, takes in ((32, False), (33, True)):
            ids = token_ids(1, tokens, vocab=97)
            found, expected = (model(ids).logits for model in (quick, plain))
            error = (found - expected).norm() / expected.norm()
            assert error <= {torch.float32: 1e-5, torch.float16: 0.02, torch.bfloat16: 0.1}[dtype]
            assert bool(calls) == (takes and dtype is torch.bfloat16 and not is_widened)


@pytest.mark.parametrize("settings", [{}, {"linear_bits": 4, "linear_group_size": 16}], ids=["plain", "4 bits"])
@torch.no_grad()
def test_layers_that_are_alike_are_compiled_once(settings, monkeypatch):
    """Also after a call, which leaves notes in modules."""
    made, digest = [], compiled._digest

    def of(cls, module, arguments, varying, copies):
        made.append(
            digest(module, dict(module.named_parameters()) | dict(module.named_buffers()), arguments, varying, False)
        )
        return module

    monkeypatch.setattr(compiled.CompiledFunction, "of", classmethod(of))
    monkeypatch.setattr(step_functions, "_SMALL_LAYERS", 1)
    monkeypatch.setitem(measure._verdicts, "widened, torch.bfloat16", False)
    kinds = []
    for _ in range(2):
        sizes = {"num_hidden_layers": 4, **settings}
        _, quick = pair("qwen3", blockformer.BlockformerDecoderForCausalLM, torch.bfloat16, **sizes)
        for tensor in low_tensors(quick):
            tensor.random_()
        quick(token_ids(1, 40, vocab=97), attention_mask=torch.tensor([[0] + [1] * 39]))  # uncompiled
        made.clear()
        quick.generate(token_ids(1, 40, vocab=97), max_new_tokens=3, do_sample=False)
        assert len(made) == 4 + 2 + 4  # of the prompt, and the step's first, last and layers
        kinds.append(set(made))
    assert len(kinds[0]) == 4
    assert kinds[0] == kinds[1]


def low_tensors(model):
    return [tensor for name, tensor in model.named_buffers() if name.endswith(("qweight", "qzeros"))]


@torch.no_grad()
def test_no_other_model_waits_for_the_compiler(monkeypatch):
    """Two threads that come at once have it compile once."""
    model, other = pair()[1], pair()[1]
    made, begins, ends = [], threading.Event(), threading.Event()

    def make(parts, copies):
        is_other = threading.current_thread() is threading.main_thread()
        begins.set()
        made.append(is_other or ends.wait(10))
        return [module for module, *_ in parts]

    monkeypatch.setattr(layers, "functions_of", make)
    ids = token_ids(2, 9, vocab=97)
    threads = [threading.Thread(target=model, args=(ids,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert begins.wait(10)
    other(ids)
    ends.set()
    for thread in threads:
        thread.join()
    assert made == [True, True]


@torch.no_grad()
def test_layers_stay_uncompiled_where_a_half_precision_is_quicker_in_float32_or_packed(untraced, monkeypatch):
    monkeypatch.setattr(prepare, "pack_weights", lambda *_: 0)  # not every processor can
    for is_widened, is_packed in ((True, False), (False, True), (False, False)):
        monkeypatch.setitem(measure._verdicts, "widened, torch.bfloat16", is_widened)
        monkeypatch.setitem(measure._verdicts, "packed, torch.bfloat16", is_packed)
        plain, quick = pair(dtype=torch.bfloat16)
        assert hasattr(stack_of(quick).runtime, "compiled_layers") != (is_widened or is_packed)
        ids = token_ids(2, 9, vocab=97)
        found, expected = (model(ids).last_hidden_state for model in (quick, plain))
        assert (found - expected).norm() <= 0.1 * expected.norm()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "settings"), DECODERS)
@torch.no_grad()
def test_a_compiled_prompt(family, settings):
    plain, quick = pair(family, blockformer.BlockformerDecoderForCausalLM, **settings)
    assert_same_prompts(quick, plain)
    assert is_compiled(quick)


@pytest.mark.parametrize(("family", "is_quicker"), [("bert", True), ("t5", False), ("qwen3", True)])
@torch.no_grad()
def test_one_graph_takes_any_number_of_tokens_and_sequences(family, is_quicker, monkeypatch):
    monkeypatch.setattr(linear, "_LEAST_WEIGHTS_IN_GRAPHS", 1)
    monkeypatch.setattr(measure, "_verdicts", {"onednn": is_quicker})
    layers: CompiledLayers = stack_of(pair(family)[1]).runtime.compiled_layers
    layer, config = layers._stack.layers[0], layers._stack.config
    arguments, varying = layers._example(layer)
    with measure.own_trace():
        part = _Layer(layer, config, layers._stack.is_causal)
        program = torch.export.export(part, arguments, dynamic_shapes=compiling.with_dims(varying), strict=False)
    assert all(each.upper > 1 << 40 for each in program.range_constraints.values())
    assert len(program.range_constraints) >= 2


def test_a_model_with_terms_that_the_graph_is_not_told_of_is_refused_or_runs_uncompiled():
    for family, position_type in (("bert", "relative_key"), ("umt5", "relative_bias")):
        with pytest.raises(ValueError, match="neither"):
            pair(family, position_type=position_type)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["bert", "roberta", "albert", "t5", "t5-v1.1", "marian", "bart", "mbart"])
@torch.no_grad()
def test_every_family(family):
    settings = {"decoder_start_token_id": 0} if family == "marian" else {}
    if "t5" in family:  # its scores are not scaled: with weights as large as the others', they are all rounding
        settings["initializer_range"] = 0.2
    plain, quick = pair(family, **settings)
    assert_same_states(quick, plain)
    assert is_compiled(quick)


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", [
    {"position_type": "rotary", "num_key_value_heads": 2, "qk_norm": True},
    {"norm_type": "rms_norm", "norm_bias": False, "gated_mlp": True, "norm_placement": "pre"},
    {"dtype": torch.bfloat16}, {"dtype": torch.float16},
], ids=str)  # fmt: skip
@torch.no_grad()
def test_other_settings_and_dtypes(settings, monkeypatch):
    slow = dict.fromkeys(["packed, torch.bfloat16", "widened, torch.float16", "widened, torch.bfloat16"], False)
    monkeypatch.setattr(measure, "_verdicts", {**measure._verdicts, **slow})
    plain, quick = pair(**settings)
    assert_same_states(quick, plain, 1e-5 if plain.dtype is torch.float32 else 0.05)
    assert is_compiled(quick)


@pytest.mark.exhaustive
@torch.no_grad()
def test_an_encoder_decoder_writes_the_same_text():
    cls = blockformer.BlockformerEncoderDecoderForConditionalGeneration
    plain, quick = pair("t5", cls, decoder_start_token_id=0)
    ids, mask = token_ids(3, 9, vocab=97), masked([9, 4, 6], 9)
    for settings in ({}, {"num_beams": 3}):
        texts = [model.generate(ids, attention_mask=mask, max_new_tokens=9, **settings) for model in (plain, quick)]
        assert torch.equal(*texts)
    assert is_compiled(quick)
