"""The options of everything that reads a model: one list, checked where a call comes in.

Each option of transformers' `from_pretrained` is here. It is followed, refused with what to do instead, or named in a
warning because it means nothing here. None disappears. This needs no torch: the command line checks first.
"""

import difflib
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from blockformer.files.errors import ConversionError, shown
from blockformer.files.new_repo import check_flag
from blockformer.files.sources import READING, Reading


class OptionError(ConversionError, TypeError):
    """An option that is not known, or not followed; to Python's own callers a wrong argument, hence a TypeError too."""


@dataclass(frozen=True)
class Option:
    """What becomes of an option of `from_pretrained`.

    Attributes:
        use: "source" (chooses the files that are read), "model" (handed to the class that loads), "argument" (of
            `from_official` itself), "refused", or "idle" (means nothing here).
        reason: of a refused or idle option: why, and what to do instead.
        neutral: values that ask for nothing, and pass silently.
        needs: the options of which one must be given too, else this one would do nothing.
    """

    use: str
    reason: str = ""
    neutral: tuple[Any, ...] = (None, False)
    needs: tuple[str, ...] = ()


_KERNELS = "kernels of the Hub replace layers of transformers' own classes; use model.prepare_for_inference() instead"
_ADAPTERS = "load the model without it, then call model.load_adapter"
_NO_CODE = "no code of a source is ever run"
_STREAMED = "weights are always read tensor by tensor"
_GONE = "transformers ignores it too"
_PARALLEL = ("distributed_config", "tp_plan", "tp_size")
OPTIONS: dict[str, Option] = {
    **dict.fromkeys(("revision", "token", "cache_dir", "use_safetensors"), Option("source", neutral=(None,))),
    **dict.fromkeys(("subfolder", "variant"), Option("source", neutral=(None, ""))),
    "local_files_only": Option("source"),
    "force_download": Option("source"),
    **{name: Option("argument") for name in ("dtype", "torch_dtype", "config", "output_loading_info")},
    "attn_implementation": Option("model"),
    "experts_implementation": Option("model"),
    "device_map": Option("model"),
    "max_memory": Option("model", needs=("device_map",)),
    "offload_folder": Option("model"),
    "offload_buffers": Option("model", needs=("device_map",)),
    "quantization_config": Option("model"),
    "generation_config": Option("model"),
    "add_pooling_layer": Option("model"),
    "ignore_mismatched_sizes": Option("model"),
    "distributed_config": Option("model"),
    "tp_plan": Option("model"),
    "tp_size": Option("model"),
    "device_mesh": Option("model", needs=_PARALLEL),
    "state_dict": Option("refused", "the weights come from the source; pass yours to the class's from_pretrained"),
    "key_mapping": Option("refused", "names of tensors follow from the family; rename those in the file"),
    "gguf_file": Option("refused", "GGUF files are not read; name the checkpoint that the file was converted from"),
    "proxies": Option("refused", "set the environment variable HTTPS_PROXY", (None, {})),
    "weights_only": Option("refused", "pickles are only read with weights_only=True", (None, True)),
    "fusion_config": Option("refused", "fusions are for transformers' own classes; use model.prepare_for_inference()"),
    "adapter_kwargs": Option("refused", _ADAPTERS, (None, {})),
    "adapter_name": Option("refused", _ADAPTERS, (None, "default")),
    "use_kernels": Option("refused", _KERNELS),
    "kernel_config": Option("refused", _KERNELS),
    "allow_all_kernels": Option("refused", _KERNELS),
    "use_auth_token": Option("refused", "it is called token"),
    "use_flash_attention_2": Option("refused", 'use attn_implementation="flash_attention_2"'),
    "load_in_8bit": Option("refused", "use quantization_config=BitsAndBytesConfig(load_in_8bit=True)"),
    "load_in_4bit": Option("refused", "use quantization_config=BitsAndBytesConfig(load_in_4bit=True)"),
    "trust_remote_code": Option("idle", _NO_CODE),
    "code_revision": Option("idle", _NO_CODE),
    "low_cpu_mem_usage": Option("idle", _STREAMED),
    "offload_state_dict": Option("idle", _STREAMED),
    "disable_mmap": Option("idle", "weight files are never mapped into memory"),
    "tqdm_class": Option("idle", "downloads have the Hub's own progress bars"),
    "resume_download": Option("idle", "downloads always go on where they stopped"),
    "from_tf": Option("idle", _GONE),
    "from_flax": Option("idle", _GONE),
    "mirror": Option("idle", _GONE),
    "_fast_init": Option("idle", _GONE, (None, True)),
    "_commit_hash": Option("idle", "revision says which commit is read"),
    "_from_auto": Option("idle", "transformers passes it on to itself"),
    "_from_pipeline": Option("idle", "transformers passes it on to itself"),
}
"""Name -> what becomes of it in `from_official`. Any other name is a field of the config, or not known."""

_WRITES = ("family", "dtype", "max_shard_size", "verify", "force", "strict_finite", "progress")
OWN: dict[str, tuple[str, ...]] = {
    "convert": (*_WRITES, "to_official", "config", "dequantize", "into"),
    "convert_reshaped": (*_WRITES, "topology", "layers", "kv_heads", "experts", "seed"),
    "convert_for_search": (*_WRITES, "use", "tokens", "template", "pooling", "bidirectional", "prompts"),
    "export_folder": ("max_shard_size", "force", "strict_finite", "progress", "sign"),
    "from_official": ("dtype", "family", "config"),
    "load_any": ("dtype",),
    "summarize": (),
    "verify": ("key",),
}  # fmt: skip
"""Function -> its options in addition to `Reading`'s."""
_VARIANT = re.compile(r"[\w-]+(\.[\w-]+)*")


def check_reading(function: str, given: Mapping[str, Any], not_read: Collection[str] = ()) -> None:
    """Check the options of a function that are not its own: they choose the files that are read.

    Args:
        function: a key of `OWN`.
        given: name -> value.
        not_read: names of options of `Reading` that would change nothing here.

    Raises:
        ConversionError: one is not known (the nearest is named), refused, of another type, or contradicts another.
    """
    for name, value in given.items():
        option = OPTIONS.get(name)
        if name in READING and name not in not_read:
            continue
        if name in READING:
            if not _is_neutral(name, value):
                raise OptionError(f"{name}={value!r} would change nothing here: leave it out")
        elif option is not None and option.use == "refused":
            _refuse(name, option, value)
        elif option is not None or any(name in own for own in OWN.values()):
            others = [other for other, own in OWN.items() if name in own] or ["from_official"]
            raise OptionError(f"{function} has no option {name}, which is one of {' and '.join(others)}: leave it out")
        else:
            raise OptionError(f"{function} has no option {shown(name)}.{nearest(name, [*OWN[function], *READING])}")
    _check_values(given)


def sorted_options(given: Mapping[str, Any]) -> tuple[Reading, dict[str, Any], dict[str, Any]]:
    """The options of `from_official`: which files are read, how the class loads, fields of the config.

    Warns of each that means nothing here.

    Raises:
        ConversionError: one is refused, of another type, or contradicts another.
    """
    reading, loading, fields = Reading(), dict[str, Any](), dict[str, Any]()
    for name, value in given.items():
        option = OPTIONS.get(name)
        if option is None:
            fields[name] = value
        elif option.use == "source":
            reading[name] = value  # type: ignore[literal-required]
        elif option.use == "refused":
            _refuse(name, option, value)
        elif option.use == "idle":
            if not _is_neutral(name, value):
                warnings.warn(f"from_official: {name} means nothing here: {option.reason}", stacklevel=3)
        elif option.needs and not _is_neutral(name, value) and not any(given.get(each) for each in option.needs):
            raise OptionError(f"{name} does nothing without {' or '.join(option.needs)}: add that, or leave it out")
        else:
            loading[name] = value
    _check_values(reading)
    return reading, loading, fields


def refuse_given(reading: Mapping[str, Any], what: str, but: Collection[str] = ()) -> None:
    """Refuse the options of `Reading` that ask for something, except `but`, for a source that is not a folder.

    Raises:
        ConversionError: naming `what` it is, and the first option.
    """
    for name, value in reading.items():
        if name not in but and not _is_neutral(name, value):
            raise OptionError(f"{what}, which has no {name}: leave it out")


def nearest(name: str, known: Collection[str]) -> str:
    """A hint at the nearest of the known names, or nothing."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


def _is_neutral(name: str, value: Any) -> bool:
    return any(type(value) is type(each) and value == each for each in OPTIONS[name].neutral)


def _refuse(name: str, option: Option, value: Any) -> None:
    if not _is_neutral(name, value):
        raise OptionError(f"{name} is not supported: {option.reason}")


def _check_values(reading: Mapping[str, Any]) -> None:
    for name in ("local_files_only", "force_download", "use_safetensors"):
        if reading.get(name) is not None:
            check_flag(name, reading[name])
    if reading.get("local_files_only") and reading.get("force_download"):
        raise ConversionError("local_files_only and force_download contradict each other: leave one of them out")
    variant = reading.get("variant")
    if not _is_neutral("variant", variant) and not (isinstance(variant, str) and _VARIANT.fullmatch(variant)):
        raise ConversionError(f"variant must be a part of a file's name, such as 'fp16', not {shown(variant)}")
    subfolder = reading.get("subfolder")
    if subfolder is not None and not _is_inside(subfolder):
        raise ConversionError(
            f"subfolder must be a folder inside the source, such as 'checkpoint-500', not {shown(subfolder)}"
        )


def _is_inside(name: Any) -> bool:
    """Whether it names a folder inside another one on every system."""
    if not isinstance(name, str | PathLike):
        return False
    text = str(name)
    is_absolute = PurePosixPath(text).is_absolute() or PureWindowsPath(text).drive or PureWindowsPath(text).root
    return text.isprintable() and not is_absolute and ".." not in PureWindowsPath(text).parts
