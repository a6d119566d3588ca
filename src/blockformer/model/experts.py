"""Mixtures of experts (Shazeer et al., 2017): feed-forward networks of which a router picks some for each token.

N tokens, C hidden size, L width of what experts read (C as a rule), E experts, k of them for a token, I inner width of
an expert.
"""

from dataclasses import dataclass, fields

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.integrations import use_experts_implementation

from .axes import Part, axis, flag
from .feed_forward import FeedForward, make_activation
from .losses import share_of_items

# Not supported with experts: no family has both.
_EXCLUDED = ("activation_dropout", "chunk_size_feed_forward", "float32_down_proj", "linear_bits", "add_cross_attention")


@dataclass(eq=False, repr=False)
class ExpertsFields(Part):
    """The fields of layers with experts."""

    num_experts: int = axis(0, "an integer of 0 or more", "feed-forward", "experts E of a sparse layer; 0 means none")
    num_experts_per_tok: int = axis(2, "a positive integer", "feed-forward", "experts k that a token passes through")
    moe_intermediate_size: int | None = axis(
        None, "a positive integer", "feed-forward", "inner width of an expert; None means intermediate_size"
    )
    moe_latent_size: int | None = axis(
        None, "a positive integer", "feed-forward", "width L that tokens have in experts; None means hidden_size"
    )
    mlp_layer_types: list | None = axis(
        None, "a list", "feed-forward", "dense, sparse or both for each layer; None: sparse if there are experts"
    )
    shared_expert_intermediate_size: int = axis(
        0, "an integer of 0 or more", "feed-forward", "inner width of an expert for every token; 0 means none"
    )
    shared_expert_gate: bool = flag(False, "feed-forward", "a learned factor from 0 to 1 of the shared expert's output")
    expert_bias: bool = flag(False, "feed-forward", "biases of the router and of the experts")
    expert_gate_limit: float | None = axis(
        None, "a positive number", "feed-forward", "experts compute act(gate) * (up + 1), both clamped to this first"
    )
    router_score: str = axis("softmax", ("softmax", "sigmoid"), "feed-forward", "how router logits become scores")
    router_float32: bool = flag(False, "feed-forward", "router logits are computed in float32, whatever the dtype")
    router_margin: float | None = axis(None, "a number of 0 or more", "feed-forward", "experts this close share weight")
    router_selection_bias: bool = flag(False, "feed-forward", "a bias that only affects which experts are chosen")
    num_expert_groups: int = axis(0, "an integer of 0 or more", "feed-forward", "equal groups of experts; 0 means none")
    num_expert_groups_per_tok: int = axis(0, "an integer of 0 or more", "feed-forward", "groups that a token uses")
    experts_per_group_score: int = axis(0, "an integer of 0 or more", "feed-forward", "best scores that a group sums")
    norm_topk_prob: bool = flag(True, "feed-forward", "the scores of a token's experts are divided by their sum")
    routed_scaling_factor: float = axis(1.0, "a positive number", "feed-forward", "factor of the experts' output")
    router_aux_loss_coef: float | None = axis(None, "a number of 0 or more", "training", "factor of the balancing loss")
    output_router_logits: bool = flag(False, "training", "return router logits, and add the load-balancing loss")

    def fill_defaults(self):
        """Every layer is sparse, and its experts are as wide as a dense layer."""
        if self.router_aux_loss_coef is None:
            self.router_aux_loss_coef = 0.001 if self.num_experts else 0.0
        if self.num_experts:
            self.moe_intermediate_size = self.moe_intermediate_size or self.intermediate_size
            self.mlp_layer_types = self.mlp_layer_types or ["sparse"] * self.num_hidden_layers

    def check(self):
        """A token has no more experts than there are, and no field is set that nothing reads."""
        if not self.num_experts:
            neutral = {field.name: field.default for field in fields(ExpertsFields)} | {"router_aux_loss_coef": 0.0}
            if idle := [name for name, value in neutral.items() if getattr(self, name) != value]:
                raise ValueError(f"{idle[0]} is set but num_experts is 0: set both or neither.")
            return
        groups, chosen, summed = self.num_expert_groups, self.num_expert_groups_per_tok, self.experts_per_group_score
        size, rest = divmod(self.num_experts, groups or 1)
        if rest or not ((0 < chosen <= groups and 0 < summed <= size) if groups else chosen == summed == 0):
            told = f"num_expert_groups={groups}, num_expert_groups_per_tok={chosen}, experts_per_group_score={summed}"
            raise ValueError(f"{told} do not fit {self.num_experts} experts: set none of the three, or change one.")
        if self.num_experts_per_tok > (most := size * (chosen or 1)):
            raise ValueError(f"num_experts_per_tok must be at most {most}, not {self.num_experts_per_tok}.")
        if self.router_margin is not None and (groups or self.router_selection_bias or self.router_score != "softmax"):
            raise ValueError("router_margin cannot be combined with router_score, router_selection_bias or groups.")
        types: list = self.mlp_layer_types  # type: ignore[assignment]  # filled by now
        if len(types) != self.num_hidden_layers or not all(each in ("dense", "sparse", "both") for each in types):
            raise ValueError(f"mlp_layer_types must list 'dense', 'sparse' or 'both' for each layer, not {types!r}.")
        if self.shared_expert_gate and not self.shared_expert_intermediate_size:
            raise ValueError("shared_expert_gate=True needs shared_expert_intermediate_size: set it, in features.")
        for name in ("expert_bias", "expert_gate_limit") if not self.gated_mlp else ():
            if value := getattr(self, name):
                raise ValueError(f"{name}={value} with gated_mlp=False is not supported: leave one of them out.")
        if wrong := [name for name in _EXCLUDED if getattr(self, name)]:
            raise ValueError(f"{wrong[0]}={getattr(self, wrong[0])} is not supported with experts: leave it out.")

    def share_out(self, plan, has_cross_attention):
        """Each process has some of every expert's inner states; experts with biases are whole in each."""
        mlp = "layers.*.mlp."
        if self.num_experts and "dense" not in self.mlp_layer_types:
            for name in [name for name in plan if name.startswith(mlp)]:
                del plan[name]
        up, style = ("gate_up_proj", "packed_colwise") if self.gated_mlp else ("up_proj", "colwise")
        dense = {"shared_expert": self.shared_expert_intermediate_size, "dense": "both" in (self.mlp_layer_types or ())}
        styles = ({"gate_proj": "colwise"} if self.gated_mlp else {}) | {"up_proj": "colwise", "down_proj": "rowwise"}
        for network in [name for name, is_there in dense.items() if is_there]:
            plan |= {f"{mlp}{network}.{name}": style for name, style in styles.items()}
        if self.num_experts and not self.expert_bias:
            plan |= {f"{mlp}experts.{up}": style, f"{mlp}experts.down_proj": "rowwise"}
            plan[f"{mlp}experts"] = "moe_tp_experts"


class DrawnModule(nn.Module):
    """A module with weights that the library does not know how to draw; their inputs are the last dimension."""

    def init_tensors(self) -> None:
        std = self.config.initializer_range
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if "bias" in name:
                init.zeros_(tensor)
            else:
                init.normal_(tensor, std=tensor.shape[-1] ** -0.5 if std is None else std)


class Router(DrawnModule):
    """Picks experts: tokens [N, C] -> logits [N, E], weights [N, k], experts int64 [N, k].

    `e_score_correction_bias` only moves the choice: it balances the load without a loss (DeepSeek-AI, 2024).
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if config.expert_bias else None
        correction = torch.zeros(config.num_experts) if config.router_selection_bias else None
        self.register_buffer("e_score_correction_bias", correction)

    def forward(self, tokens):
        config = self.config
        dtype = torch.float32 if config.router_float32 else self.weight.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        logits = F.linear(tokens.to(dtype), self.weight.to(dtype), bias)
        scores = logits.float().sigmoid() if config.router_score == "sigmoid" else logits.float().softmax(-1)
        choice = scores if self.e_score_correction_bias is None else scores + self.e_score_correction_bias
        if config.num_expert_groups:
            choice = self._of_best_groups(choice)
        experts = choice.topk(config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, experts)
        if config.router_margin is not None:
            experts = logits.sort(dim=-1, descending=True, stable=True).indices[:, : config.num_experts_per_tok]
            weights = self._shares_of_near_ones(logits, experts)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights * config.routed_scaling_factor, experts

    def _shares_of_near_ones(self, logits, experts):
        """Each one's share of a softmax over the experts not yet taken, without far lower logits (Liu et al., 2024)."""
        own, all_logits = logits.gather(-1, experts)[..., None], logits[:, None]  # [N, k, 1], [N, 1, E]
        is_far = (own - all_logits) / torch.maximum(all_logits.abs(), own) > self.config.router_margin
        own_place = experts[..., None] == torch.arange(logits.shape[-1], device=logits.device)
        left = all_logits.masked_fill(is_far | (own_place.cumsum(1) > own_place), -torch.inf)  # [N, k, E]
        return 1 / (left - own).float().exp().sum(-1)

    def _of_best_groups(self, choice):
        """Scores [N, E] with -inf for the experts outside of each token's best groups (DeepSeek-AI, 2024)."""
        groups = choice.unflatten(-1, (self.config.num_expert_groups, -1))
        scores = groups.topk(self.config.experts_per_group_score, dim=-1).values.sum(-1)
        best = scores.topk(self.config.num_expert_groups_per_tok, dim=-1).indices
        is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
        return groups.masked_fill(~is_chosen[..., None], -torch.inf).flatten(-2)


@use_experts_implementation
class Experts(DrawnModule):
    """E feed-forward networks; `experts_implementation` names the way to multiply by them, "eager" this one.

    Tokens [N, L], their experts [N, k] and weights [N, k] -> the weighted sums of the experts' outputs [N, L].
    """

    def __init__(self, config):
        super().__init__()
        count, inner = config.num_experts, config.moe_intermediate_size
        width = config.moe_latent_size or config.hidden_size
        self.num_experts = count
        if config.gated_mlp:
            self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, width))
        else:
            self.up_proj = nn.Parameter(torch.empty(count, inner, width))
        self.down_proj = nn.Parameter(torch.empty(count, width, inner))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(count, 2 * inner)) if config.expert_bias else None
        self.down_proj_bias = nn.Parameter(torch.empty(count, width)) if config.expert_bias else None
        self.act_fn, self.limit = make_activation(config.hidden_act), config.expert_gate_limit

    def forward(self, tokens, experts, weights):
        output = torch.zeros_like(tokens)
        for expert in experts.unique().tolist():  # on an accelerator this waits
            rows, places = torch.where(experts == expert)
            bias, down_bias = (b if b is None else b[expert] for b in (self.gate_up_proj_bias, self.down_proj_bias))
            inner = self._apply_gate(F.linear(tokens[rows], self.first_proj[expert], bias))
            states = F.linear(inner, self.down_proj[expert], down_bias) * weights[rows, places, None]
            output.index_add_(0, rows, states.to(output.dtype))
        return output

    @property
    def first_proj(self):
        """The matrices of gates and inner states [E, 2 I, L], or without gates [E, I, L]."""
        return self.gate_up_proj if self.has_gate else self.up_proj

    def _apply_gate(self, states):
        """[..., 2 I or I] -> [..., I]; the library's other ways call it by this name."""
        if not self.has_gate:
            return self.act_fn(states)
        gate, up = states.chunk(2, dim=-1)
        if self.limit is None:
            return self.act_fn(gate) * up
        return self.act_fn(gate.clamp(max=self.limit)) * (up.clamp(-self.limit, self.limit) + 1)


class SparseFeedForward(nn.Module):
    """A router, its experts and, optionally, an expert that every token passes through. [B, T, C] -> [B, T, C]."""

    def __init__(self, config, inner: int):  # `inner` is the width of dense layers; the experts' is another
        super().__init__()
        shared = config.shared_expert_intermediate_size
        self.gate, self.experts = Router(config), Experts(config)
        self.experts.has_bias, self.experts.has_gate = config.expert_bias, config.gated_mlp
        latent, width, bias = config.moe_latent_size, config.hidden_size, config.mlp_bias is True
        self.to_latent = nn.Linear(width, latent, bias=bias) if latent else None
        self.from_latent = nn.Linear(latent, width, bias=bias) if latent else None
        self.shared_expert = FeedForward(config, shared) if shared else None
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False) if config.shared_expert_gate else None

    def forward(self, hidden_states, routed_by=None):  # the router may read other states than the experts
        tokens = hidden_states.flatten(0, -2)  # [N, C]
        _, weights, experts = self.gate(tokens if routed_by is None else routed_by.flatten(0, -2))
        read = tokens if self.to_latent is None else self.to_latent(tokens)
        output = self.experts(read, experts, weights.to(tokens.dtype))
        output = (output if self.from_latent is None else self.from_latent(output)).view_as(hidden_states)
        if self.shared_expert is None:
            return output
        shared, gate = self.shared_expert(hidden_states), self.shared_expert_gate
        return output + (shared if gate is None else gate(hidden_states).sigmoid() * shared)


def load_balancing_loss(router_logits, experts_per_token: int, attention_mask=None):
    """E * sum over E of (a token's choices of it) * (its mean score) (Fedus et al., 2021); k where the load is even.

    Args:
        router_logits: [B * T, E] of each layer.
        attention_mask: [B, S] of 0 and 1, the last T are the tokens'; None or another kind counts all.
    """
    scores = torch.cat([logits.to(router_logits[0].device) for logits in router_logits]).float().softmax(-1)
    chosen = torch.zeros_like(scores).scatter(-1, scores.topk(experts_per_token).indices, 1.0)
    counts = torch.ones_like(scores[:, 0])
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
        length = router_logits[0].shape[0] // attention_mask.shape[0]
        counts = attention_mask[:, -length:].to(scores).flatten().repeat(len(router_logits))
    return scores.shape[-1] * ((counts @ chosen) * (counts @ scores)).sum() / counts.sum() ** 2


def add_router_loss(output, config, router_logits, attention_mask, targets, num_items_in_batch) -> None:
    """Put router logits, if they were recorded, and their loss into the fields of a decoder's output.

    Of the batches that a step accumulates, each counts by its labels, as in its own loss.
    """
    del output["cross_attentions"]  # nothing has both
    if router_logits:
        loss = load_balancing_loss(router_logits, config.num_experts_per_tok, attention_mask)
        output["router_logits"], output["aux_loss"] = router_logits, loss
        if (whole := output["loss"]) is not None:
            share = share_of_items(targets, num_items_in_batch, whole.device)
            output["loss"] = whole + config.router_aux_loss_coef * loss.to(whole.device) * share
