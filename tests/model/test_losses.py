"""The loss in chunks: that of all logits at once, with its gradients, and never all logits at once."""

import contextlib
import copy
import pickle

import pytest
import torch
from accelerate.utils import convert_to_fp32
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import assert_close, assert_gradients_close, official_name
from peft import LoraConfig, get_peft_model
from sizes import TINY
from test_training import arguments, gradients_of, uneven_rows
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import Trainer
from transformers.modeling_outputs import MaskedLMOutput
from transformers.trainer_pt_utils import LabelSmoother

import blockformer
from blockformer.model.language_model_head import finished
from blockformer.model.losses import token_cross_entropy
from blockformer.training import chunked_loss
from blockformer.training.chunked_loss import chunked_cross_entropy
from blockformer.training.late_outputs import DeferredLogits

SIZES = {**TINY, "vocab_size": 101, "head_dim": 8, "max_position_embeddings": 32}
TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
MODELS = {
    "qwen3": ("BlockformerDecoderForCausalLM", {}),
    "gpt2": ("BlockformerDecoderForCausalLM", {"bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": True}),
    "bert": ("BlockformerEncoderForMaskedLM", {}),
    "gemma2": ("BlockformerDecoderForCausalLM", {"num_key_value_heads": 2, "final_logit_softcapping": 3.0}),
    "t5": ("BlockformerEncoderDecoderForConditionalGeneration", TOKENS),
    "marian": ("BlockformerEncoderDecoderForConditionalGeneration", TOKENS),
}


def make(name, dropout=0.0):
    """A small model prepared for training, and a batch with padding and unlabelled tokens."""
    torch.manual_seed(0)
    head, own = MODELS[name]
    quiet = {"hidden_dropout": dropout, "attention_dropout": 0.0, "activation_dropout": 0.0}
    config = blockformer.preset(name, **{**SIZES, **quiet, **own, "initializer_range": 0.3})
    model = blockformer.prepare_for_training(getattr(blockformer, head)(config).train())
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 101, (3, 14), generator=generator)
    mask = (torch.arange(14) < torch.tensor([[14], [5], [9]])).long()
    labels = torch.randint(2, 101, (3, 14), generator=generator).masked_fill(mask == 0, -100)
    labels[0, :6] = -100
    return model, {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.fixture
def few(monkeypatch):
    """So few logits at once that every model of these tests takes its loss in chunks of 3 tokens."""
    monkeypatch.setattr(chunked_loss, "MAX_LOGITS", 3 * 101 + 7)


class Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.portable
@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 23),
    classes=st.integers(2, 40),
    max_logits=st.integers(1, 300),
    smoothing=st.sampled_from([0.0, 0.1, 0.7]),
    items=st.sampled_from([None, 5, "tensor"]),
    has_bias=st.booleans(),
    cap=st.sampled_from([None, 4.0]),
    frozen=st.sampled_from(["nothing", "weight", "states"]),
    seed=st.integers(0, 99),
)
def test_loss_and_gradients_of_all_logits(tokens, classes, max_logits, smoothing, items, has_bias, cap, frozen, seed):
    torch.manual_seed(seed)
    head, states = nn.Linear(8, classes, bias=has_bias), torch.randn(tokens, 8) * 3
    labels = torch.randint(classes, (tokens,))
    items = torch.tensor(7) if items == "tensor" else items
    head.weight.requires_grad_(frozen != "weight")
    results = []
    for in_chunks in (True, False):
        own = states.clone().requires_grad_(frozen != "states")
        leaves = [own, *head.parameters()]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chunked_loss, "MAX_LOGITS", max_logits)
            if in_chunks:
                loss = chunked_cross_entropy(head, own, labels, items, smoothing, cap=cap)
            else:
                loss = token_cross_entropy(finished(head(own), None, cap), labels, items, smoothing)
        leaves = [leaf for leaf in leaves if leaf.requires_grad]
        results.append([loss, *torch.autograd.grad(loss * 3, leaves)] if leaves else [loss])
    assert_close(results[0][0], results[1][0], 1e-6)
    term = 3 / max(1, tokens if items is None else int(items))  # of a gradient, in which they may cancel
    for found, expected in zip(results[0][1:], results[1][1:], strict=True):
        assert_close(found, expected, at_least=term)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_precision(dtype, few):
    torch.manual_seed(0)
    head, states = nn.Linear(16, 101).to(dtype), torch.randn(40, 16, dtype=dtype, requires_grad=True)
    labels = torch.randint(101, (40,))
    found, expected = (
        [loss, *torch.autograd.grad(loss, (states, *head.parameters()))]
        for loss in (chunked_cross_entropy(head, states, labels), token_cross_entropy(head(states), labels))
    )
    assert [tensor.dtype for tensor in found] == [torch.float32, dtype, dtype, dtype]
    assert_close(found[0], expected[0], 1e-6)
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert_close(one, other, 3 * torch.finfo(dtype).eps)


@pytest.mark.portable
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_every_model_trains_without_its_logits(name, smoothing, few):
    model, batch = make(name)
    batch["label_smoothing"] = smoothing
    with Largest() as in_chunks:
        outputs = model(**batch)
        found = gradients_of(model, outputs.loss)
    with Largest() as plain:
        whole = model(**batch, return_logits=True)
        expected = gradients_of(model, whole.loss)
    assert in_chunks.elements < plain.elements == 3 * 14 * 101
    assert torch.equal(outputs.logits, whole.logits)
    assert whole.logits.shape == (3, 14, 101)
    assert_close(outputs.loss, whole.loss, 1e-6)
    assert_gradients_close(found, expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_as_loaded_takes_its_loss_from_its_logits(name, few):
    model, batch = make(name)
    loaded = type(model)(model.config).train()
    loaded.load_state_dict(model.state_dict())
    with Largest() as plain:
        outputs = loaded(**batch)
    assert type(vars(outputs)["logits"]) is torch.Tensor
    assert plain.elements == 3 * 14 * 101
    assert_close(outputs.loss, model(**batch).loss, 1e-6)
    with Largest() as in_chunks:  # nobody wants them
        assert_close(loaded(**batch, return_logits=False).loss, outputs.loss, 1e-6)
    assert in_chunks.elements < plain.elements


def test_label_smoothing_is_that_of_the_trainer():
    model, batch = make("qwen3")
    found = model(**batch, label_smoothing=0.2).loss
    expected = LabelSmoother(epsilon=0.2)(model(**batch), batch["labels"], shift_labels=True)
    assert_close(found, expected, 1e-6)


def test_evaluation_gives_logits_unless_they_are_not_wanted(few):
    model, batch = make("bert")
    model.eval()
    whole = model(**batch)
    assert whole.logits.shape == (3, 14, 101)
    with torch.no_grad(), Largest() as largest:
        alone = model(**batch, return_logits=False)
    assert alone.logits is None
    assert largest.elements < 3 * 14 * 101
    assert_close(alone.loss, whole.loss, 1e-6)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_step_of_trainer_accumulated_over_batches(name, few, tmp_path, monkeypatch):
    def step(limit):
        monkeypatch.setattr(chunked_loss, "MAX_LOGITS", limit)
        model, _ = make(name)
        settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
        rows = [
            {key: value % 101 if key == "input_ids" else value for key, value in row.items()} for row in uneven_rows()
        ]
        for row in rows:
            row["labels"] = row["input_ids"].masked_fill(row["attention_mask"] == 0, -100)
        trainer = Trainer(model, arguments(tmp_path, **settings), train_dataset=rows)
        trainer.train()
        return model, trainer.state.log_history[0]["loss"]

    (in_chunks, loss), (plain, plain_loss) = step(200), step(1 << 25)
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    assert_gradients_close(in_chunks.state_dict(), plain.state_dict())


def is_late(outputs):
    return isinstance(dict(outputs.items())["logits"], DeferredLogits)


def test_a_head_with_an_adapter(few):
    """By the time of the backward pass another adapter may be active: the loss is taken from all logits."""
    model, batch = make("qwen3")
    assert is_late(model(**batch))
    wrapped = get_peft_model(model, LoraConfig(target_modules=["lm_head", "q_proj"], init_lora_weights=False))
    expected = gradients_of(wrapped, wrapped(**batch, return_logits=True).loss)
    assert any("lm_head" in key for key in expected)
    for return_logits in (None, False):
        outputs = wrapped(**batch, return_logits=return_logits)
        assert return_logits is False or not is_late(outputs)
        found = gradients_of(wrapped, outputs.loss)
        assert found.keys() == expected.keys()
        assert_gradients_close(found, expected)


def doubled(head):
    return head.register_forward_hook(lambda module, inputs, logits: 2 * logits)


def doubled_everywhere(head):
    def hook(module, inputs, logits):
        return 2 * logits if module is head else None

    return nn.modules.module.register_module_forward_hook(hook)


@pytest.mark.parametrize("watch", [doubled, doubled_everywhere])
@pytest.mark.parametrize("return_logits", [None, False])
def test_a_hook_of_the_head_is_called_once_and_sees_all_tokens(watch, return_logits, few):
    model, batch = make("qwen3")
    seen = []
    handle = watch(model.lm_head)
    other = model.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    loss = model(**batch, return_logits=return_logits).loss
    handle.remove()
    other.remove()
    assert seen == [(3, 14, 32)]
    model.lm_head.weight.data *= 2
    assert_close(loss, model(**batch, return_logits=True).loss)


def test_trainable_tokens_of_a_tied_head(few):
    """PEFT wraps the head too, so that the new rows of the embeddings are the head's."""
    model, batch = make("gpt2")
    batch["labels"][0, 9] = batch["input_ids"][0, 3] = 77
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"], trainable_token_indices=[77, 78]))
    found = gradients_of(wrapped, wrapped(**batch).loss)
    expected = gradients_of(wrapped, wrapped(**batch, return_logits=True).loss)
    assert any("trainable_tokens" in key for key in found)
    assert_gradients_close(found, expected)


def test_torch_func(few):
    model, batch = make("gpt2")
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights):
        return torch.func.functional_call(model, weights, (), batch).loss

    found = {official_name(name): gradient for name, gradient in torch.func.grad(loss)(weights).items()}
    assert_gradients_close(found, gradients_of(model, model(**batch, return_logits=True).loss))
    other = {name: 2 * weight for name, weight in weights.items()}
    outputs = torch.func.functional_call(model, other, (), batch)
    whole = torch.func.functional_call(model, other, (), {**batch, "return_logits": True})
    assert torch.equal(outputs.logits, whole.logits)


def test_under_autocast(few, monkeypatch):
    monkeypatch.setattr(chunked_loss, "checkpoint", lambda *_, **__: pytest.fail("the head runs a second time"))
    model, batch = make("qwen3")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        alone = model(**batch)
        whole = model(**batch, return_logits=True)
    assert isinstance(dict(alone.items())["logits"], DeferredLogits)
    assert_close(alone.loss, whole.loss, 1e-4)
    found, expected = gradients_of(model, alone.loss), gradients_of(model, whole.loss)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert gradient.dtype is torch.float32
        assert_close(gradient, expected[name], 0.03)


READINGS = {
    "attribute": lambda outputs: outputs.logits,
    "key": lambda outputs: outputs["logits"],
    "index": lambda outputs: outputs[1],
    "slice": lambda outputs: outputs[:2][1],
    "get": lambda outputs: outputs.get("logits"),
    "tuple": lambda outputs: outputs.to_tuple()[1],
    "getattr": lambda outputs: getattr(outputs, "logits", None),
    "copy": lambda outputs: copy.copy(outputs).logits,
    "mapped by accelerate": lambda outputs: convert_to_fp32(outputs).logits,
    "one of the items": lambda outputs: {name: value.detach().cpu() for name, value in outputs.items()}["logits"],
    "an argument": lambda outputs: [torch.clone(value) for value in outputs.values()][1],
    "pytree": lambda outputs: tree_map(lambda leaf: leaf, outputs).logits,
}


@pytest.mark.versions
@pytest.mark.parametrize("reading", READINGS)
def test_logits_are_there_for_whoever_reads_them(reading, few):
    """A batch's size does not decide what an output is: it decides when its logits are computed."""
    model, batch = make("qwen3")
    with Largest() as largest:
        outputs = model(**batch)
        assert "logits" in outputs
        assert list(outputs.keys()) == ["loss", "logits"]
        assert outputs["loss"] is outputs[0] is outputs.loss
    assert largest.elements < 3 * 14 * 101
    with Largest():  # under a mode of PyTorch's the fast paths are off
        expected = model(**batch, return_logits=True).logits
    assert torch.equal(READINGS[reading](outputs), expected)


def test_a_loss_of_ones_own_learns_from_late_logits(few):
    model, batch = make("gpt2")
    outputs = model(**batch)
    found = gradients_of(model, outputs.loss + outputs.logits.logsumexp(-1).mean())
    whole = model(**batch, return_logits=True)
    expected = gradients_of(model, whole.loss + whole.logits.logsumexp(-1).mean())
    assert_gradients_close(found, expected)


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("look", ["retain_grad", "hook"])
@pytest.mark.parametrize("name", ["bert", "marian", "gemma2", "qwen3"])
def test_late_logits_that_are_watched_get_the_gradient_of_the_loss(name, look, others, few):
    results = []
    for return_logits in (None, True):
        model, batch = make(name)
        outputs = model(**batch, output_hidden_states=True, num_items_in_batch=7, return_logits=return_logits)
        logits, seen, below = outputs.logits, [], []
        kept = outputs.get("hidden_states", outputs.get("decoder_hidden_states"))[-1]
        kept.register_hook(below.append)
        if look == "retain_grad":
            logits.retain_grad()
        else:
            logits.register_hook(lambda grad, seen=seen: seen.append(grad) or grad / 3)
        loss = 3 * outputs.loss + (logits.logsumexp(-1).mean() if others else 0)
        gradients = gradients_of(model, loss)
        results.append((gradients, logits.grad if look == "retain_grad" else sum(seen), len(below)))
    (found, late, runs), (expected, plain, plain_runs) = results
    assert_close(late, plain)
    assert_gradients_close(found, expected)
    assert runs == plain_runs == 1


def no_gradients():
    return torch.no_grad()


def half_precision():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def anything():
    return contextlib.nullcontext()


def under_inference():
    return torch.inference_mode()


@pytest.mark.parametrize("at_the_call", [anything, no_gradients, half_precision, under_inference])
@pytest.mark.parametrize("at_the_look", [anything, no_gradients, half_precision, under_inference])
@pytest.mark.parametrize("name", ["bert", "marian", "gemma2"])
def test_late_logits_are_of_the_modes_of_the_call(name, at_the_call, at_the_look, few):
    """And of its modules: a hook that comes later changes nothing."""
    model, batch = make(name)
    with at_the_call():
        outputs, whole = model(**batch), model(**batch, return_logits=True)
    assert is_late(outputs)
    handle = doubled(model.lm_head)
    with at_the_look():
        logits = outputs.logits
    handle.remove()
    assert torch.equal(logits, whole.logits)
    assert logits.dtype is whole.logits.dtype
    assert logits.requires_grad == whole.logits.requires_grad
    assert logits.is_inference() == whole.logits.is_inference()
    if logits.requires_grad:
        found, expected = (gradients_of(model, each.float().logsumexp(-1).mean()) for each in (logits, whole.logits))
        assert_gradients_close(found, expected, 0.03 if at_the_call is half_precision else 1e-5)


def test_late_logits_through_accelerate_are_float32(few):
    model, batch = make("qwen3")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs, whole = model(**batch), model(**batch, return_logits=True)
    assert whole.logits.dtype is torch.bfloat16
    outputs = convert_to_fp32(outputs)
    assert is_late(outputs)
    assert torch.equal(outputs.logits, whole.logits.float())


def step_counted(weights):
    torch.optim.SGD(weights, lr=0.1).step()


def step_through_data(weights):
    for weight in weights:
        weight.data.sub_(0.1 * weight.grad)


def other_memory(weights):
    for weight in weights:
        weight.data = weight.data - 0.1 * weight.grad


@pytest.mark.parametrize("only_biases", [False, True])
@pytest.mark.parametrize("step", [step_counted, step_through_data, other_memory])
def test_logits_of_weights_that_have_moved_on_are_refused(step, only_biases, few):
    model, batch = make("bert")
    for name, weight in model.named_parameters():
        weight.requires_grad_(not only_biases or name.endswith(".bias"))
    outputs = model(**batch)
    outputs.loss.backward()
    step([weight for weight in model.parameters() if weight.grad is not None])
    with pytest.raises(RuntimeError, match="weights have changed"):
        _ = outputs.logits


def test_outputs_are_those_of_the_library(few):
    model, batch = make("bert")
    outputs = model(**batch)
    assert isinstance(outputs, MaskedLMOutput)
    assert type(model.eval()(**batch)) is MaskedLMOutput
    assert pickle.loads(pickle.dumps(model(**batch))).logits.shape == (3, 14, 101)


def test_gradients_of_the_head_do_not_round_at_every_chunk(monkeypatch):
    """In bfloat16 a sum over many chunks loses what a sum in float32 keeps."""
    torch.manual_seed(0)
    head, states = nn.Linear(16, 64).bfloat16(), torch.randn(4096, 16).bfloat16()
    labels = torch.randint(64, (4096,))
    double = copy.deepcopy(head).double()
    errors = []
    for max_logits in (4096 * 64, 8 * 64):
        monkeypatch.setattr(chunked_loss, "MAX_LOGITS", max_logits)
        found = torch.autograd.grad(chunked_cross_entropy(head, states, labels), list(head.parameters()))
        expected = torch.autograd.grad(token_cross_entropy(double(states.double()), labels), list(double.parameters()))
        errors.append([(one - two).norm() / two.norm() for one, two in zip(found, expected, strict=True)])
    for whole, in_chunks in zip(*errors, strict=True):
        assert in_chunks < 1.5 * whole


@pytest.mark.parametrize("cap", [None, 3.0])
def test_a_loss_of_doubles_is_double_in_chunks_too(cap, monkeypatch):
    monkeypatch.setattr(chunked_loss, "MAX_LOGITS", 8 * 64)
    torch.manual_seed(0)
    head, states, labels = nn.Linear(16, 64).double(), torch.randn(50, 16).double(), torch.randint(64, (50,))
    found = chunked_cross_entropy(head, states, labels, cap=cap)
    expected = token_cross_entropy(finished(head(states), None, cap), labels)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    found, expected = (torch.autograd.grad(loss, list(head.parameters())) for loss in (found, expected))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_no_logits_means_chunks_under_compile_too(few):
    model, batch = make("qwen3")
    expected = model(**batch, return_logits=True)
    batch = {**batch, "return_logits": False}
    step = torch.compile(lambda **inputs: model(**inputs).loss, backend="aot_eager")
    with Largest() as largest:
        loss = step(**batch)
    assert largest.elements < 3 * 14 * 101
    assert_close(loss, expected.loss)
    found, expected = gradients_of(model, loss), gradients_of(model, expected.loss)
    assert_gradients_close(found, expected)


def test_tokens_without_a_label_count_for_nothing_in_a_chunk():
    """On an accelerator they are not taken out first."""
    torch.manual_seed(0)
    head, states = nn.Linear(8, 40), torch.randn(30, 8, requires_grad=True)
    labels = torch.randint(40, (30,)).masked_fill(torch.rand(30) < 0.5, -100)
    found = chunked_cross_entropy(head, states, labels, None, 0.1)
    expected = token_cross_entropy(head(states), labels, None, 0.1)
    assert_close(found, expected)
    leaves = [states, *head.parameters()]
    assert_close(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves))


def test_no_label_at_all(few):
    model, batch = make("gpt2")
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss = model(**batch).loss
    assert loss == 0
    assert all(not gradient.any() for gradient in gradients_of(model, loss).values())


def test_a_wrong_label_is_named(few):
    model, batch = make("gpt2")
    batch["labels"][0, 7] = 101
    with pytest.raises(ValueError, match="labels holds 101"):
        model(**batch)


def test_the_graph_is_gone_after_one_backward_pass(few):
    model, batch = make("qwen3")
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="return_logits=True"):
        loss.backward()


def test_second_derivatives_are_refused_or_those_of_all_logits(few):
    """PyTorch would drop the head's share of them without a word."""
    model, batch = make("qwen3")
    model.set_attn_implementation("eager")  # a fused one has no second derivatives
    with pytest.raises(RuntimeError, match="second derivatives, call with return_logits=True"):
        torch.autograd.grad(model(**batch).loss, [*model.parameters()], create_graph=True)
    once = torch.autograd.grad(model(**batch, return_logits=True).loss, [*model.parameters()], create_graph=True)
    assert all(each.grad_fn is not None for each in once)
