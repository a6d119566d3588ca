"""The official model of a plan, loaded to be compared with ours.

It reads the files by itself wherever it can, a composite checkpoint's too. If it took the tensors that our rules make,
it would repeat every mistake in the rules.
"""

import copy
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from blockformer.files.checkpoint import Checkpoint
from blockformer.files.names import WEIGHTS
from blockformer.files.sources import Source
from blockformer.model.modeling_encoder import BlockformerEncoderModel

from .plan import Plan
from .storage.low_bits import without
from .verify import attention_of, load_model

Load = Callable[[type[PreTrainedModel], PretrainedConfig, Path, torch.dtype], PreTrainedModel]


def official_loader(plan: Plan, source: Source) -> Load:
    """What loads the official side of a plan: class, config, folder, dtype -> model.

    Args:
        plan: in either direction.
        source: what is converted.
    """

    def load(
        model_class: type[PreTrainedModel], config: PretrainedConfig, folder: Path, dtype: torch.dtype
    ) -> PreTrainedModel:
        if plan.read_plain is not None:  # the official way to run it needs other packages or hardware
            plain = type(config)(**without(config.to_dict()))
            with Checkpoint(folder, weights=WEIGHTS if plan.to_official else source.weights) as checkpoint:
                settings = {"state_dict": plan.read_plain(checkpoint, dtype), "dtype": dtype}
            attention = attention_of(model_class, config)
            settings |= plan.official_arguments
            return model_class.from_pretrained(None, config=plain, attn_implementation=attention, **settings)
        arguments = {**plan.official_arguments, **({} if plan.to_official else source.loading)}
        try:
            return load_model(model_class, config, folder, dtype, arguments)
        except KeyError as error:
            if error.args != ("metadata",):
                raise
        with Checkpoint(folder, weights=source.weights) as checkpoint:  # its index has no metadata, which is optional
            settings = {"state_dict": {name: checkpoint.read(name) for name in checkpoint.tensors}, "dtype": dtype}
        settings |= {"attn_implementation": attention_of(model_class, config), **plan.official_arguments}
        return model_class.from_pretrained(None, config=copy.deepcopy(config), **settings)

    return load


def lacks_pooler(plan: Plan) -> bool:
    """Whether a model of ours without a head has a pooler, and its official class has none (DeBERTa, ELECTRA)."""
    if plan.source_class is not BlockformerEncoderModel or plan.source_config.pooler_act is None:
        return False
    with torch.device("meta"):
        return not hasattr(plan.target_class(copy.deepcopy(plan.target_config), **plan.official_arguments), "pooler")


@torch.no_grad()
def rounded(model: PreTrainedModel, dtype: torch.dtype, but: Collection[str] = ()) -> PreTrainedModel:
    """Round a model's weights to a dtype, so that a requested cast does not count as a difference.

    Args:
        model: changed in place.
        dtype: rounded to it.
        but: names of weights that stay as they are, under each of their names; a composite has more before them.
    """
    state = model.state_dict()
    ends = tuple(f".{name.removeprefix('model.')}" for name in but if name not in state)
    exact = {tensor.data_ptr() for name, tensor in state.items() if name in but or name.endswith(ends)}
    for tensor in state.values():
        if tensor.data_ptr() not in exact and tensor.is_floating_point() and dtype.itemsize < tensor.dtype.itemsize:
            tensor.copy_(tensor.to(dtype))
    return model
