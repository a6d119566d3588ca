"""Parameter groups for any optimizer of torch, and AdamW over them."""

import math

import torch
from torch import nn

from .width_transfer import matrices_beside

FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})
"""Where torch (>= 2.6) updates all of a group's parameters in one kernel."""


def optimizer_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two parameter groups: matrices decay, biases, norms and other vectors do not.

    A parameter decays if it has two or more dimensions and neither its module's class nor its name says bias or norm.
    T5's relative bias is a matrix and still a bias. For models of this package these are the groups that `Trainer`
    makes, in its order, so that its optimizer states fit. They differ in one point: `Trainer` looks at names and lets a
    vector with an unusual one decay, which here only attention sinks, the decays of a state and xIELU's numbers have.

    Args:
        model: any module, wrapped by PEFT or not. Frozen parameters are left out, tied ones counted once.
        weight_decay: of the first group; the second one's is 0.

    Returns:
        `[{"params": [...], "weight_decay": weight_decay}, {"params": [...], "weight_decay": 0.0}]`. One of the two may
        have no parameters.

    Raises:
        ValueError: the weight decay is negative or not finite, or the model has no trainable parameters.
    """
    if not 0.0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay must be 0 or more and finite, not {weight_decay}.")
    norms = [module for module in model.modules() if isinstance(module, (nn.LayerNorm, nn.RMSNorm))]
    of_norms = {parameter for norm in norms for parameter in norm.parameters()}
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = parameter.dim() >= 2 and parameter not in of_norms and not _names_bias_or_norm(name)
        (decaying if is_matrix else others).append(parameter)
    if not decaying and not others:
        raise ValueError(f"{type(model).__name__} has no trainable parameters: is all of it frozen?")
    return [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def mup_groups(model: nn.Module, base, learning_rate: float, weight_decay: float) -> list[dict]:
    """The groups of `optimizer_groups`, each with a learning rate that fits the model's width.

    A matrix with m times the inputs that it has at the base learns at 1/m of the rate (`width_transfer`). Its weight
    decay is m times the base's: the share of it that a step takes away is then the same at every width.

    Args:
        model: what `mup_model` made, with weights trained or not.
        base: the config of the width at which the learning rate was found.
        learning_rate: that rate.
        weight_decay: of the matrices, at the base.

    Returns:
        Groups with `params`, `lr` and `weight_decay`, for Adam and AdamW. At the base's width they are the two groups
        of `optimizer_groups`; the first one has the rate itself, which is what `Trainer` logs.

    Raises:
        TypeError: the model is not of this package, or is wrapped.
        ValueError: the weight decay is not such a number, or the model was not made for this base.
    """
    decaying, others = optimizer_groups(model, weight_decay)
    matrices = matrices_beside(model, base)
    groups: dict[float, list[nn.Parameter]] = {1.0: []}
    for parameter in decaying["params"]:
        growth = matrices[parameter].growth if parameter in matrices else 1.0
        groups.setdefault(growth, []).append(parameter)
    return [
        *(
            {"params": parameters, "lr": learning_rate / growth, "weight_decay": weight_decay * growth}
            for growth, parameters in groups.items()
        ),
        {**others, "lr": learning_rate},
    ]


def _names_bias_or_norm(name: str) -> bool:
    """Whether a parameter's dotted name says bias or norm, by the words that `Trainer` looks for."""
    name = name.lower()
    if any(word in name for word in ("bias", "layernorm", "rmsnorm")):
        return True
    return any(part == "norm" or part.endswith("_norm") for part in name.split("."))


def adamw(
    model: nn.Module,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    base=None,
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, 2019) over `optimizer_groups`, fused where the device has a fused kernel.

    Its defaults are `Trainer`'s. Make it once the model is on its device.

    Args:
        model: what to train.
        learning_rate: its peak, if a scheduler follows.
        weight_decay: of the matrices, as AdamW defines it: the share of a weight removed at learning rate 1.
        betas: decay rates of the running means of the gradient and of its square.
        eps: added to the root of the latter.
        base: the config of another width at which the learning rate and the weight decay were found; then
            `mup_groups` makes the groups.

    Raises:
        ValueError: a number out of its range, or a model without trainable parameters.

    Examples:
        >>> optimizer = adamw(torch.nn.Linear(4, 2), learning_rate=3e-4, weight_decay=0.1)
        >>> [len(group["params"]) for group in optimizer.param_groups]
        [1, 1]
    """
    groups = groups_beside(model, base, learning_rate, weight_decay)
    return adamw_over(groups, learning_rate, weight_decay, betas, eps)


def groups_beside(model: nn.Module, base, learning_rate: float, weight_decay: float) -> list[dict]:
    """`mup_groups` or, without a base, `optimizer_groups`."""
    return (
        optimizer_groups(model, weight_decay) if base is None else mup_groups(model, base, learning_rate, weight_decay)
    )


def adamw_over(groups: list[dict], learning_rate, weight_decay, betas, eps) -> torch.optim.AdamW:
    """AdamW over ready groups."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    fused = all(parameter.device.type in FUSED_DEVICES and parameter.is_floating_point() for parameter in parameters)
    # None, not False: the choice between torch's other two ways stays with torch
    return torch.optim.AdamW(
        groups, lr=learning_rate, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused or None
    )
