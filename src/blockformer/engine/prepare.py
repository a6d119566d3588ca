"""Prepare a model for inference, or for training."""

from torch import nn

from ..model.attention import ALL_ATTENTION_FUNCTIONS, Attention
from ..model.awq_linear import QuantizedLinear
from ..model.disentangled import DisentangledAttention
from ..model.hybrid import OF_HYBRID
from ..model.latent_attention import LatentAttention
from ..model.positions import adds_to_scores
from ..model.pretrained_model import BlockformerPreTrainedModel
from ..model.runtime import PACKAGE
from ..watched import is_bare
from . import attention, step
from .attention import (
    PreparedAttention,
    PreparedLatentAttention,
    SharingAttention,
    UnpaddedDisentangledAttention,
    sdpa_attention,
)
from .choices import is_enabled
from .decoding import Decoding
from .linear import PreparedQuantizedLinear, QuickLinear, can_be_quick
from .packed import pack_weights, unpack_weights
from .runtime import AcceleratorRuntime, LoadedRuntime, PreparedRuntime, TrainingRuntime, check_class

# Each plain class and its replacement of the same parameters in a prepared model, and on a GPU that has the kernel. Of
# a model prepared for training, 4-bit weights and latent attention stay as they are.
_PREPARED = {
    QuantizedLinear: PreparedQuantizedLinear,
    Attention: PreparedAttention,
    DisentangledAttention: UnpaddedDisentangledAttention,
    LatentAttention: PreparedLatentAttention,
    nn.Linear: QuickLinear,
}
_TRAINED = {plain: _PREPARED[plain] for plain in (Attention, DisentangledAttention, nn.Linear)}
_ON_ACCELERATOR = {Attention: SharingAttention}


def prepare_for_inference(model, *, compile: bool = False):
    """Make a model faster at inference, on its present device.

    On a CPU, weights are packed for the processor, matmuls of few rows are split, and half precision is multiplied in
    float32, each on processors where it is faster. `generate` writes by a loop of ours, into buffers with room to
    spare, where the beams of a source share its keys and values. On a CUDA device, the padding of large
    batches is skipped, in half precision with PyTorch's kernel for sequences of any length, and long contexts with soft
    caps or sinks use flex attention. Results agree within the rounding of the dtype, and saving still writes plain
    tensors. A packed weight is still the same parameter. Until `prepare_for_training` no weight learns, and whatever
    would write to a packed one, such as `load_state_dict` or merging an adapter, is refused. A cast or a move makes it
    plain until the model is prepared again.

    Args:
        model: a Blockformer model of this package.
        compile: have the step of that loop compiled by `torch.compile`; calls of the model itself, such as a
            loop of your own makes, run as without `compile`. This needs a C++ compiler, and the first batch of each
            kind (one to four rows or more, and each number of beams) waits for it, 52 seconds for a small decoder
            on two busy cores; later processes read the code from PyTorch's own cache (`TORCHINDUCTOR_CACHE_DIR`).
            Prompts are read layer by layer, and a model that does not write is prepared as without `compile`. Weights
            stay plain and are read as they are, so a changed weight is followed. 4-bit weights are held twice; the
            copies follow their weights, except when these are written through `.data`, or are tensors of inference mode
            and written to. Models with classes and attention functions from outside of Blockformer, PyTorch and
            transformers run uncompiled. On CUDA, `generate` writes by CUDA graphs.

    Returns:
        The model, in evaluation mode.

    Raises:
        TypeError: the model comes from another library, or from the code in a repo.
        ValueError: `compile` with a model that has 4-bit weights in groups of an odd number, layers of different
            heads, widths or inputs, latent attention (on a CPU) or (unless it is an encoder) pruned heads, is on a
            device without a compiler, or is on a GPU and does not write.
    """
    check_class(model)
    if compile:
        _check_compiles(model)
    model.eval()
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if trainable or not hasattr(model, "_trainable"):
        model._trainable = trainable
    model.requires_grad_(False)
    if model.device.type != "cpu":
        _make_plain(model)
        _prepare_on_accelerator(model, compile)
        return model
    writes = step.can_compile(model)
    _give_runtime(model, PreparedRuntime)
    _take_out(model)
    if compile and writes:
        unpack_weights(model)  # a step reads plain ones
    else:
        pack_weights(model)
    if writes and not hasattr(model.config, OF_HYBRID):  # layers with both keys and a state
        model.runtime.decoding = Decoding("cpu", step.CompiledSteps if compile else None)
    if is_enabled():
        _put_in(model, _PREPARED)
    return model


def prepare_for_training(model):
    """Make a model ready for training: plain weights again, trainable if they were before `prepare_for_inference`.

    If something has been made trainable since, such as an adapter, nothing else becomes so. Prompts that PEFT trains
    lie outside of the model and do not count: add them afterwards, or the whole model learns with them.

    The loss of a large vocabulary is computed in chunks, and its logits only when they are read. On a CPU, padding is
    skipped where that pays and nobody looks at the rows of a layer, as a hook would. In float32, linear layers and
    their gradients use oneDNN where it is faster.

    Args:
        model: a Blockformer model of this package.

    Returns:
        The model. Its mode (training or evaluation) is as it was.

    Raises:
        TypeError: the model comes from another library, or from the code in a repo.
    """
    check_class(model)
    _make_plain(model)
    trainable = model.__dict__.pop("_trainable", ())
    if not any(parameter.requires_grad for parameter in model.parameters()):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trainable)
    _give_runtime(model, TrainingRuntime)
    if is_enabled():
        # The head's losses look for a plain layer.
        _put_in(model, _TRAINED, but=model.get_output_embeddings())
    return model


def _prepare_on_accelerator(model, compile: bool) -> None:
    """Skip padding, and write by captured steps."""
    if not is_enabled():
        return
    _give_runtime(model, AcceleratorRuntime)
    if attention.has_kernel_for_shared_keys(model.device):
        _put_in(model, _ON_ACCELERATOR)
    if compile:
        model.runtime.decoding = Decoding(attention.DEVICE, step.CapturedSteps)


def _make_plain(model) -> None:
    """Undo everything that was done for inference, except for gradients."""
    _give_runtime(model, LoadedRuntime)
    _take_out(model)
    unpack_weights(model)


def _check_compiles(model) -> None:
    """Refuse a model whose step cannot be compiled, or that has none and is on a GPU."""
    if (name := step.uncompiled_field(model.config)) is not None and step.can_compile(model):
        raise ValueError(
            f"compile=True is not supported with {name}={getattr(model.config, name)!r}: prepare the model without it."
        )
    if model.device.type == attention.DEVICE:
        if not step.can_compile(model):
            raise ValueError(
                f"compile=True on '{model.device}' is for models that write text; this {type(model).__name__} does "
                "not: prepare it without compile=True, or use torch.compile."
            )
        return
    if model.device.type != "cpu":
        raise ValueError(
            f"compile=True is for the CPU and CUDA; the model is on '{model.device}': prepare it without compile=True. "
            "generate(..., cache_implementation='static') has transformers compile a step on other devices."
        )
    groups = [module.group_size for module in model.modules() if isinstance(module, QuantizedLinear)]
    if any(size % 2 for size in groups):  # a byte holds an input of either half of a group
        raise ValueError(
            f"compile=True needs 4-bit weights in groups of an even number of inputs; linear_group_size is "
            f"{model.config.linear_group_size}: prepare the model without it."
        )
    if model.config.kv_lora_rank:
        raise ValueError(
            "compile=True on the CPU is not supported with latent attention (kv_lora_rank is set): prepare the model "
            "without it."
        )
    if model.config.pruned_heads and (model.config.is_decoder or adds_to_scores(model.config.position_type)):
        raise ValueError(
            "compile=True with pruned_heads needs an encoder without relative positions: prepare the model without it, "
            "or pass it through blockformer.restore_heads."
        )


def _give_runtime(model, kind: type[LoadedRuntime]) -> None:
    """Give a model and its stacks a runtime of this kind each, and undo what compiled steps did to the weights."""
    for module in model.modules():
        if isinstance(module, BlockformerPreTrainedModel):
            if isinstance(module.runtime, PreparedRuntime) and module.runtime.decoding is not None:
                module.runtime.decoding.undo()
            module.runtime = kind()


def _put_in(model: nn.Module, classes: dict, but: nn.Module | None = None) -> None:
    """Give modules of these classes the prepared class, unless something wraps them."""
    for module in model.modules():
        prepared = classes.get(type(module))
        if prepared is None or module is but or not is_bare(module):
            continue
        if prepared is QuickLinear and not can_be_quick(module):
            continue
        module.__class__ = prepared


def _take_out(model: nn.Module) -> None:
    """Undo `_put_in`."""
    plain = {prepared: plain for classes in (_PREPARED, _ON_ACCELERATOR) for plain, prepared in classes.items()}
    for module in model.modules():
        module.__class__ = plain.get(type(module), type(module))


def plug_in() -> None:
    """Give this package's models their runtime, the faster attention, and what prepares them."""
    ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa_attention
    PACKAGE["usual_runtime"] = lambda usual, model: LoadedRuntime()
    PACKAGE["prepare_for_inference"] = lambda usual, model, **options: prepare_for_inference(model, **options)
    PACKAGE["apply_rule"] = attention.apply_rule
    PACKAGE["prepare_for_training"] = lambda usual, model: prepare_for_training(model)
