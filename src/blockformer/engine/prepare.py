"""Prepare a model for what it is to do next: to answer, or to learn."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from ..attention import ALL_ATTENTION_FUNCTIONS, Attention
from ..awq_linear import QuantizedLinear
from ..normalization import RMSNorm
from ..pretrained_model import BlockformerPreTrainedModel
from .attention import FusedAttention, sdpa_attention
from .four_bits import PreparedQuantizedLinear
from .fused import FusedProduct, groups_of
from .linear import QuickLinear, can_be_quick, is_bare
from .measure import is_enabled
from .norm import PiecewiseRMSNorm
from .packed import HalfCopy, PackedLinear, PackedModule, is_worth, pack_weights, packed_weights, unpack_weights

# A plain class and the one that takes its place in a prepared model, with the same parameters.
_PREPARED = {
    QuantizedLinear: PreparedQuantizedLinear,
    RMSNorm: PiecewiseRMSNorm,
    Attention: FusedAttention,
    nn.Linear: QuickLinear,
}


def prepare_for_inference(model, second_copy: bool = False):
    """Make a model quicker where it only answers.

    On a CPU: bfloat16 and 4-bit weights lie as the processor multiplies them, layers that read the same states are one
    product for a few tokens, float32 products are oneDNN's where those are quicker. On a GPU: 4-bit weights by
    gptqmodel's kernels, where that package is installed. Results agree within the rounding of the dtype. Saving still
    writes plain tensors. No gradients, adapters, casts or moves until `prepare_for_training`.

    Args:
        model: a Blockformer model of this package.
        second_copy: hold bfloat16 weights twice: a second layout makes steps of up to four tokens quicker still. Only
            `prepare_for_training` gives it up again.

    Returns:
        The model, in evaluation mode.

    Raises:
        TypeError: the model is of another library, or of the code that a repo carries.
    """
    _check_class(model)
    model.eval()
    if not hasattr(model, "_trainable"):
        model._trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.requires_grad_(False)
    _take_out(model, QuickLinear)
    pack_weights(model)
    if is_enabled():
        _put_in(model, _PREPARED)
        _fuse(model, second_copy)
    return model


def prepare_for_training(model):
    """Make a model ready to learn: plain weights again, which learn if they did before `prepare_for_inference`.

    In float32 on a CPU the products of linear layers and of their gradients are oneDNN's where those are quicker.

    Args:
        model: a Blockformer model of this package.

    Returns:
        The model. Its mode (training or evaluation) is as it was.

    Raises:
        TypeError: the model is of another library, or of the code that a repo carries.
    """
    _check_class(model)
    for module in model.modules():
        vars(module).pop("fused", None)
    _take_out(model, *_PREPARED.values())
    unpack_weights(model)
    trainable = model.__dict__.pop("_trainable", ())
    for name, parameter in model.named_parameters():
        if name in trainable:
            parameter.requires_grad_(True)
    if is_enabled():
        # The head has losses of its own, which look for a plain layer.
        _put_in(model, {nn.Linear: QuickLinear}, but=model.get_output_embeddings())
    return model


def _check_class(model) -> None:
    if isinstance(model, BlockformerPreTrainedModel):
        return
    if str(getattr(getattr(model, "config", None), "model_type", "")).startswith("blockformer_"):
        raise TypeError(
            f"this {type(model).__name__} runs the code of its own repo, which has no quick ways: import blockformer "
            "before you load the model, and it is made of this package's classes."
        )
    raise TypeError(f"{type(model).__name__} is not a Blockformer model: convert it, or load it with blockformer.")


def _put_in(model: nn.Module, classes: dict, but: nn.Module | None = None) -> None:
    """Give the modules of some classes, with nothing around them, the classes of prepared ones."""
    for module in model.modules():
        prepared = classes.get(type(module))
        if prepared is None or module is but or not is_bare(module):
            continue
        if prepared is not QuickLinear or can_be_quick(module):
            module.__class__ = prepared


def _take_out(model: nn.Module, *classes: type) -> None:
    """Undo `_put_in` of these classes."""
    plain = {prepared: plain for plain, prepared in _PREPARED.items() if prepared in classes}
    for module in model.modules():
        module.__class__ = plain.get(type(module), type(module))


def _fuse(model: nn.Module, second_copy: bool) -> None:
    """Lay the weights of layers that read the same states side by side, and hold the others twice if asked to."""
    packed = packed_weights(model)
    has_copies = bool(second_copy and packed and is_worth("copy"))
    groups = [layers for layers in groups_of(model, has_copies) if not _is_fused(layers)]
    fused = {layer for layers in groups for layer in layers} | {
        layer for layer in model.modules() if getattr(layer, "fused", None) is not None
    }
    single = packed - {layer.packed for layer in fused if isinstance(layer, PackedLinear)}

    def fuse(layers):
        product = FusedProduct(layers)
        product.build()
        for layer in layers:
            layer.fused = product
            if isinstance(layer, PackedLinear):
                layer.packed.copy = None

    def copy(weight):
        weight.copy = weight.copy or HalfCopy.of(weight.dense())

    # One thread makes 30 million weights in a second; more than two would hold much at a time.
    with ThreadPoolExecutor(2 if has_copies else 1) as pool:
        list(pool.map(fuse, groups))
        list(pool.map(copy, single if has_copies else ()))


def _is_fused(layers) -> bool:
    """Whether they are one product already, of the weights that they have now."""
    products = {layer.fused for layer in layers}
    (product, *others) = products
    return not others and product is not None and product.layers == layers and product.is_current()


def check_stays(model: nn.Module, fn) -> None:
    """Refuse, before any of it is changed, to cast or move a model with packed weights.

    Args:
        fn: what `nn.Module._apply` is to do to each tensor.

    Raises:
        RuntimeError: it changes the dtype or the device.
    """
    if any(isinstance(module, PackedModule) for module in model.modules()):
        changed = fn(torch.empty(0, dtype=torch.bfloat16, device="cpu"))
        if changed.dtype is not torch.bfloat16 or changed.device.type != "cpu":
            raise RuntimeError(
                "the model is prepared for inference in bfloat16 on the CPU: call prepare_for_training() before it is "
                "moved or cast."
            )


def plug_in() -> None:
    """Have this package's models attend by the quicker ways, and offer to prepare themselves."""
    apply = BlockformerPreTrainedModel._apply

    def checked_apply(self, fn, recurse=True):
        check_stays(self, fn)
        return apply(self, fn, recurse)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa_attention
    BlockformerPreTrainedModel._apply = checked_apply
    BlockformerPreTrainedModel.prepare_for_inference = prepare_for_inference
    BlockformerPreTrainedModel.prepare_for_training = prepare_for_training
