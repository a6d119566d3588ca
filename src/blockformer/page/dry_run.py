"""A model run without memory: the shapes at each module, and its floating-point operations by formula.

B batch, T query length, S key length, H heads, K key/value heads, D head size, C hidden size.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from ..files.safetensors_io import torch_name
from ..inputs import inputs_of
from ..model.attention import Attention
from ..model.compat import CACHE
from ..model.disentangled import DisentangledAttention
from ..model.experts import Experts, Router
from ..model.relative_keys import RelativeKeys

Shape = tuple[int, ...]


class Record:
    """What hooks saw of one call of a model.

    Attributes:
        shapes: a module's name -> the shapes of what it read and wrote when it was first called, None for no tensor.
        scores: an attention's name -> the shape of its probabilities, [B, H, T, S].
        flops: a module's name -> its own operations, without the modules inside it; 2 for multiply and add.
    """

    def __init__(self, model: nn.Module):
        self.shapes: dict[str, tuple[Shape | None, Shape | None]] = {}
        self.scores: dict[str, Shape] = {}
        self.flops: dict[str, int] = defaultdict(int)
        self.hooks = [
            module.register_forward_hook(self._hook(name), with_kwargs=True)
            for name, module in model.named_modules()
            if name
        ]

    def _hook(self, name: str):
        def record(module, args, kwargs, output):
            read = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)), None)
            wrote = output if isinstance(output, torch.Tensor) else first_tensor(output)
            if isinstance(module, Attention) and output[1] is not None:
                self.scores.setdefault(name, tuple(output[1].shape))
            self.shapes.setdefault(name, (_shape(read), _shape(wrote)))
            self.flops[name] += own_flops(module, args, read, output)

        return record

    def of(self, path: str) -> int:
        """The operations of a module and of those in it."""
        return sum(count for name, count in self.flops.items() if name == path or name.startswith(f"{path}."))

    def stop(self) -> None:
        for hook in self.hooks:
            hook.remove()


def first_tensor(output: Any) -> torch.Tensor | None:
    """The tensor that a module's output is or begins with."""
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, tuple | list):
        return next((one for one in map(first_tensor, output) if one is not None), None)
    return output if isinstance(output, torch.Tensor) else None


def _shape(tensor: torch.Tensor | None) -> Shape | None:
    return None if tensor is None else tuple(tensor.shape)


def own_flops(module: Any, args: tuple, read: torch.Tensor | None, output: Any) -> int:
    """The operations of matmuls in one call of a module, without its parts."""
    if read is None:
        return 0
    if isinstance(module, nn.Linear):
        return 2 * read.numel() * module.out_features
    if isinstance(module, Attention):
        _, heads, length, keys = output[1].shape
        rows, sizes = read.shape[0] * heads * length, module.head_dim + module.o_proj.in_features // heads
        vectors = 0
        if isinstance(module, DisentangledAttention):
            vectors = 2 * module.config.relative_attention_num_buckets  # each query and each key, with each of them
        return 2 * rows * sizes * (keys + vectors)
    if isinstance(module, RelativeKeys):
        batch, heads, length, keys = output.shape
        size = module.embedding.embedding_dim
        kinds = heads if module.and_keys else 0  # keys are taken as they are, before a group shares them
        return 2 * batch * (heads + kinds) * length * keys * size
    if isinstance(module, Router):
        return 2 * read.numel() * module.config.num_experts
    if isinstance(module, Experts):
        passes = args[1].numel()  # of tokens through experts
        return 2 * passes * (module.first_proj[0].numel() + module.down_proj[0].numel())
    return 0


def dry_run(model: Any, length: int, target: int | None = None) -> tuple[Record, Record | None]:
    """A text through a model on the meta device, and then one token more where the model writes.

    Args:
        length: tokens of the source, if there is one, and of the text if `target` is not given.
        target: tokens of the text.
    """
    config, both = model.config, model.config.is_encoder_decoder
    writes = model.can_generate() or both or config.is_decoder
    with torch.device("meta"), torch.no_grad():
        lengths = {True: length, False: target or length}
        inputs: dict[str, Any] = {each.name: each.example(1, lengths[each.of_source]) for each in inputs_of(config)}
        text = Record(model)
        output = model(**inputs, output_attentions=True, **({"use_cache": True} if writes else {}))
        text.stop()
        cache = getattr(output, CACHE, None)
        if cache is None:
            return text, None
        step = Record(model)
        inputs |= {each.name: inputs[each.name][:, :1] for each in inputs_of(config) if not each.of_source}
        if both:
            inputs |= {"input_ids": None, "encoder_outputs": (output.encoder_last_hidden_state,)}
        model(**inputs, past_key_values=cache, output_attentions=True)
        step.stop()
        return text, step


def element_size(config) -> tuple[str, int]:
    """The dtype of a config's weights, and its bytes."""
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else getattr(torch, str(config.dtype or "float32"))
    return torch_name(dtype), dtype.itemsize


def weights_of(module: Any, size: int) -> tuple[int, int]:
    """Parameters of a module, and their bytes at `size` each; weights of 4 bits as they are kept."""
    parameters = sum({id(one): one.numel() for one in module.parameters()}.values())
    low = [one for one in module.modules() if hasattr(one, "qweight")]
    packed = sum(part.nbytes for one in low for part in (one.qweight, one.qzeros, one.scales))
    return parameters + sum(one.in_features * one.out_features for one in low), parameters * size + packed
