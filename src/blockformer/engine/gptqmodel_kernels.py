"""4-bit products with the kernels of the package gptqmodel, if it is installed and the layer is on a GPU.

The package is imported by name only when such a layer first multiplies.

I inputs and O outputs of a layer, R rows of states.
"""

import functools
import importlib

import torch
from torch import nn
from transformers.utils import logging

logger = logging.get_logger(__name__)

# gptqmodel's backend by type of device: on CUDA whichever it chooses itself for AWQ checkpoints.
BACKENDS = {"cuda": "auto"}
# The relative error (of norms) that a kernel may have against plain weights in float32; rounding causes up to 0.004.
_TOLERANCE = 0.01
# Rows of the compared products: kernels work differently for few rows and for many.
_ROWS = (1, 40, 1100)


def has_kernel(layer, states) -> bool:
    """Whether a kernel can multiply these states by a layer's weights, and agrees with plain weights of that shape.

    None is used while gradients are recorded, even if the states need none: an adapter beside the layer may.
    """
    device, dtype = states.device, states.dtype
    if device.type not in BACKENDS or dtype not in (torch.float16, torch.bfloat16) or type(states) is not torch.Tensor:
        return False
    if torch.is_grad_enabled() or not states.numel() or layer.qweight.device != device:
        return False
    shape = (layer.in_features, layer.out_features, _group_size(layer))
    return _agrees(layer.__class__, shape, BACKENDS[device.type], device, dtype)


class Kernel:
    """A gptqmodel kernel with its own copy of a `QuantizedLinear`'s weights, which it may change.

    Args:
        layer: on the kernel's device.
        dtype: of the states, float16 or bfloat16.
    """

    def __init__(self, layer, dtype: torch.dtype):
        self._kernel: nn.Module | None = None
        try:
            self._kernel = _make(layer, dtype)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever another package raises
            _warn(error, layer.qweight.device)

    def product(self, states):
        """[..., I] -> [..., O]; None if the kernel fails."""
        if self._kernel is None:
            return None
        try:
            return _multiply(self._kernel, states)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._kernel = None
            _warn(error, states.device)
            return None


def _make(layer, dtype) -> nn.Module:
    device, group_size = layer.qweight.device, _group_size(layer)
    settings = {"bits": 4, "group_size": group_size, "desc_act": False, "sym": False, "dtype": dtype}
    kernel_class = _kernel_class(BACKENDS[device.type], group_size, device, dtype)
    # Tensors made in inference mode could not be changed outside it.
    with torch.inference_mode(False), torch.no_grad(), torch.device(device):
        shape = {"in_features": layer.in_features, "out_features": layer.out_features}
        kernel = kernel_class(**settings, **shape, bias=False, register_buffers=True).to(device).eval()
        kernel.load_state_dict({name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")})
        kernel.post_init()
    return kernel


def _multiply(kernel, states):
    product = kernel(states.reshape(-1, states.shape[-1]).contiguous())
    if product.is_inference() and not torch.is_inference_mode_enabled():
        product = product.clone()  # the kernel's own inference mode is not the caller's
    return product.view(*states.shape[:-1], -1)


def _group_size(layer) -> int:
    """As a checkpoint writes it: -1 if all inputs are one group."""
    return -1 if layer.group_size == layer.in_features else layer.group_size


@functools.cache
def _kernel_class(backend, group_size, device, dtype) -> type:
    """The class that gptqmodel uses for the layers of an AWQ checkpoint in the `gemm` layout."""
    settings = {"bits": 4, "group_size": group_size, "desc_act": False, "sym": False, "zero_point": True}
    select = importlib.import_module("gptqmodel.utils.importer").hf_select_quant_linear_v2
    method = {"quant_method": "awq", "format": "gemm", "backend": backend, "pack": False}
    return select(**settings, **method, device_map={"": device}, dtype=dtype)


@functools.cache
def _agrees(layer_class, shape, backend, device, dtype) -> bool:
    """Whether there is a kernel for layers of this shape, and it agrees with plain weights on random ones."""
    try:
        with torch.device("cpu"):  # whatever default device is set at the first call
            generator = torch.Generator().manual_seed(0)  # not the global one, by which the user draws
            layer = layer_class(shape[0], shape[1], False, shape[2])
            for words in (layer.qweight, layer.qzeros):
                words.random_(-(2**31), 2**31, generator=generator)
            layer.scales.uniform_(0.01, 0.02, generator=generator)
            layer = layer.to(device)
            kernel, weight = _make(layer, dtype), layer.dequantized(torch.float32)
            for rows in _ROWS:
                states = torch.randn(rows, shape[0], generator=generator).to(device, dtype)
                exact = states.float() @ weight
                error = (_multiply(kernel, states) - exact).norm() / exact.norm()
                if not error < _TOLERANCE:
                    raise ValueError(f"the product of {type(kernel).__name__} is wrong by {error:.2g} of it")
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever another package raises
        if getattr(error, "name", None) != "gptqmodel":  # of this name: it is not installed
            _warn(error, device)
        return False
    return True


def _warn(error, device) -> None:
    reason = f"{type(error).__name__}: {error}"
    logger.warning_once(f"4-bit weights on {device} are multiplied as plain ones, not by gptqmodel. {reason}")
