"""Muon for the matrices of the layers and AdamW for everything else, as one optimizer."""

import math

import torch
from torch import nn

from .optimizer import adamw_over, groups_beside
from .width_transfer import matrices_beside


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` over some groups and `torch.optim.AdamW` over the others.

    All groups and all states are this optimizer's own, so that schedulers, `Trainer`, accelerate and checkpoints see
    one like any other. Muon's groups come first; a group that is added later is AdamW's.
    """

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.AdamW):
        self.parts, self.of_muon = (muon, adamw), len(muon.param_groups)
        super().__init__([*muon.param_groups, *adamw.param_groups], {"lr": adamw.defaults["lr"]})

    @torch.no_grad()
    def step(self, closure=None):
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups[: self.of_muon], self.param_groups[self.of_muon :]
        for part, its in zip(self.parts, groups, strict=True):
            part.param_groups, part.state = its, self.state  # loading a state makes new ones
            part.step()
        return loss


def muon(
    model: nn.Module,
    learning_rate: float,
    weight_decay: float,
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    base=None,
) -> MuonWithAdamW:
    """Muon (Jordan et al., 2024) over the matrices of the layers, AdamW over everything else.

    Muon's steps are as large as AdamW's, element by element (Liu et al., 2025: `adjust_lr_fn="match_rms_adamw"`), so
    that one learning rate and one weight decay, found with AdamW, serve both. AdamW has the embeddings, heads, poolers,
    norms and biases. It also has the stacked weights of experts: Muon only takes matrices, and would have to see each
    expert's by itself.

    Args:
        model: what to train.
        learning_rate: of both.
        weight_decay: of all matrices.
        momentum: Muon's, with Nesterov's step.
        betas: AdamW's.
        eps: AdamW's.
        base: as for `adamw`. Muon's step of a matrix then has the spectral norm that it has at the base, times the
            root of outputs over inputs (Yang, Simon and Bernstein, 2023): 1/sqrt(m) of the rate at m times the width.

    Raises:
        ImportError: torch is older than 2.9, which has no Muon.
        ValueError: a number out of its range, or a model with no matrices in `layers` to train.

    Examples:
        >>> optimizer = muon(model, learning_rate=2e-3, weight_decay=0.1)
        >>> Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None)).train()
    """
    if not hasattr(torch.optim, "Muon"):
        raise ImportError(f"Muon came with torch 2.9, and this is torch {torch.__version__}: upgrade it, or use adamw.")
    groups = groups_beside(model, base, learning_rate, weight_decay)
    hidden = _matrices_of_layers(model)
    if not hidden:
        raise ValueError(f"{type(model).__name__} has no matrices in `layers` that Muon could train: use adamw.")
    others = [{**group, "params": [each for each in group["params"] if each not in hidden]} for group in groups]
    matrices = torch.optim.Muon(
        [
            {"params": parameters, "lr": learning_rate * ratio, "weight_decay": weight_decay / ratio}
            for ratio, parameters in _by_rate(model, hidden, base).items()
        ],
        momentum=momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return MuonWithAdamW(matrices, adamw_over(others, learning_rate, weight_decay, betas, eps))


def _matrices_of_layers(model: nn.Module) -> dict[torch.Tensor, None]:
    """The trainable matrices of linear layers in `layers`, in their order. A single row is a vector."""
    linear = ((path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear))
    weights = (module.weight for path, module in linear if "layers" in path.split("."))
    return dict.fromkeys(weight for weight in weights if weight.requires_grad and min(weight.shape) > 1)


def _by_rate(model: nn.Module, hidden, base) -> dict[float, list[torch.Tensor]]:
    """The matrices by the share of the learning rate that the base gives them."""
    beside = {} if base is None else matrices_beside(model, base)
    groups: dict[float, list[torch.Tensor]] = {}
    for weight in hidden:
        ratio = _step_beside(weight.shape, beside[weight].base_shape) if beside else 1.0
        groups.setdefault(ratio, []).append(weight)
    return groups


def _step_beside(shape, base_shape) -> float:
    """The norm that is due, sqrt(outputs / inputs), over the sqrt(max) of `match_rms_adamw`; over that at the base."""
    (outputs, inputs), (base_outputs, base_inputs) = shape, base_shape
    due = outputs * max(base_outputs, base_inputs) * base_inputs
    return math.sqrt(due / (base_outputs * max(outputs, inputs) * inputs))
