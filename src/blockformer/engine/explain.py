"""How a model runs, part by part, and why not faster; and compiling before the first request."""

from dataclasses import dataclass, field

import torch
from torch import nn
from tqdm import tqdm

from ..model.awq_linear import QuantizedLinear
from ..model.stack import Stack
from ..model.task_heads import QuestionAnswering
from ..watched import is_watched
from . import choices
from .attention import SharingAttention
from .linear import PreparedQuantizedLinear, QuickLinear
from .packed import PackedLinear
from .runtime import AcceleratorRuntime, PreparedRuntime, TrainingRuntime, check_class
from .step import can_compile, uncompiled_field

_PREPARE = "prepare_for_inference() may make it faster"
_COMPILE = "prepare_for_inference(compile=True) compiles it"
_FAILED = "it could not be compiled: the log says why"
_REPLACED = "they have other weights since they were packed: prepare_for_inference() packs these"
# How the layers of a class multiply, and why not in a faster way.
_PRODUCTS = {
    nn.Linear: ("PyTorch's matmul", ""),
    QuickLinear: ("the fastest matmul here for each number of rows", ""),
    PackedLinear: ("oneDNN's matmul with a packed weight", ""),
    QuantizedLinear: ("4 bits, unpacked for each call", _PREPARE),
    PreparedQuantizedLinear: ("4 bits, up to 32 rows of bfloat16 by PyTorch's 4-bit matmul", ""),
}


@dataclass(frozen=True)
class Part:
    """A part of a model.

    Attributes:
        name: what it is.
        way: how it runs.
        reason: why not in a faster way; empty if there is none to name.
    """

    name: str
    way: str
    reason: str = ""


@dataclass(frozen=True)
class Explanation:
    """How a model runs. As text, it is a table.

    Attributes:
        parts: of the model.
        bytes_held_twice: of weights that are held in another layout as well.
        fallbacks: why `generate` wrote by transformers' own loop, and how often; of a prepared model.
        matmuls: the other ways to multiply than PyTorch's own, and whether each is faster on this processor.
    """

    parts: tuple[Part, ...]
    bytes_held_twice: int
    fallbacks: dict[str, int] = field(default_factory=dict)
    matmuls: dict[str, bool] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [(part.name, part.way + (f"; {part.reason}" if part.reason else "")) for part in self.parts]
        rows.append(("held twice", f"{self.bytes_held_twice / 1e6:,.1f} MB of weights"))
        rows += [("another loop", f"{reason} ({_counted(count, 'call')})") for reason, count in self.fallbacks.items()]
        faster = [way for way, is_faster in self.matmuls.items() if is_faster]
        rows.append(("faster here", "; ".join(faster) or "PyTorch's matmul"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {way}" for name, way in rows)

    __repr__ = __str__


def explain(model) -> Explanation:
    """How a model runs: how each part is computed and why not faster, and what is held twice.

    Args:
        model: a Blockformer model of this package.

    Returns:
        A table, to be printed.

    Raises:
        TypeError: the model comes from another library, or from the code in a repo.
    """
    check_class(model)
    decoding = _decoding_of(model)
    reasons = {} if decoding is None else {f"writing: {each}": n for each, n in decoding.fallbacks.reasons.items()}
    return Explanation(
        (*_writing(model), *map(_layers, _stacks_of(model)), *_products(model), *_rest(model)),
        _bytes_held_twice(model),
        reasons,
        {f"{way} ({str(dtype).removeprefix('torch.')})": here for (way, dtype), here in choices.FASTER_HERE.items()},
    )


def warm_up(model, batches, **settings):
    """Run a model on example batches, so that no request waits for the compiler; a bar shows the progress.

    A model that writes text generates three tokens for each batch; others read it. The compiled code stays on disk, and
    the next process loads it quickly.

    Args:
        model: a Blockformer model of this package, in evaluation mode; see `prepare_for_inference`.
        batches: an example of each kind of batch: the arguments of `generate` or of `forward`, by name, such as a
            tokenizer returns. Code is made for one, two, three and four rows and for more (a decoder's beams are rows),
            and in an encoder-decoder for each number of beams.
        settings: of `generate`, such as `num_beams`, for all batches.

    Returns:
        The model.

    Raises:
        TypeError: the model comes from another library, or from the code in a repo; or a batch names no arguments.
        ValueError: `batches` is empty.
    """
    check_class(model)
    batches = list(batches)
    if not batches:
        raise ValueError("warm_up needs at least one batch: a list with the arguments of `generate` or `forward`.")
    for batch in batches:
        if not hasattr(batch, "keys"):
            raise TypeError(
                f"a batch must be a dict of arguments by name, such as input_ids, not a {type(batch).__name__}."
            )
    settings = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, **settings}
    with torch.no_grad():
        for batch in tqdm(batches, desc="warming up", unit="batch"):
            model.generate(**batch, **settings) if can_compile(model) else model(**batch)
    return model


def _stacks_of(model) -> list[Stack]:
    return [module for module in model.modules() if isinstance(module, Stack)]


def _decoding_of(model):
    """Our loop of a model that is prepared to write, or None."""
    return model.runtime.decoding if isinstance(model.runtime, PreparedRuntime) else None


def _compiled_steps(model):
    """The steps that a CPU compiles, or None."""
    decoding = _decoding_of(model)
    return None if decoding is None or decoding.by_graphs else decoding.steps


def _writing(model) -> list[Part]:
    if not can_compile(model):
        return []
    decoding, steps = _decoding_of(model), _compiled_steps(model)
    if decoding is not None and decoding.by_graphs:
        return [Part("one more token", "a CUDA graph of compiled layers")]
    if steps is None:
        way = "plain PyTorch, keys and values written into buffers with room to spare"
        way = "plain PyTorch" if decoding is None else way
        hint = "" if model.config.kv_lora_rank else _COMPILE
        if (name := uncompiled_field(model.config)) is not None:
            hint = f"it is not compiled with {name}"
        return [Part("one more token", way, hint)]
    kinds = steps.kinds()
    if kinds == []:
        return [Part("one more token", "plain PyTorch", _FAILED)]
    names = ", ".join(_named(*kind) for kind in kinds or ())
    way = f"compiled for {names}" if names else "compiled at the first batch that needs it"
    return [Part("one more token", way)]


def _named(sources: int | None, beams: int) -> str:
    what = f"{sources or 'any number of'} {'row' if beams == 1 else 'text'}{'' if sources == 1 else 's'}"
    return what if beams == 1 else f"{what} with {beams} beams"


def _layers(stack: Stack) -> Part:
    name = "the prompt's layers" if stack.is_causal else "the encoder's layers"
    return Part(name, "layer by layer", "" if isinstance(stack.runtime, PreparedRuntime) else _PREPARE)


def _products(model) -> list[Part]:
    layers: dict[type, list] = {kind: [] for kind in _PRODUCTS}
    for module in model.modules():
        if type(module) in layers:
            layers[type(module)].append(module)
    replaced = [layer for layer in layers[PackedLinear] if not layer.is_packed]
    layers[PackedLinear] = [layer for layer in layers[PackedLinear] if layer.is_packed]
    steps, parts = _compiled_steps(model), []
    is_compiled = steps is not None and steps.kinds() != []
    if replaced:
        parts.append(Part(_layers_with_weights(replaced), "PyTorch's matmul", _REPLACED))
    for kind, modules in layers.items():
        if modules:
            name = _layers_with_weights(modules)
            way, reason = _PRODUCTS[kind]
            if is_compiled and kind in (nn.Linear, QuickLinear):
                way = f"as part of compiled code; outside of it {way}"
            if kind is nn.Linear and layers[PackedLinear]:
                reason = "not packed: small, tied to an embedding, or with a hook"
            parts.append(Part(name, way, reason))
    return parts


def _layers_with_weights(layers: list) -> str:
    size = sum(layer.in_features * layer.out_features for layer in layers)
    return f"{_counted(len(layers), 'linear layer')}, {size / 1e6:,.1f} million weights"


def _counted(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _rest(model) -> list[Part]:
    attention = model.config._attn_implementation
    runtimes = [stack.runtime for stack in _stacks_of(model) if isinstance(stack.runtime, TrainingRuntime)]
    skips = attention == "sdpa" and bool(runtimes) and not isinstance(model, QuestionAnswering)
    padding = "skipped on the CPU where that saves time" if skips else "computed like other tokens"
    if skips and any(isinstance(runtime, AcceleratorRuntime) for runtime in runtimes):
        padding = "skipped on the GPU in large batches"
    watched = skips and all(is_watched(stack) for stack in _stacks_of(model))
    why = "a hook or a module of somebody else would see it: it is computed" if watched else ""
    reason = "" if attention == "sdpa" else "'sdpa' is what compiled code knows"
    if any(isinstance(module, SharingAttention) for module in model.modules()):
        reason = "with a mask, too, keys that heads share are not repeated for a token"
    why = why or ("" if runtimes else _PREPARE)
    return [Part("attention", f"'{attention}'", reason), Part("padding", padding, why)]


def _bytes_held_twice(model) -> int:
    """Of copies in other layouts, which come on top of the plain weights."""
    held = 0
    for module in model.modules():
        if isinstance(module, PreparedQuantizedLinear) and module._copy is not None:
            held += module._copy.nbytes
    steps = _compiled_steps(model)
    return held if steps is None else held + steps.bytes_of_copies()
