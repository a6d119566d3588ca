"""Bfloat16 and float32 weights in the layout that oneDNN multiplies fastest, for inference only.

A weight that is also an embedding stays plain here: each look-up would have to unpack rows of it. Only the second copy,
which is for few tokens in bfloat16, is made of it too.

I inputs and O outputs of a linear layer; if it is tied to an embedding, O is the vocabulary.
"""

import functools
import math
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from . import onednn
from .linear import is_plain_linear, is_transformed
from .measure import MANY_ROWS, is_enabled, is_exported, is_measured, is_quicker, random_matrix
from .packing_gains import is_quicker_packed_for, rows_of_layers

# The second copy, if there is one, serves up to this many tokens.
_FEW_TOKENS = 4
# Rows of a copy that are made at a time, by way of float32.
COPY_ROWS = 1 << 14
# Weights below which a call of oneDNN takes longer than the product.
_LEAST_WEIGHTS = {torch.bfloat16: 1 << 14, torch.float32: 1 << 16}


class PackedWeight:
    """A matrix [O, I] in oneDNN's own layout; there is no plain copy. That of a table stays plain."""

    def __init__(self, weight, is_table: bool = False, second_copy: bool = False):
        self.dtype, self.is_table = weight.dtype, is_table
        self.held = weight.detach() if is_table else onednn.packed(weight)
        self.copy = HalfCopy.of(weight) if second_copy else None
        self._dense: weakref.ref | None = None

    @property
    def whole(self) -> "PackedWeight":
        """The packed weight itself."""
        return self

    def product(self, states, bias):
        """[..., I] -> [..., O]."""
        if not self.is_table and (torch.compiler.is_dynamo_compiling() or is_exported()):
            raise RuntimeError("packed weights cannot be traced: call prepare_for_training() before.")
        if is_transformed() or (torch.is_grad_enabled() and states.requires_grad):
            return F.linear(states, self.dense(), bias)
        if torch.is_autocast_enabled("cpu"):
            return self._product(states.to(self.dtype), bias).to(torch.get_autocast_dtype("cpu"))
        return self._product(states, bias)

    def activated(self, states, bias, activation: onednn.Activation):
        """The product and its activation as one operator, or None where they are two: see `product`."""
        if self.is_table or torch.compiler.is_dynamo_compiling() or is_exported() or is_transformed():
            return None
        if (torch.is_grad_enabled() and states.requires_grad) or torch.is_autocast_enabled("cpu"):
            return None
        if self.copy is not None and self.copy.takes(states):
            return None
        try:
            return onednn.product(states, self.held, bias, activation)
        except RuntimeError:  # `product` says why
            return None

    def _product(self, states, bias):
        if self.copy is not None and self.copy.takes(states) and is_enabled():
            return self.copy.product(states, bias)
        if self.is_table:
            return F.linear(states, self.held, bias)
        try:
            return onednn.product(states, self.held, bias)
        except RuntimeError:  # of states that do not fit: PyTorch's own words say why
            return F.linear(states, self.dense(), bias)

    def dense(self):
        """The plain matrix, bit for bit: the same tensor for every caller as long as one of them holds it."""
        if self.is_table:
            return self.held
        weight = None if self._dense is None else self._dense()
        if weight is None:
            with torch.inference_mode(False):  # whoever gets it may want gradients
                weight = self.held.to_dense()
            self._dense = weakref.ref(weight)
        return weight

    def __reduce__(self):
        # Copied and pickled as the plain matrix: the layout belongs to the processor.
        return type(self), (self.dense(), self.is_table, self.copy is not None)


class PackedRows:
    """Some rows of a packed weight: those of one layer, where layers that read the same states share it.

    Args:
        whole: the weight of all these layers.
        rows: which of its outputs are this layer's.
    """

    def __init__(self, whole: PackedWeight, rows: slice):
        self.whole, self.rows = whole, rows
        self._dense: weakref.ref | None = None

    def product(self, states, bias):
        """[..., I] -> [..., O of this layer]."""
        product = self.whole.product(states, None)[..., self.rows]
        return product if bias is None else product + bias.to(product.dtype)

    def dense(self):
        """As `PackedWeight.dense`; memory of its own, since files do not take tensors that share theirs."""
        weight = None if self._dense is None else self._dense()
        if weight is None:
            with torch.inference_mode(False):
                weight = self.whole.dense()[self.rows].clone()
            self._dense = weakref.ref(weight)
        return weight

    def __reduce__(self):
        return type(self), (self.whole, self.rows)


class HalfCopy:
    """A bfloat16 matrix [O, I] once more: float16 numbers in FBGEMM's layout, times a power of two.

    One row times such a matrix takes little longer than reading it, with oneDNN's bfloat16 half as long again; with
    many rows it is the other way round. Both add up products of float32. The power of two moves the largest number to
    float16's upper end: only what is 2^31 times as small is rounded, by less than the sum is.
    """

    def __init__(self, weight):
        _, exponent = math.frexp(weight.abs().max().item())
        scale = 2.0 ** min(15 - exponent, 100)
        pack = torch.ops.quantized.linear_prepack_fp16
        self.parts = [pack(part.float() * scale, None) for part in weight.detach().split(COPY_ROWS)]
        # A vector of float32: bfloat16 states times it are float32.
        self._unit = torch.tensor([1 / scale], dtype=torch.float32, device="cpu")

    @classmethod
    def of(cls, weight) -> "HalfCopy | None":
        """The copy, or None if the layout cannot hold the numbers or this PyTorch does not have it."""
        return cls(weight) if cls.is_there() and cls.holds(weight) else None

    @staticmethod
    @functools.cache
    @torch.no_grad()
    def is_there() -> bool:
        """Whether this PyTorch can pack and multiply this way, tried with a small matrix."""
        try:
            weight = torch.ones(8, 8, dtype=torch.bfloat16, device="cpu")
            HalfCopy(weight).product(weight[:1], None)
        except (AttributeError, RuntimeError, NotImplementedError):
            return False
        return True

    @staticmethod
    def holds(weight) -> bool:
        """Whether all numbers are finite, and none so large that states would have to be scaled up."""
        return weight.abs().max().item() < 2.0**15

    def takes(self, states) -> bool:
        """Whether the states are of a few tokens only."""
        is_few = states.dim() > 1 and states.shape[:-1].numel() <= _FEW_TOKENS
        return is_few and states.dtype is torch.bfloat16 and states.device.type == "cpu"

    def product(self, states, bias):
        """[T, I] or [..., T, I] -> [..., T, O]."""
        states = states * self._unit
        products = [torch.ops.quantized.linear_dynamic_fp16(states, part) for part in self.parts]
        product = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
        return (product if bias is None else product + bias).to(torch.bfloat16)


class PackedModule(nn.Module):
    """Stands in for a module while its weight is packed. No gradients; a state dict holds the plain weight.

    The parameter is kept without its numbers and has them again afterwards: an optimizer goes on with it.
    """

    def __init__(self, module, packed: PackedWeight | PackedRows):
        super().__init__()
        self.packed = packed
        self.bias = getattr(module, "bias", None)
        self._plain = [module, module.weight]  # in a list, so that they are neither submodule nor parameter
        module.weight = None
        self.train(module.training)

    def let_go(self) -> None:
        """Free the plain numbers."""
        _, weight = self._plain
        if not self.packed.whole.is_table:
            with torch.inference_mode(weight.is_inference()):
                weight.data = torch.empty(0, dtype=weight.dtype, device="cpu")

    def unpack(self) -> nn.Module:
        """The module, with its weight again."""
        module, weight = self._plain
        if weight.shape != (dense := self.packed.dense()).shape:
            with torch.inference_mode(weight.is_inference()):
                weight.data = dense
        module.weight = weight
        return module.train(self.training)

    def given(self):
        """The weight that `torch.func.functional_call` has put here for a call, or None."""
        return self.__dict__.get("weight", self._parameters.get("weight"))

    def __getattr__(self, name):
        if name == "weight":
            raise AttributeError("the weight is packed for inference: call prepare_for_training() before using it.")
        return super().__getattr__(name)

    def extra_repr(self):
        return self._plain[0].extra_repr()

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}weight"] = self.packed.dense()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing_keys, unexpected_keys, error_msgs):
        error_msgs.append(f"{prefix}weight is prepared for inference: call prepare_for_training() before loading.")


class PackedLinear(PackedModule):
    """`nn.Linear` with a packed weight. [..., I] -> [..., O]."""

    def __init__(self, module, packed: PackedWeight | PackedRows):
        super().__init__(module, packed)
        self.fused: Any = None  # with the layers that read the same states, see `fused.FusedProduct`

    @property
    def in_features(self) -> int:
        """I."""
        return self._plain[0].in_features

    @property
    def out_features(self) -> int:
        """O."""
        return self._plain[0].out_features

    def forward(self, states):
        if (given := self.given()) is not None:
            return F.linear(states, given, self.bias)
        product = None if self.fused is None else self.fused.part(self, states)
        return self.packed.product(states, self.bias) if product is None else product


class PackedEmbedding(PackedModule):
    """`nn.Embedding` with the weight of a packed head. int [...] -> [..., I]."""

    def forward(self, input_ids):
        given = self.given()
        return F.embedding(input_ids, self.packed.held if given is None else given)


def pack_weights(model: nn.Module, second_copy: bool = False) -> int:
    """Pack the weights of the plain linear layers on the CPU, one after the other; returns how many.

    Layers with a wrapper or a hook stay as they are; so do those of a dtype that gains nothing by packing on this
    processor, nor by a `second_copy` of packed weights.
    """
    places = [owners for owners in owners_of_weights(model) if are_packable([module for _, _, module in owners])]
    # T5 in float16 has layers in float32, whose dtype the model looks up.
    places = [owners for owners in places if owners[0][2].weight.dtype is model.dtype]
    rows = rows_of_layers(model)
    places = [
        owners
        for owners in places
        if gains([owners[0][2].weight], second_copy, _has_table(owners), rows.get(owners[0][2], MANY_ROWS))
    ]
    for owners in places:
        modules = {module for _, _, module in owners}
        packed = PackedWeight(owners[0][2].weight, _has_table(owners))
        stand_ins = {
            module: (PackedLinear if isinstance(module, nn.Linear) else PackedEmbedding)(module, packed)
            for module in modules
        }
        for stand_in in stand_ins.values():
            stand_in.let_go()
        for parent, name, module in owners:
            setattr(parent, name, stand_ins[module])
    return len(places)


def packed_weights(model: nn.Module) -> set[PackedWeight]:
    """The weights of all packed layers, each once."""
    return {module.packed.whole for module in model.modules() if isinstance(module, PackedModule)}


def check_stays(model: nn.Module, fn) -> None:
    """Refuse to cast or move a model with packed weights, before anything is changed.

    Args:
        fn: what `nn.Module._apply` will do to each tensor.

    Raises:
        RuntimeError: `fn` changes the dtype or the device.
    """
    for dtype in {weight.dtype for weight in packed_weights(model)}:
        changed = fn(torch.empty(0, dtype=dtype, device="cpu"))
        if changed.dtype is not dtype or changed.device.type != "cpu":
            raise RuntimeError(
                f"the model is prepared for inference in {str(dtype).removeprefix('torch.')} on the CPU: call "
                "prepare_for_training() before it is moved or cast."
            )


def unpack_weights(model: nn.Module) -> None:
    """Put the plain modules back."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PackedModule):
                setattr(parent, name, child.unpack())


def owners_of_weights(model: nn.Module) -> list:
    """The modules of each weight, each module with its parent and its name there."""
    owners: dict[int, list] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(getattr(child, "weight", None), nn.Parameter):
                owners.setdefault(id(child.weight), []).append((parent, name, child))
    return list(owners.values())


def _has_table(owners) -> bool:
    """Whether a weight is that of an embedding, too."""
    return any(isinstance(module, nn.Embedding) for _, _, module in owners)


def gains(weights: list, second_copy: bool, is_table: bool = False, rows: int = MANY_ROWS) -> bool:
    """Whether weights of one dtype, side by side, are multiplied faster when they are packed, or held twice.

    Args:
        weights: each [O, I].
        is_table: whether they are those of an embedding, too.
        rows: see `rows_of_layers`.
    """
    dtype = weights[0].dtype
    if not is_enabled() or sum(weight.numel() for weight in weights) < _LEAST_WEIGHTS.get(dtype, math.inf):
        return False
    if not is_table and onednn.is_quicker_packed(dtype):
        if dtype is not torch.float32:
            return True
        outputs = tuple(len(weight) for weight in weights)
        return is_quicker_packed_for(rows, outputs, weights[0].shape[1])
    return second_copy and dtype is torch.bfloat16 and is_quicker_copied()


def are_packable(modules) -> bool:
    """Whether the modules of one weight are all plain, on the CPU and dense, one of them a linear layer."""
    weight = modules[0].weight
    is_dense = weight.layout is torch.strided and weight.is_contiguous()
    if not is_dense or weight.device.type != "cpu":
        return False
    are_plain = all(
        is_plain_linear(module) or (type(module) is nn.Embedding and not module._forward_hooks) for module in modules
    )
    return are_plain and any(isinstance(module, nn.Linear) for module in modules)


def is_quicker_copied() -> bool:
    """Whether the second copy of bfloat16 weights is multiplied faster than plain weights and packed ones.

    Measured once per process, in a few tenths of a second: one row times matrices too large for any cache.
    """
    return is_measured("copy", lambda: onednn.can_pack(torch.bfloat16) and HalfCopy.is_there() and _measure_copy())


@torch.no_grad()
def _measure_copy() -> bool:
    weight, states = random_matrix(3072, 1024).bfloat16(), random_matrix(1, 1024).bfloat16()
    weights = [weight.clone() for _ in range(16)]  # 96 MiB

    def by(kind):
        kept = [kind(weight) for weight in weights]
        return lambda: [each.product(states, None) for each in kept]

    def plain():
        return [F.linear(states, weight) for weight in weights]

    work = by(HalfCopy)
    others = (plain, by(PackedWeight))
    agrees = torch.allclose(work()[0], plain()[0], rtol=0.02, atol=0.02)
    return agrees and all(is_quicker(work, other, rounds=12, share=0.85) for other in others)
