"""Callbacks for `Trainer`: stop at a loss that is not finite, watch the experts' load."""

import math

import torch
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback

from ..model.experts import Router


class StopOnNonFiniteLoss(TrainerCallback):
    """Ends training with an error that names the first step whose loss is NaN or infinite.

    Each process watches the losses of its own batches on the device where they are: nothing waits for it. On a CPU
    they are read before the optimizer steps, so the weights stay as they were. Elsewhere they are read where
    `Trainer` waits anyway: before it logs, evaluates or saves, and after an epoch. The error then comes up to
    `logging_steps` later, still names the step at which it happened, and no checkpoint is written before.

    A loss that `Trainer` computes itself (`label_smoothing_factor`, `compute_loss_func`) and an evaluation's loss
    are read from the logs, and the error names the steps since the last log. `logging_nan_inf_filter`,
    which logs a mean of earlier losses in place of such a loss, is turned off.

    Raises:
        FloatingPointError: out of `Trainer.train`.

    Examples:
        >>> trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[StopOnNonFiniteLoss()])
    """

    def __init__(self):
        self._hook: RemovableHandle | None = None
        self._losses: list[torch.Tensor] = []
        self._first: torch.Tensor | None = None
        self._is_training, self._logged = False, 0

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._stop()
        args.logging_nan_inf_filter = False
        self._is_training, self._logged = True, state.global_step
        self._hook = model.register_forward_hook(self._watch)

    def _watch(self, module, inputs, output):
        loss = output.get("loss") if isinstance(output, dict) else None
        if module.training and torch.is_tensor(loss):
            self._losses.append(loss.detach())

    def _note(self, step: int) -> None:
        """Keep the number of the first step with such a loss, on the device; -1 is none."""
        for loss in self._losses:
            first = torch.full((), -1, device=loss.device) if self._first is None else self._first.to(loss.device)
            self._first = torch.where((first < 0) & ~loss.isfinite().all(), step, first)
        self._losses.clear()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._note(state.global_step + 1)
        if self._can_read_now():
            self._read(state, "the weights are from the step before")

    def _can_read_now(self) -> bool:
        """Whether reading waits for no device."""
        return self._first is not None and self._first.device.type == "cpu"

    def on_step_end(self, args, state, control, **kwargs):
        if control.should_log or control.should_evaluate or control.should_save:
            self._read(state, "the weights have gone on from it and are of no use")

    def on_epoch_end(self, args, state, control, **kwargs):
        self._read(state, "the weights have gone on from it and are of no use")

    def _read(self, state, weights: str) -> None:
        step = -1 if self._first is None else int(self._first)
        if step >= 0:
            self._fail(f"the loss is NaN or infinite at step {step:,} of {state.max_steps:,}; {weights}")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not self._is_training:
            return
        for name, value in (logs or {}).items():
            if name.endswith("loss") and isinstance(value, float) and not math.isfinite(value):
                steps = f"of steps {self._logged + 1:,} to {state.global_step:,}"
                self._fail(f"{name} is {value} {steps if name == 'loss' else f'at step {state.global_step:,}'}")
        if "loss" in (logs or {}):
            self._logged = state.global_step

    def on_train_end(self, args, state, control, **kwargs):
        self._stop()

    def _stop(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook, self._is_training, self._logged = None, False, 0
        self._losses, self._first = [], None

    def _fail(self, what: str) -> None:
        self._stop()
        raise FloatingPointError(
            f"training diverged: {what}. Lower the learning rate or clip gradients (max_grad_norm); resume from an "
            "earlier checkpoint."
        )


class ExpertLoad(TrainerCallback):
    """Logs how evenly the routers spread the tokens of the training steps over the experts, at the worst layer.

    `expert_load_max` is the busiest expert's tokens over the mean of all: 1 where the load is even, E / k where all
    tokens have the same k of E experts. `expert_load_entropy` is the entropy of the experts' shares over log E: 1 where
    the load is even. Padding does not count.

    The figures are in `state.log_history` and in the printed log. A reporter (TensorBoard and the like) has them if the
    callback comes before it: `trainer.callback_handler.callbacks.insert(0, blockformer.ExpertLoad())`.

    Examples:
        >>> trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[ExpertLoad()])
    """

    def __init__(self):
        self._hooks: list[RemovableHandle] = []
        self._counts: dict[torch.nn.Module, torch.Tensor] = {}
        self._mask: torch.Tensor | None = None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.on_train_end(args, state, control)
        routers = [module for module in model.modules() if isinstance(module, Router)]
        if not routers:
            raise ValueError("ExpertLoad needs a model with experts, and num_experts is 0: remove the callback.")
        self._hooks = [router.register_forward_hook(self._count) for router in routers]
        self._hooks.append(model.register_forward_pre_hook(self._note_mask, with_kwargs=True))

    def _note_mask(self, model, inputs, named):
        self._mask = named.get("attention_mask")

    @torch.no_grad()
    def _count(self, router, inputs, output):
        if not router.training:
            return
        logits, _, experts = output
        counts = logits.new_ones(experts.shape, dtype=torch.float32)
        if self._mask is not None and self._mask.numel() == len(experts):
            counts = counts * self._mask.to(counts).flatten()[:, None]
        added = counts.new_zeros(logits.shape[-1]).index_add_(0, experts.flatten(), counts.flatten())
        self._counts[router] = self._counts.get(router, 0) + added

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" not in (logs or {}) or not self._counts:
            return
        shares = torch.stack([counts.cpu() / counts.cpu().sum() for counts in self._counts.values()])  # [layers, E]
        entropy = -torch.special.xlogy(shares, shares).sum(-1) / math.log(shares.shape[-1])
        figures = {
            "expert_load_max": shares.max().item() * shares.shape[-1],
            "expert_load_entropy": entropy.min().item(),
        }
        for entries in (logs, state.log_history[-1]):
            entries.update(figures)
        self._counts = {}

    def on_train_end(self, args, state, control, **kwargs):
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._counts, self._mask = [], {}, None
