"""Callbacks for `Trainer`: stop at a loss that is not finite, watch the experts' load, resume from what is complete."""

import json
import math
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback
from transformers.utils import logging

from ..model.experts import Router
from ..model.pretrained_model import WeightsError, listed
from ..publishing.earlier_names import NOT_RESUMED, are_earlier

logger = logging.get_logger(__name__)


class StopOnNonFiniteLoss(TrainerCallback):
    """Ends training with an error that names the first step whose loss is NaN or infinite.

    Each process watches the losses of its own batches, as the model gives them, where they are: nothing waits for a
    device. On a CPU they are read before the optimizer steps, so the weights stay those of the step before. Elsewhere
    they are read where `Trainer` waits anyway: before it logs, evaluates or saves, and after an epoch. The error then
    comes up to `logging_steps` later, still names the step at which it happened, and no checkpoint is written before.

    A loss that `Trainer` takes itself, outside the model (`label_smoothing_factor`, `compute_loss_func`), and that of
    an evaluation are seen in the logs, and the error names the steps since the last log. `logging_nan_inf_filter`,
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
            self._read(state, "the weights are those of the step before")

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

    The figures are in `state.log_history` and in what is printed. A reporter (TensorBoard and the like) has them if the
    callback stands before it: `trainer.callback_handler.callbacks.insert(0, blockformer.ExpertLoad())`.

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
            raise ValueError("ExpertLoad is for models with experts: num_experts is 0.")
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


def last_complete_checkpoint(folder: str | os.PathLike) -> str | None:
    """The checkpoint to go on from: the one with the highest number of which nothing is missing.

    `Trainer` writes a checkpoint file by file, its `trainer_state.json` last, and by itself resumes from the highest
    number, whole or not. Here a checkpoint counts if the weights, the optimizer, the schedule, the random states and
    the `Trainer`'s own state are there, and each file is whole: its header or directory fits its length. Those of FSDP
    and DeepSpeed and of adapters count too. No sum over the bytes is checked: that would read all of them.

    Args:
        folder: the `output_dir` of one run, there or not.

    Returns:
        For `Trainer.train(resume_from_checkpoint=...)`: a path, or None, with which training starts anew. Each
        checkpoint that is passed over is named in a warning.

    Raises:
        WeightsError: the checkpoint's weights do not have the names that its config makes. `Trainer` would go on from
            it with a warning, with new weights for those that are missing.
    """
    numbered = [
        (int(match[1]), path)
        for path in (Path(folder).iterdir() if Path(folder).is_dir() else ())
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and path.is_dir()
    ]
    chosen, passed_over = None, []
    for step, path in sorted(numbered, reverse=True):
        problem = _problem_of_state(path, step) or _problem_of_parts(path) or _problem_of_files(path)
        if problem is None:
            _check_names(path)
            chosen = str(path)
            break
        passed_over.append(f"{path} is not complete: {problem}.")
    if passed_over:
        way_on = f"Training goes on from {chosen}." if chosen else "No checkpoint is: training starts anew."
        logger.warning(" ".join([*passed_over, way_on]))
    return chosen


def _problem_of_state(folder: Path, step: int) -> str | None:
    """Written last: where it is right, the others have been written."""
    try:
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "trainer_state.json is missing"
    except (OSError, ValueError):
        return "trainer_state.json is damaged"
    return None if isinstance(state, dict) and state.get("global_step") == step else "trainer_state.json is of another"


def _check_names(folder: Path) -> None:
    """Refuse whole weights of one of our classes whose names are not those of the class today."""
    names = _names_of_weights(folder)
    if not names or not (folder / "config.json").exists():
        return  # adapters, or shards of FSDP or DeepSpeed, which are matched strictly
    import blockformer  # whose `api` stands above this module

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = str((config.get("architectures") or [None])[0])
    model_class = getattr(blockformer, architecture, None)
    if model_class is None or not hasattr(model_class, "config_class"):
        return  # a class of somebody else's
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_pretrained(folder))
    if missing := sorted(model.state_dict().keys() - names - model.all_tied_weights_keys.keys()):
        what = f"{folder}: weights of a {architecture} are missing"
        if are_earlier(names):
            what = f"{folder}: its weights have names of an earlier state of Blockformer"
        raise WeightsError(f"{what}. {NOT_RESUMED}:{listed(missing)}")


def _names_of_weights(folder: Path) -> set[str]:
    """The names in the files of whole weights, in the library's order of files."""
    for path in (folder / "model.safetensors", folder / "pytorch_model.bin"):
        if path.suffix == ".safetensors" and path.exists():
            with safe_open(path, framework="pt") as file:
                return set(file.keys())
        if path.exists():
            return set(torch.load(path, map_location="meta", weights_only=True))
        index = path.with_name(f"{path.name}.index.json")
        if index.exists():
            return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    return set()


# What each part of a checkpoint may be called: one process, FSDP, DeepSpeed (which names its folder in "latest").
_PARTS = {
    "weights": (
        "model.safetensors model.safetensors.index.json pytorch_model.bin pytorch_model.bin.index.json "
        "adapter_model.safetensors adapter_model.bin */adapter_model.safetensors */adapter_model.bin "
        "pytorch_model_fsdp.bin pytorch_model_fsdp_*/.metadata latest"
    ),
    "an optimizer": "optimizer.pt optimizer.bin optimizer_*/.metadata latest",
    "a schedule": "scheduler.pt latest",
    "random states": "rng_state.pth rng_state_0.pth",
}


def _problem_of_parts(folder: Path) -> str | None:
    missing = [part for part, names in _PARTS.items() if not any(any(folder.glob(name)) for name in names.split())]
    if missing:
        return f"without {', '.join(missing)}"
    of_processes = len(list(folder.glob("rng_state_*.pth")))
    if of_processes == 1 or any(not (folder / f"rng_state_{rank}.pth").exists() for rank in range(of_processes)):
        return "without the random states of some processes"
    if (folder / "latest").exists():
        named = folder / (folder / "latest").read_text(encoding="utf-8", errors="replace").strip()
        return None if named.is_dir() and any(named.iterdir()) else "latest names a folder that is missing"
    return None


def _check_json(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    if path.name.endswith(".index.json"):
        for shard in set(content["weight_map"].values()):
            (path.parent / shard).stat()


def _check_safetensors(path: Path) -> None:
    with safe_open(path, framework="pt"):
        pass


def _check_zip(path: Path) -> None:
    with zipfile.ZipFile(path):
        pass


_CHECKS: dict[str, Callable[[Path], None]] = {
    ".json": _check_json,
    ".safetensors": _check_safetensors,
    **dict.fromkeys((".pt", ".pth", ".bin"), _check_zip),
}


def _problem_of_files(folder: Path) -> str | None:
    for path in sorted(folder.rglob("*")):
        try:
            _CHECKS.get(path.suffix, lambda _: None)(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError, zipfile.BadZipFile) as error:
            missing = isinstance(error, FileNotFoundError)
            return f"{path.relative_to(folder)} {'lacks a shard' if missing else 'is damaged'}"
    return None
