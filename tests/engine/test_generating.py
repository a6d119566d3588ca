"""A model as loaded generates by faster products, and is as it was afterwards."""

import copy
import pickle
import threading

import pytest
import torch
from pairs import assert_close, token_ids
from sizes import UNEVEN
from torch import nn
from torch.nn import functional as F
from transformers import StoppingCriteria, StoppingCriteriaList

import blockformer
from blockformer import preset
from blockformer.engine import generating, in_parts, measure, onednn
from blockformer.engine.generating import GeneratingLinear
from blockformer.engine.linear import QuickLinear

LENGTH = {"min_new_tokens": 5, "max_new_tokens": 5, "do_sample": False}


@pytest.fixture(autouse=True)
def verdicts(monkeypatch):
    """It is quicker here, for large layers."""
    is_quicker = lambda rows, outputs, inputs: 0 < rows <= 4 and outputs * inputs >= 1 << 17  # noqa: E731
    monkeypatch.setattr(in_parts, "is_quicker_for", is_quicker)


def make(family="qwen3", dtype=torch.float32, cls=blockformer.BlockformerDecoderForCausalLM, **settings):
    torch.manual_seed(0)
    return cls(preset(family, **UNEVEN, **settings)).to(dtype).eval()


class Watch(StoppingCriteria):
    """Looks at each token which layers are quick."""

    def __init__(self, model):
        self.model, self.seen = model, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append({name for name, part in self.model.named_modules() if type(part) is GeneratingLinear})
        return torch.zeros(len(input_ids), dtype=torch.bool)


def seen_in(model, **settings):
    """The layers that are quick while the model writes."""
    watch, ids = Watch(model), token_ids(1, 6, vocab=UNEVEN["vocab_size"])
    model.generate(ids, stopping_criteria=StoppingCriteriaList([watch]), **LENGTH, **settings)
    assert len(watch.seen) == 5
    assert all(seen == watch.seen[0] for seen in watch.seen)
    return watch.seen[0]


def is_plain(model):
    return not any(type(part) is GeneratingLinear for part in model.modules())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outputs", [7, 16, 48, 777])
@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (1, 3), ()], ids=str)
def test_the_product_is_the_plain_one(shape, outputs, bias):
    torch.manual_seed(0)
    weight, states = torch.randn(outputs, 96), torch.randn(*shape, 96)
    given = weight, torch.randn(outputs) if bias else None
    exact = F.linear(states.double(), *(each if each is None else each.double() for each in given))
    for each in (states, states.repeat_interleave(2, -1)[..., ::2]):
        found = in_parts.product(each, *given)
        assert found.shape == exact.shape
        assert found.is_contiguous()
        torch.testing.assert_close(found, exact.float())


@pytest.fixture
def calls(monkeypatch):
    """One for each product in parts."""
    made, product = [], in_parts.product
    monkeypatch.setattr(in_parts, "product", lambda *given: made.append(1) or product(*given))
    return made


@pytest.mark.parametrize("is_quicker", [True, False])
@torch.no_grad()
def test_which_products_of_a_prepared_layer_are_in_parts(is_quicker, calls, monkeypatch):
    monkeypatch.setattr(in_parts, "is_quicker_for", lambda rows, *shape: is_quicker and 0 < rows <= 4)
    monkeypatch.setattr(onednn, "is_quicker_for", lambda rows, outputs, *_: outputs == 2048)
    cases = {(1024, 1): True, (1024, 4): True, (1024, 5): False, (64, 1): False, (2048, 1): False}
    for (outputs, rows), is_for in cases.items():
        layer = nn.Linear(256, outputs)
        states = torch.randn(rows, 1, 256)
        expected = layer(states)
        layer.__class__ = QuickLinear
        layer.adopt()
        calls.clear()
        assert_close(layer(states), expected)
        assert bool(calls) is (is_for and is_quicker)


@pytest.mark.parametrize("verdict", [True, False])
@pytest.mark.parametrize("learned", ["weight", "bias"])
def test_gradients_need_other_products(learned, verdict, calls, monkeypatch):
    monkeypatch.setattr(measure, "_verdicts", {**measure._verdicts, "onednn": verdict})
    for rows in (1, 16):
        layer = nn.Linear(1024, 1024).requires_grad_(False)
        getattr(layer, learned).requires_grad_(True)
        layer.__class__ = QuickLinear
        layer(torch.randn(rows, 1024)).sum().backward()
        assert getattr(layer, learned).grad is not None
    assert not calls


def test_large_layers_are_quick_while_a_decoder_writes():
    model = make()
    mlp = {f"model.layers.{index}.mlp.{name}_proj" for index in (0, 1) for name in ("gate", "up", "down")}
    assert seen_in(model) == {"lm_head", *mlp}
    assert is_plain(model)
    ids = token_ids(2, 6, vocab=UNEVEN["vocab_size"])
    quick = model.generate(ids, num_beams=2, return_dict_in_generate=True, output_logits=True, **LENGTH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOCKFORMER_FAST", "0")
        assert not seen_in(model)
        plain = model.generate(ids, num_beams=2, return_dict_in_generate=True, output_logits=True, **LENGTH)
    assert torch.equal(quick.sequences, plain.sequences)
    for found, expected in zip(quick.logits, plain.logits, strict=True):
        assert_close(found, expected)


def test_an_encoder_decoder_and_its_tied_head():
    cls = blockformer.BlockformerEncoderDecoderForConditionalGeneration
    model = make("marian", cls=cls, decoder_start_token_id=3, tie_word_embeddings=True)
    seen = seen_in(model)
    assert "lm_head" in seen
    assert any("decoder.layers.1.mlp" in name for name in seen)
    assert is_plain(model)


def test_layers_that_are_something_else_stay_as_they_are():
    model = make()
    first, second = (layer.mlp for layer in model.model.layers)
    handle = first.up_proj.register_forward_hook(lambda *_: None)
    first.down_proj.forward = first.down_proj.forward
    second.up_proj.__class__ = type("Own", (nn.Linear,), {})
    names = {"model.layers.0.mlp.gate_proj", "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.down_proj"}
    assert seen_in(model) == {"lm_head", *names}
    handle.remove()
    assert type(second.up_proj).__name__ == "Own"


def _compile_a_layer(model):
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")


def _compile_a_forward(model):
    model.model.layers[0].mlp.forward = torch.compile(model.model.layers[0].mlp.forward, backend="eager")


@pytest.mark.parametrize("change", [
    lambda model: model.bfloat16(),
    lambda model: setattr(model, "forward", model.forward),
    _compile_a_layer,
    _compile_a_forward,
    lambda model: model.model.layers[0].mlp.compile(backend="eager"),
])  # fmt: skip
def test_models_that_gain_nothing_or_are_compiled_in_part(change):
    model = make()
    assert len(generating._layers_of(model)) == 7
    change(model)
    assert not generating._layers_of(model)


def test_only_layers_whose_product_is_quicker_change(monkeypatch):
    monkeypatch.setattr(in_parts, "is_quicker_for", lambda rows, outputs, inputs: rows == 4 and outputs > inputs)
    model = make()
    mlp = {f"model.layers.{index}.mlp.{name}_proj" for index in (0, 1) for name in ("gate", "up")}
    assert seen_in(model) == {"lm_head", *mlp}
    monkeypatch.setattr(in_parts, "is_quicker_for", lambda *_: False)
    assert not generating._layers_of(model)


class Do(StoppingCriteria):
    """Does something before the third token."""

    def __init__(self, work):
        self.work, self.calls, self.result = work, 0, None

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        if self.calls == 2:
            self.result = self.work()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def doing(model, work):
    """What some work gives that is done while the model writes."""
    act, ids = Do(work), token_ids(1, 6, vocab=UNEVEN["vocab_size"])
    model.generate(ids, stopping_criteria=StoppingCriteriaList([act]), **LENGTH)
    return act.result


def test_other_threads_and_copies_have_plain_layers():
    model, ids, found = make(), token_ids(1, 1, vocab=UNEVEN["vocab_size"]), []
    with torch.no_grad():
        right = model(ids).logits

    def forward():
        with torch.no_grad():
            found.append(model(ids).logits)

    def work():
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()
        return copy.deepcopy(model), [pickle.loads(pickle.dumps(model.lm_head, each)) for each in (2, 4)]

    other, heads = doing(model, work)
    assert torch.equal(found[0], right)
    assert is_plain(other)
    for head in heads:
        assert type(head) is nn.Linear
        assert torch.equal(head.weight, model.lm_head.weight)


def test_a_layer_is_called_as_a_plain_one_is():
    model = make()
    states = torch.randn(1, 256)
    found = doing(model, lambda: model.lm_head(input=states))
    assert_close(found, model.lm_head(states))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        doing(model, lambda: model.lm_head(torch.randn(2, 128)))
    assert is_plain(model)


@pytest.mark.parametrize("settings", [None, {"second_copy": True}])
def test_a_model_that_is_prepared_while_it_writes_is_prepared_afterwards(settings):
    model, right = make(), make()

    def prepare(model):
        return model.prepare_for_training() if settings is None else model.prepare_for_inference(**settings)

    doing(model, lambda: prepare(model))
    kinds = [[type(part) for part in each.modules()] for each in (model, prepare(right))]
    assert kinds[0] == kinds[1]


def test_one_call_that_ends_leaves_another_one_quick():
    model = make()
    seen = doing(model, lambda: (seen_in(model), type(model.lm_head)))
    assert "lm_head" in seen[0]
    assert seen[1] is GeneratingLinear
    assert is_plain(model)


def test_an_error_leaves_plain_layers_and_so_do_several_at_a_time():
    model = make()
    with pytest.raises(ValueError, match="holds the token 9999"):
        model.generate(torch.tensor([[5, 9999]]), **LENGTH)
    assert is_plain(model)
    ids = token_ids(1, 6, vocab=UNEVEN["vocab_size"])
    right, found = model.generate(ids, **LENGTH), []
    threads = [threading.Thread(target=lambda: found.append(model.generate(ids, **LENGTH))) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert all(torch.equal(each, right) for each in found)
    assert len(found) == 4
    assert is_plain(model)


def test_a_prepared_model_keeps_its_own_layers():
    model = make().prepare_for_training()
    kinds = {name: type(part) for name, part in model.named_modules()}
    seen_in(model)
    assert {name: type(part) for name, part in model.named_modules()} == kinds
