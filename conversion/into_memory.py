"""A model in memory: the dtype that it is loaded in, changes of its config, and the class's own `from_pretrained`."""

import inspect
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from blockformer.files.checkpoint import Checkpoint, opened
from blockformer.files.errors import ConversionError, shown
from blockformer.files.generation_settings import TOKENS, check_settings
from blockformer.files.quantized import check_plain
from blockformer.files.safetensors_io import torch_name
from blockformer.files.sources import Source
from blockformer.model.axes import axes
from blockformer.model.configuration_blockformer import generation_field_names
from blockformer.model.pretrained_model import WeightsError
from blockformer.model_classes import MODELS
from blockformer.reshaping import BY_LAYER

from .families.registry import official_names
from .options import OPTIONS, OWN, OptionError, nearest
from .plan import architecture_of, our_config, parse_dtype

OF_EVERY_CONFIG = (
    "chunk_size_feed_forward", "id2label", "label2id", "num_labels", "output_attentions", "output_hidden_states",
    "problem_type", "return_dict",
)  # fmt: skip
"""Fields of every config of transformers that a caller may change."""
POOLER = "add_pooling_layer"
"""An option of the class itself."""


def load_ours(
    place: Source,
    entries: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    fields: Mapping[str, Any] | None = None,
    **loading: Any,
) -> Any:
    """The model of a folder in our layout, in evaluation mode.

    Args:
        place: the folder, and which of its weights are read.
        entries: its `config.json`.
        dtype: None takes that of `config.json` or, if it names none, that of the weights.
        fields: changes of the config.
        loading: further options of `from_pretrained`.

    Raises:
        ConversionError: the files are damaged, or a change of the config is refused.
    """
    config = our_config(entries)
    with opened(place) as (checkpoint, notes):  # checks all headers, and that nothing leads out of the folder
        check_plain(entries, checkpoint.tensors)
        notes += [] if dtype else dtype_note(config, dtype_of_file(checkpoint))
    for note in notes:
        warnings.warn(f"{place.path}: {note}", stacklevel=3)
    model_class = MODELS[architecture_of(config)]
    loading |= {"dtype": dtype or "auto", "local_files_only": True, **place.loading}
    return load(model_class, place.path, with_fields(config, fields or {}), fields or {}, loading)


def load(
    model_class: type[PreTrainedModel],
    folder: Any,
    config: PretrainedConfig,
    fields: Mapping[str, Any],
    loading: Mapping[str, Any],
    generation: GenerationConfig | None = None,
) -> Any:
    """A model in evaluation mode or, with `output_loading_info`, a tuple of it and what there is to say of loading.

    Args:
        model_class: one of ours.
        folder: with its weights; None where `loading` has a `state_dict`.
        config: with the changes.
        fields: the changes.
        loading: options of `from_pretrained`.
        generation: settings of generation; None takes the folder's.

    Raises:
        ConversionError: the changes need other weights, or an option is not one of such a model.
    """
    if loading.get("generation_config") is not None and not model_class.can_generate():
        raise OptionError(f"generation_config means nothing for {model_class.__name__}, which does not generate")
    loading = {name: value for name, value in loading.items() if (name, value) != (POOLER, None)}
    if POOLER in loading and POOLER not in inspect.signature(model_class).parameters:
        raise OptionError(f"{POOLER} means nothing for {model_class.__name__}: only an encoder without a head takes it")
    if folder is not None and model_class.can_generate() and loading.get("generation_config") is None:
        check_settings(Path(folder))
    try:
        made = model_class.from_pretrained(folder, config=config, **loading)
    except WeightsError as error:
        if not fields:
            raise
        raise ConversionError(f"with your {', '.join(fields)}: {error}") from error
    model = made[0] if loading.get("output_loading_info") else made
    if model.can_generate() and loading.get("generation_config") is None:
        if generation is not None:
            model.generation_config = generation
        for name in (*TOKENS, "use_cache"):
            if name in fields:
                setattr(model.generation_config, name, fields[name])
    model.eval()
    return made


def named(made: Any, source: str, is_repo: bool) -> Any:
    """What `load` gives, with the source's name, by which other libraries find the tokenizer.

    PEFT writes the model's own name into adapters, and reads a config of ours there: an official layout has none.
    """
    model = made[0] if isinstance(made, tuple) else made
    model.config.name_or_path, model.name_or_path = source, source if is_repo else ""
    return made


def with_fields(config: PretrainedConfig, fields: Mapping[str, Any]) -> PretrainedConfig:
    """The config with changes, as `from_pretrained` takes them.

    Raises:
        ConversionError: a name is not that of a field, or a value is refused.
    """
    if not fields:
        return config
    known = {*axes(type(config)), *OF_EVERY_CONFIG} - {"blocks"}
    if unknown := [name for name in fields if name not in known]:
        raise OptionError(" ".join(_unknown(name, config, known) for name in unknown))
    entries = config.to_dict()
    for count, lists in {"num_hidden_layers": BY_LAYER, "decoder_layers": ("decoder_layer_types",)}.items():
        if type(fields.get(count)) is int:  # fewer layers are the first ones
            entries |= {name: entries[name][: fields[count]] for name in lists if isinstance(entries.get(name), list)}
    entries |= fields
    if "num_labels" in fields and len(entries.get("id2label") or ()) != fields["num_labels"]:
        entries |= {name: fields.get(name) for name in ("id2label", "label2id")}  # which were another set's
    try:
        changed = type(config)(**entries)
        changed.output_attentions = bool(entries.get("output_attentions"))  # chooses attention that returns its weights
        return changed
    except (ValueError, TypeError) as error:
        raise ConversionError(f"{', '.join(fields)} cannot be changed like this: {error}") from error


def _unknown(name: str, config: PretrainedConfig, known: Iterable[str]) -> str:
    rope = dict.fromkeys(("rope_theta", "rope_scaling"), "rope_parameters")
    ours = (rope | official_names(type(config))).get(name)
    if name in generation_field_names():
        return f"{name} is a setting of generation: pass it to generate(), or in generation_config=GenerationConfig()."
    start = f"from_official has no option {shown(name)}, and {type(config).__name__} no such field."
    hint = f" It is called '{ours}' here." if ours else nearest(name, [*known, *OPTIONS, *OWN["from_official"]])
    return start + hint


def asked_dtype(dtype: Any, torch_dtype: Any) -> torch.dtype | None:
    """The dtype that is passed under today's name or the one before transformers 5; None: the checkpoint's.

    Raises:
        ConversionError: weights cannot be cast to it, or the two contradict each other.
    """
    first, second = (None if str(each) == "auto" else parse_dtype(each) for each in (dtype, torch_dtype))
    if dtype is not None and torch_dtype is not None and first != second:
        raise ConversionError(
            f"dtype={shown(dtype)} and torch_dtype={shown(torch_dtype)} contradict each other; pass only dtype"
        )
    return second if first is None else first


def dtype_note(config: PretrainedConfig, stored: torch.dtype) -> list[str]:
    """A note where `config.json` names another dtype than that of the weights: transformers loads what it names."""
    named = config.dtype
    if named is None or named == stored:
        return []
    says, has = map(torch_name, (named, stored))
    return [
        f"config.json: dtype is {says}, but the weights are {has}; like transformers, this loads the model in {says} "
        "unless you pass another dtype"
    ]


def dtype_of_file(checkpoint: Checkpoint) -> torch.dtype:
    """The floating-point dtype, among those used for computing, with the largest share of a checkpoint."""
    sizes: dict[torch.dtype, int] = {}
    for info in checkpoint.tensors.values():
        if info.dtype.is_floating_point and info.dtype.itemsize > 1:
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
