"""Files that transformers would read as something else than they say, refused when the package loads them.

A repeated key or NaN in a config file; integers in place of weights, which transformers casts without a word. Weights
of another shape are all listed.
"""

import os
import pickle  # nosec B403 # only for the name of its error
import re
from collections.abc import Collection, Mapping
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.modeling_utils import str_to_torch_dtype
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
    logging,
)
from transformers.utils.hub import get_checkpoint_shard_files

from ..declared_fields import of_the_package
from ..files import earlier_names
from ..files.checkpoint import Checkpoint
from ..files.containers import missing_config, unfinished, what_it_is
from ..files.errors import ConversionError
from ..files.json_files import strict_json
from ..files.names import of_a_wrapper
from ..files.quantized import check_plain, quantized_by_names, without_empty
from ..files.regular import refuse_pointer
from ..files.telling_tensors import unmerged_adapter
from ..model.awq_linear import QuantizedLinear
from ..model.axes import BLOCKS
from ..model.configuration_blockformer import BlockformerConfig
from ..model.pretrained_model import WeightsError, listed
from ..model.runtime import PACKAGE

UNREADABLE = (
    SafetensorError,
    pickle.UnpicklingError,
    EOFError,
    RuntimeError,
    JSONDecodeError,
    ImportError,
    LookupError,
)
"""What libraries raise of damaged files of weights, of their index, and of settings that belong to other weights."""
SETTINGS = ("config.json", "adapter_config.json")
"""Of which a folder has one: the second names the model that the library loads with the adapter."""
SAFE, PICKLED = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
logger = logging.get_logger(__name__)


def plug_in() -> None:
    """Have this package's configs and models read their files strictly."""
    PACKAGE.update(
        from_pretrained=_from_pretrained,
        load_state_dict=_load_state_dict,
        from_dict=_from_dict,
        _dict_from_json_file=_read_json_file,
    )


def _from_pretrained(usual, cls, pretrained_model_name_or_path, *model_args, **kwargs):
    """Load a model as transformers does, and refuse weights that are not the model's.

    transformers warns about missing weights and draws them at random, and casts integers to floats. Arguments and
    result are as in `PreTrainedModel.from_pretrained`.

    Raises:
        WeightsError: weights are missing, of another shape (unless `ignore_mismatched_sizes`), or integers.
        OSError: the folder has no weights; the error says what it has instead.
    """
    source, wants_info = pretrained_model_name_or_path, kwargs.pop("output_loading_info", False)
    may_differ = kwargs.pop("ignore_mismatched_sizes", False)
    # The refusal below names the shapes.
    asked = {**kwargs, "output_loading_info": True, "ignore_mismatched_sizes": True}
    folder = os.path.join(source or "", kwargs.get("subfolder") or "")
    is_folder = bool(source) and os.path.isdir(folder)
    has_settings = any(os.path.lexists(os.path.join(folder, name)) for name in SETTINGS)
    if is_folder and not kwargs.get("config") and not has_settings:
        raise OSError(f"{source}: {what_it_is(Path(folder)) or '; '.join(missing_config(Path(folder)))}")
    if is_folder and (what := unfinished(Path(folder), os.listdir(folder))):
        raise OSError(f"{source}: {what}")
    try:
        model, info = usual(cls, source, *model_args, **asked)
    except OSError as error:  # no weights that the library knows
        if is_folder and (what := what_it_is(Path(folder))):
            raise OSError(f"{source}: {what}") from error
        if is_folder and (what := _damage_in(folder)):
            raise OSError(what) from error
        raise
    except WeightsError as error:
        if problem := of_a_wrapper(error.unexpected):
            raise WeightsError(f"{source}: {problem}") from error
        if is_folder and (what := _damage_in(folder)):
            raise WeightsError(what) from error
        if not earlier_names.are_earlier(error.unexpected):
            raise
        config = _config_of(cls, source, kwargs)
        logger.warning_once(f"{source}: {earlier_names.ARE_READ}")
        asked["key_mapping"] = {**earlier_names.key_mapping(config), **(kwargs.get("key_mapping") or {})}
        model, info = usual(cls, source, *model_args, **asked)
        vars(model).pop("_weight_conversions", None)  # by which it would be saved under the earlier names
    except UNREADABLE as error:
        if is_folder and (what := what_it_is(Path(folder)) or _damage_in(folder)):
            raise OSError(what) from error
        raise
    if is_folder and _belong_to_others(info["unexpected_keys"]) and (what := _damage_in(folder)):
        raise WeightsError(what)
    if info["mismatched_keys"] and not may_differ and is_folder and (what := _damage_in(folder)):
        raise WeightsError(what)
    _check_shapes(source or "state_dict", () if may_differ else info["mismatched_keys"])
    if not hasattr(model, "is_quantized"):  # set by a quantizer, which stores weights in its own way
        tensors = kwargs.get("state_dict") or {}
        given = {name: getattr(tensor, "dtype", torch.float32) for name, tensor in tensors.items()}
        found = given or _dtypes_on_disk(model.name_or_path, kwargs)
        _check_dtypes(model, source or "state_dict", earlier_names.renamed(found, model.config))
    return (model, info) if wants_info else model


def _belong_to_others(unexpected: Collection[str]) -> bool:
    """Whether tensors without a place in the model show that the others are not its weights as they are."""
    return bool(
        quantized_by_names(unexpected) or unmerged_adapter(unexpected) or any("_scale" in n for n in unexpected)
    )


def _damage_in(folder: str) -> str | None:
    """What is wrong with the files of weights in a folder; None if they can be read."""
    try:
        with Checkpoint(folder) as checkpoint:
            check_plain(checkpoint.config, checkpoint.tensors)
            return None
    except ConversionError as error:
        return str(error)


def _load_state_dict(usual, model, state_dict, strict: bool = True, assign: bool = False):
    """As PyTorch does; a state dict of an earlier state of this package is read under today's names.

    Raises:
        WeightsError: not strict, as `Trainer` resumes. Its optimizer numbers the weights in the order in which they
            stood then, where norms came before what follows them: momentum would belong to other weights.
    """
    if earlier_names.are_earlier(state_dict):
        if not strict:
            raise WeightsError(
                f"these weights have names from before Blockformer 0.1. {earlier_names.NOT_RESUMED}; "
                "a state dict is read with strict=True."
            )
        state_dict = earlier_names.renamed(state_dict, model.config)
    return usual(model, state_dict, strict=strict, assign=assign)


def _config_of(cls, source, options):
    """The config of a checkpoint that is being loaded."""
    config = options.get("config")
    if isinstance(config, BlockformerConfig):
        return config
    return cls.config_class.from_pretrained(
        source if config is None else config, local_files_only=True, **_place_of(options)
    )


def _place_of(options) -> dict[str, Any]:
    """The options that say where a file is that has been loaded."""
    return {name: options[name] for name in ("cache_dir", "revision", "subfolder") if options.get(name)}


def _read_json_file(usual, cls, json_file):
    with open(json_file, encoding="utf-8") as file:
        text = file.read()
    refuse_pointer(text.encode(), json_file)
    return parse_config_json(text, str(json_file))


def _from_dict(usual, cls, config_dict, **kwargs):
    """As the library does it; the file that `AutoConfig` read before it knew the class is read again, strictly."""
    path = os.path.join(str(kwargs.get("name_or_path") or ""), "config.json")
    if kwargs.get("name_or_path") and os.path.isfile(path):
        cls._dict_from_json_file(path)
    if (kind := config_dict.get("model_type", cls.model_type)) != cls.model_type:
        fix = "this is an official layout: use blockformer.from_official, or `blockformer convert`"
        if str(kind).startswith("blockformer_"):
            fix = f"{cls.__name__} and its models are of another topology: use the Auto classes"
        source = kwargs.get("name_or_path") or "config.json"
        raise ValueError(f"{source}: model_type is '{kind}', not '{cls.model_type}': {fix}.")
    config_dict = without_empty(config_dict)
    check_blocks(config_dict.get("blocks"), f"{kwargs.get('name_or_path') or 'config.json'}: ")
    return usual(cls, config_dict, **kwargs)


def check_blocks(blocks: Any, start: str) -> None:
    """Refuse the blocks of a `config.json` that are not registered, or are with another content.

    Args:
        blocks: the config's entry `blocks`, whatever it is.
        start: of the message, such as where the config comes from.
    """
    if blocks is not None and not (isinstance(blocks, Mapping) and all(map(_is_digest, blocks.values()))):
        raise ValueError(f"{start}blocks must be a mapping from file names to their SHA-256, not {blocks!r}.")
    known = {each.file: each.digest for values in BLOCKS.values() for each in values.values()}
    ours = {name for each in of_the_package() for name in each.digests}  # another release's may differ
    for name, digest in ((name, digest) for name, digest in (blocks or {}).items() if name not in ours):
        if name not in known:
            raise ValueError(
                f"{start}this model needs {name!r}, a block of its author's (SHA-256 {digest}), which is not "
                f"registered, and code of a repo is never run here. Read that file, then call "
                f"blockformer.register('{name}'), or pass --block FILE on the command line; or load the repo with "
                "trust_remote_code=True where blockformer is not imported."
            )
        if known[name] != digest:
            raise ValueError(
                f"{start}this model was made with another {name!r} (SHA-256 {digest}) than the registered one: "
                "register the file that is in the repo, in a new process."
            )


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def parse_config_json(text: str, source: str) -> dict:
    """Parse a config file strictly.

    Raises:
        ValueError: `source` is not a JSON object, or not strict JSON; see `strict_json`.
    """
    try:
        fields = strict_json(text.encode())
    except ValueError as error:
        raise ValueError(f"{source} is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{source} must hold a JSON object, not {type(fields).__name__}.")
    return fields


def _check_shapes(source, mismatched) -> None:
    lines = [f"{name} is {list(theirs)}, the model's is {list(ours)}" for name, theirs, ours in sorted(mismatched)]
    if lines:
        raise WeightsError(
            f"{source}: wrong shapes; does config.json belong to these weights? (ignore_mismatched_sizes=True "
            f"draws them again, for example for other labels):{listed(lines)}"
        )


def _dtypes_on_disk(source, options) -> dict[str, torch.dtype]:
    """name -> dtype, for each tensor of the files that were loaded."""
    variant = f".{options['variant']}" if options.get("variant") else ""
    formats = {True: SAFE, False: PICKLED, None: SAFE + PICKLED}[options.get("use_safetensors")]
    for name in formats:  # in the library's order
        stem, _, ending = name.rpartition(".")
        try:
            path = cached_file(source, f"{stem}{variant}.{ending}", local_files_only=True, **_place_of(options))
        except OSError:  # not there, or of another format
            continue
        files = [path]
        if ending == "json":
            files, _ = get_checkpoint_shard_files(source, path, local_files_only=True, **_place_of(options))
        read = _dtypes_in_safetensors if name in SAFE else _dtypes_in_pickle
        return {name: kind for file in files for name, kind in read(file).items()}
    return {}


def _dtypes_in_safetensors(file) -> dict[str, torch.dtype]:
    with safe_open(file, framework="pt") as tensors:
        return {name: str_to_torch_dtype[tensors.get_slice(name).get_dtype()] for name in tensors.keys()}  # noqa: SIM118


def _dtypes_in_pickle(file) -> dict[str, torch.dtype]:
    loaded = torch.load(file, map_location="meta", weights_only=True)  # of today's files, no data is read
    return {name: tensor.dtype for name, tensor in loaded.items() if isinstance(tensor, torch.Tensor)}


def _check_dtypes(model, source, dtypes) -> None:
    """Refuse integers for weights, and anything but int32 for 4-bit ones: the library would cast them."""
    has_low_bits = getattr(model.config, "linear_bits", None) is not None
    if not has_low_bits and all(kind.is_floating_point or kind.is_complex for kind in dtypes.values()):
        return  # without going through the model
    prefix = f"{model.base_model_prefix}."
    floats = {name.removeprefix(prefix) for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    layers = (name for name, module in model.named_modules() if isinstance(module, QuantizedLinear))
    packed = {f"{name.removeprefix(prefix)}.{part}" for name in layers for part in ("qweight", "qzeros")}
    cast, integers = [], []
    for name, kind in sorted(dtypes.items()):
        if name.removeprefix(prefix) in packed and kind != torch.int32:
            cast.append(f"{name} is {kind}")
        if name.removeprefix(prefix) in floats and not (kind.is_floating_point or kind.is_complex):
            integers.append(f"{name} is {kind}")
    if cast:
        raise WeightsError(f"{source}: packed weights that are not int32; has something cast them?{listed(cast)}")
    if integers:
        raise WeightsError(
            f"{source}: integers in place of floating-point weights; was the checkpoint quantized, and its "
            f"quantization_config lost?{listed(integers)}"
        )
