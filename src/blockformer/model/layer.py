"""One layer: attention and feed-forward, each inside a residual step with its norms.

B batch, T query length, S key length, H heads, D head size, C hidden size.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import Attention, layer_type_of
from .axes import BLOCKS, Part, axis, flag
from .normalization import make_norm

PARALLEL = ("parallel", "parallel_shared_norm")  # residuals whose sub-layers read the same states
# Where a sub-layer f has norms: post(y + output(f(pre(y)))) with y = input(x).
NORM_SLOTS = {"pre": ("pre",), "post": ("post",), "output": ("output",), "pre_output": ("pre", "output")}
NORM_SLOTS |= {"input": ("input",), "input_pre": ("input",)}  # the feed-forward network of the latter has "pre"
_ORDERS = "x + f(norm(x)), norm(x + f(x)), x + norm(f(x)), x + norm2(f(norm(x))), y + f(y) with y = norm(x), or a mix"


@dataclass(eq=False, repr=False)
class LayerFields(Part):
    """How a layer puts its sub-layers together."""

    norm_placement: str = axis("pre", tuple(NORM_SLOTS), "norm", _ORDERS)
    final_norm: bool | None = flag(None, "norm", "a norm after the last layer; None: unless norm_placement is post")
    first_attention_norm: bool = flag(True, "norm", "a norm before the first attention too, where norms come first")
    residual: str = axis(
        "sequential",
        ("sequential", *PARALLEL),
        "norm",
        "feed-forward reads what attention wrote, or both read the same: x + attention(norm(x)) + mlp(norm2(x))",
    )
    residual_multiplier: float | None = axis(None, "a positive number", "norm", "factor of what a sub-layer adds")
    hidden_dropout: float = axis(0.0, "a probability from 0 to 1", "training", "dropout of embeddings and sub-layers")
    final_dropout: bool = flag(False, "training", "hidden_dropout also after the final norm")

    def fill_defaults(self):
        """A layer that ends in a norm needs no final one."""
        if self.final_norm is None:
            self.final_norm = self.norm_placement != "post"

    def placement_of(self, is_causal: bool) -> str:
        """The norm placement of a stack, in an encoder-decoder of one of the two."""
        return self.norm_placement

    def check(self):
        """A norm never follows a norm, and parallel sub-layers have a norm before them."""
        if self.norm_placement == "post" and self.final_norm:
            raise ValueError("final_norm=True with norm_placement='post' would normalize twice: set final_norm=False.")
        if not self.first_attention_norm and (self.norm_placement, self.residual) != ("pre", "sequential"):
            raise ValueError("first_attention_norm=False needs norm_placement='pre' and residual='sequential'.")
        if self.residual not in PARALLEL:
            return
        if self.norm_placement != "pre":
            fix = "parallel sub-layers are normed before; set norm_placement='pre' or residual='sequential'"
            what = f"residual='{self.residual}' with norm_placement='{self.norm_placement}'"
            raise ValueError(f"{what} is not supported: {fix}.")
        if self.add_cross_attention or self.is_encoder_decoder:
            fix = "which reads self-attention's output: set residual='sequential'"
            raise ValueError(f"residual='{self.residual}' is not supported with cross-attention, {fix}.")


def norm_slots(config, placement: str, sublayer: str) -> tuple[str, ...]:
    """Where a sub-layer has norms: some of "input", "pre", "output", "post". Their names: `{sublayer}_{slot}_norm`."""
    if config.residual == "parallel_shared_norm" and sublayer == "mlp":
        return ()
    return ("pre",) if placement == "input_pre" and sublayer == "mlp" else NORM_SLOTS[placement]


class Earlier:
    """Tensors by name, which `blocks.leave` keeps and `blocks.read` gives. Of a dict, hooks would make copies."""

    def __init__(self, input_ids):  # [B, T], which is there from the start; None where the stack got `inputs_embeds`
        self.input_ids = (input_ids, True)


class StackInputs(NamedTuple):
    """What a forward is planned from: states of embedded tokens, and what says who sees whom.

    Attributes:
        position_ids: [1 or B, T], each token's position in its text.
        given_positions: [B, T], as the caller passed them (they may count several texts in a row), or None.
        places: int [T], where the tokens are among the keys.
        source: an encoder's states [B, S, C] and their mask, or twice None.
        head_masks: of self-attention and of cross-attention, or None.
        named: what layers get by name.
    """

    hidden_states: torch.Tensor
    input_ids: torch.Tensor | None
    attention_mask: Any
    position_ids: torch.Tensor
    given_positions: torch.Tensor | None
    places: torch.Tensor
    past_key_values: Any
    source: tuple[Any, Any]
    head_masks: tuple[Any, Any]
    use_cache: bool
    reads_padding: bool
    named: dict


class LayerInputs(NamedTuple):
    """What every layer reads in addition to the states; the stack makes it once for all of them.

    A tuple, since hooks that move or cast a module's inputs look into tuples and dicts, and into no other object.

    Attributes:
        masks: layer type -> the mask of self-attention in the backend's form, or None. A bias that all layers share is
            in it: then it is [1 or B, H, T, S].
        rotations: layer type -> what `positions.rotations_of` gives, each [B, 1, T, D or 1]; empty if not rotary.
        places: int [T], where the queries are among the keys; None in a layer that is called by itself.
        encoder_mask: the mask of cross-attention in the backend's form, or None.
        head_mask: [layers, H], multiplies each head's output in self-attention, or None.
        cross_head_mask: as `head_mask`, in cross-attention.
        earlier: what layers of this forward leave for later ones.
        distances: [E, C], vectors of distances where attention is disentangled, or None.
        token_inputs: [B, T, layers, P], what each layer takes of the tokens, or None.
    """

    masks: dict
    rotations: dict
    places: torch.Tensor | None
    encoder_mask: Any = None
    head_mask: torch.Tensor | None = None
    cross_head_mask: torch.Tensor | None = None
    earlier: Any = None
    distances: torch.Tensor | None = None
    token_inputs: torch.Tensor | None = None


class Layer(GradientCheckpointingLayer):
    """Self-attention, optionally cross-attention, feed-forward, each with a norm in each slot that `norm_slots` names.

    In sequence, a sub-layer reads what the one before has written; parallel ones read the same states (Wang and
    Komatsuzaki, 2021), through a norm each or through a shared one.
    """

    def __init__(self, config, layer_idx: int, is_causal: bool, has_cross_attention: bool):
        super().__init__()
        self.layer_idx, self.layer_type = layer_idx, layer_type_of(config, layer_idx, is_causal)
        self.rotates = config.rope_layers is None or config.rope_layers[layer_idx]
        self.residual, self.multiplier = config.residual, config.residual_multiplier
        self.dropout = nn.Dropout(config.hidden_dropout) if config.hidden_dropout else None
        kind = "latent" if config.kv_lora_rank else "varied" if config.is_varied else config.position_type
        usual = config.parts["attention"].get(kind, getattr(self, "attention_class", Attention))
        usual = BLOCKS["attention_type"].get(config.attention_type, usual)
        self.self_attn = BLOCKS["layer_types"].get(self.layer_type, usual)(config, layer_idx, is_causal)
        self.cross_attn: Any = Attention(config, layer_idx, is_causal, True) if has_cross_attention else None
        usual = config.parts["mlp"][config.mlp_layer_types[layer_idx] if config.mlp_layer_types else "dense"]
        usual = BLOCKS["mlp_type"].get(config.mlp_type, usual)
        has_mlp = config.mlp_layers is None or config.mlp_layers[layer_idx]
        self.mlp: Any = usual(config, config.inner_width_of(is_causal, layer_idx)) if has_mlp else None
        has_end = config.hidden_size_per_layer_input or config.layer_scale
        self.end: Any = config.parts["token_inputs"][1](config) if has_end else None
        placement = getattr(self.self_attn, "norm_placement", None) or config.placement_of(is_causal)
        for sublayer in ["self_attn"] + ["cross_attn"] * has_cross_attention + ["mlp"] * has_mlp:
            has_norms = config.first_attention_norm or (layer_idx, sublayer) != (0, "self_attn")
            own = getattr(self._modules[sublayer], "norm_placement", None) or placement
            for slot in norm_slots(config, own, sublayer) if has_norms else ():
                self.add_module(f"{sublayer}_{slot}_norm", make_norm(config, config.hidden_size))

    def forward(
        self,
        hidden_states,
        encoder_hidden_states=None,
        attention_mask=None,
        distances=None,
        token_input=None,
        position_embeddings=None,
        layer_inputs: LayerInputs | None = None,
        past_key_values=None,
        **kwargs,
    ):
        """States [B, T, C], encoder_hidden_states [B, S, C], token_input [B, T, P] -> [B, T, C]; more for attention."""
        layer_inputs = LayerInputs(*layer_inputs or ({}, {}, None))  # libraries that move inputs make plain tuples
        hidden_states = self._norm("self_attn_input_norm", hidden_states)
        states = self._norm("self_attn_pre_norm", hidden_states)
        change = self.self_attn(
            hidden_states=states,
            attention_mask=attention_mask,
            position_embeddings=position_embeddings if self.rotates else None,
            distances=distances,
            places=layer_inputs.places,
            past_key_values=past_key_values,
            head_mask=None if layer_inputs.head_mask is None else layer_inputs.head_mask[self.layer_idx],
            earlier=layer_inputs.earlier,
            **kwargs,
        )[0]
        if self.residual in PARALLEL:
            states = self._norm("mlp_pre_norm", hidden_states) if self.residual == "parallel" else states
            return self.residual_step("mlp", self.residual_step("self_attn", hidden_states, change), self.mlp(states))
        hidden_states = self.residual_step("self_attn", hidden_states, change)
        if self.cross_attn is not None and encoder_hidden_states is not None:
            hidden_states, mask = self._norm("cross_attn_input_norm", hidden_states), layer_inputs.cross_head_mask
            change = self.cross_attn(
                hidden_states=self._norm("cross_attn_pre_norm", hidden_states),
                attention_mask=layer_inputs.encoder_mask,
                key_value_states=encoder_hidden_states,
                past_key_values=past_key_values,
                head_mask=None if mask is None else mask[self.layer_idx],
                **kwargs,
            )[0]
            hidden_states = self.residual_step("cross_attn", hidden_states, change)
        if (mlp := self.mlp) is not None:
            states = self._norm("mlp_pre_norm", hidden_states := self._norm("mlp_input_norm", hidden_states))
            hidden_states = self.residual_step("mlp", hidden_states, mlp(states))
        return hidden_states if self.end is None else self.end(hidden_states, token_input)

    def residual_step(self, sublayer: str, hidden_states, change):
        """The residual step, post(y + output(f(pre(y)))), after f."""
        change = self._norm(f"{sublayer}_output_norm", change)
        change = change if self.multiplier is None else change * self.multiplier
        states = hidden_states + (change if self.dropout is None else self.dropout(change))
        return self._norm(f"{sublayer}_post_norm", _hold_finite(states) if states.dtype is torch.float16 else states)

    def _norm(self, name: str, states):
        norm = self._modules.get(name)
        return states if norm is None else norm(states)


def layer_class(config) -> type:
    """The class of a config's layers."""
    return getattr(BLOCKS["residual"].get(config.residual), "cls", Layer)


def _hold_finite(states):
    """Of float16, infinities become the largest numbers, less a margin: an overflow does not end in NaN (T5)."""
    largest = torch.finfo(torch.float16).max - 1000
    return torch.nan_to_num(states, nan=torch.nan, posinf=largest, neginf=-largest)
