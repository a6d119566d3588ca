"""A loss that is not a number ends training and names the step."""

import math

import pytest
import torch
from pairs import config, token_ids
from transformers import Trainer, TrainerCallback, TrainingArguments

import blockformer
from blockformer import StopOnNonFiniteLoss

ROWS = [{"input_ids": row, "labels": row} for row in token_ids(16, 6)]


class Poison:
    """Multiplies the loss of one forward pass in training, or its logits, by NaN or infinity."""

    def __init__(self, model, call, factor, logits=False):
        self.call, self.factor, self.logits, self.calls = call, factor, logits, 0
        model.register_forward_hook(self)

    def __call__(self, module, inputs, output):
        self.calls += module.training
        if module.training and self.calls == self.call:
            if self.logits:
                output.logits = output.logits * self.factor
            else:
                output.loss = output.loss * self.factor
        return output


class Weights(TrainerCallback):
    """The weights after each step."""

    def __init__(self):
        self.after = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.after.append([weight.detach().clone() for weight in model.parameters()])


def tiny_model():
    return blockformer.BlockformerDecoderForCausalLM(config("qwen3", num_hidden_layers=1, initializer_range=0.1))


def trainer_of(model, folder, callbacks, **settings):
    plain = {"per_device_train_batch_size": 2, "max_steps": 6, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    quiet = {"save_strategy": "no", "dataloader_pin_memory": False, "logging_steps": 4}
    arguments = TrainingArguments(str(folder), **{**plain, **quiet, **settings})
    return Trainer(model, arguments, train_dataset=ROWS, eval_dataset=ROWS[:2], callbacks=callbacks)


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf])
def test_training_ends_before_the_weights_take_the_step(tmp_path, factor):
    model, weights = tiny_model(), Weights()
    Poison(model, 3, factor)
    trainer = trainer_of(model, tmp_path, [weights, StopOnNonFiniteLoss()])
    with pytest.raises(FloatingPointError, match=r"at step 3 of 6; the weights are from the step before\. Lower"):
        trainer.train()
    assert len(weights.after) == trainer.state.global_step == 2
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), weights.after[-1], strict=True))
    assert len(model._forward_hooks) == 1, "only the poison's own hook is left"


def test_what_transformers_does_beside_it(tmp_path):
    model = tiny_model()
    Poison(model, 3, math.nan)
    trainer = trainer_of(model, tmp_path, [])
    trainer.train()
    assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)
    assert not any(weight.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize("call", [3, 4])
def test_any_batch_of_an_accumulated_step_counts(tmp_path, call):
    model = tiny_model()
    Poison(model, call, math.nan)
    with pytest.raises(FloatingPointError, match="at step 2 of 6"):
        trainer_of(model, tmp_path, [StopOnNonFiniteLoss()], gradient_accumulation_steps=2).train()


class Unread(StopOnNonFiniteLoss):
    """As on a device that one would have to wait for."""

    def _can_read_now(self):
        return False


@pytest.mark.parametrize(
    ("settings", "taken"),
    [
        ({"logging_steps": 4}, 4),
        ({"logging_steps": 100, "save_strategy": "steps", "save_steps": 5}, 5),
        ({"logging_steps": 100, "eval_strategy": "steps", "eval_steps": 4}, 4),
        ({"logging_steps": 100}, 6),
        ({"logging_steps": 100, "max_steps": -1, "num_train_epochs": 1.0, "per_device_train_batch_size": 4}, 4),
    ],
    ids=["log", "save", "evaluate", "end", "epoch"],
)
def test_on_a_device_it_is_read_where_the_trainer_waits_and_names_the_true_step(tmp_path, settings, taken):
    model = tiny_model()
    Poison(model, 3, math.nan)
    trainer = trainer_of(model, tmp_path, [Unread()], **settings)
    with pytest.raises(FloatingPointError, match=r"at step 3 of \d; the weights have gone on from it"):
        trainer.train()
    assert trainer.state.global_step == taken
    assert not list(tmp_path.glob("checkpoint-*"))
    assert not any("loss" in entry for entry in trainer.state.log_history)


def test_a_loss_outside_the_model_is_seen_in_the_log(tmp_path):
    model = tiny_model()
    Poison(model, 5, math.nan, logits=True)
    trainer = trainer_of(
        model, tmp_path, [StopOnNonFiniteLoss()], label_smoothing_factor=0.1, logging_steps=3, max_steps=9
    )
    with pytest.raises(FloatingPointError, match="loss is nan of steps 4 to 6"):
        trainer.train()


def test_the_loss_of_an_evaluation(tmp_path):
    model = tiny_model()
    trainer = trainer_of(model, tmp_path, [StopOnNonFiniteLoss()], eval_strategy="steps", eval_steps=2)

    def spoil(module, inputs, output):
        if not module.training:
            output.loss = output.loss * math.nan

    model.register_forward_hook(spoil)
    with pytest.raises(FloatingPointError, match="eval_loss is nan at step 2"):
        trainer.train()
    assert math.isnan(trainer.evaluate()["eval_loss"]), "outside training it is an answer like any other"


def test_a_good_run_goes_through_and_can_be_repeated(tmp_path):
    model, stop = tiny_model(), StopOnNonFiniteLoss()
    trainer = trainer_of(model, tmp_path, [stop], max_steps=2)
    for _ in range(2):
        trainer.train()
        assert trainer.state.global_step == 2
        assert not model._forward_hooks
    Poison(model, 2, math.nan)
    with pytest.raises(FloatingPointError, match="at step 2 of 2"):
        trainer.train()
