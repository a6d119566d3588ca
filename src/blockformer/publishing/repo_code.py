"""The code that a repo carries: the files of `blockformer/model/` that its config needs, as they are."""

import ast
import functools
import re
import shutil
import sys
from collections.abc import Callable, Collection
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from ..declared_fields import is_set, of_the_package
from ..files.side_file_kinds import same_bytes
from ..model.axes import blocks_of
from ..model.positions import LEARNED, RELATIVE_BIAS, RELATIVE_KEYS, SINUSOIDAL
from ..model.release import STAMP
from ..model.token_inputs import OF_LAYERS
from ..model.varied_attention import VARIED

MODEL = Path(__file__).parents[1] / "model"
EXTRA_CODE = {"custom_generate/generate.py": Path(__file__).with_name("custom_generate.py")}
"""Code that only some repos carry: its path there -> the file here."""
STAND_IN = MODEL / "left_out.py"
OPTIONAL: dict[str, tuple[str | tuple[str, ...], Collection[Any]]] = {
    "alibi": ("position_type", ("alibi",)),
    "awq_linear": ("linear_bits", ()),
    "dense_and_sparse": ("mlp_layer_types", ("both",)),
    "disentangled": ("position_type", ("disentangled",)),
    "experts": ("num_experts", ()),
    "latent_attention": ("kv_lora_rank", ()),
    "merged_attention": (("merged_attention", "centered_window"), ()),
    "multi_token": ("num_nextn_predict_layers", ()),
    "relative_bias": ("position_type", (*RELATIVE_BIAS, "disentangled")),
    "relative_keys": ("position_type", RELATIVE_KEYS),
    "rounded_frequencies": ("frequency_dtype", ()),
    "rotary": ("position_type", ("rotary",)),
    "scaled_embedding": ("scales_in_embedding", ()),
    "sinusoidal": ("position_type", SINUSOIDAL),
    "token_dropout": ("token_dropout", ()),
    "token_inputs": ((*OF_LAYERS, "final_projection_size"), ()),
    "unscaled_token": ("unscaled_token_id", ()),
    "varied_attention": (VARIED, ()),
    "vector_positions": ("position_type", (*LEARNED, *SINUSOIDAL)),
}
"""Modules that a repo has only if its config needs them, else `STAND_IN` under their names.

The field that says so, or several, and its values, of a list one of them; where none are listed, all that are true.
"""
IMPORT = re.compile(r"^\s*from \.(\w+) import", re.MULTILINE)
THIRD_PARTY = frozenset({"torch", "transformers"})
"""What a repo's code may import besides the standard library: it is there wherever the repo can be loaded at all."""

ABOUT_THE_FILE = frozenset(
    {"architectures", "auto_map", "transformers_version", "_name_or_path", "blocks", "other_entries", *STAMP}
)
"""Entries of `config.json` that say nothing of the model itself."""


def full_auto_map(config: PretrainedConfig) -> dict[str, str]:
    """The `auto_map` entries of every Auto class that a config's topology serves, `AutoConfig` included."""
    entries = dict(type(config).auto_classes)
    if hasattr(config, "pre_training_class"):
        entries["AutoModelForPreTraining"] = f"modeling_encoder.{config.pre_training_class}"
    return entries


def code_files(config: PretrainedConfig) -> dict[str, Path]:
    """The modules that a repo of this config has: its `auto_map`'s and all that they import, however deep.

    Returns:
        name in the repo -> the file here. That of a part that nothing needs is `STAND_IN`. Parts that only some
        configs name come last.

    Raises:
        RuntimeError: one of them imports something that a repo does not have.
    """
    files = {path.name: path for path in topology_files(type(config))}
    files |= {f"{name}.py": STAND_IN for name in left_out(config) if f"{name}.py" in files}
    ours = {name for block in of_the_package() for name in block.digests}
    parts = sorted({MODEL / name for block in blocks_of(config) for name in block.digests if name in ours})
    return files | {path.name: path for path in ([MODEL / "blocks.py", *parts] if parts else [])}


def left_out(config: PretrainedConfig) -> set[str]:
    """The parts in `OPTIONAL` that neither a config nor a block of it needs."""
    needed = {name for block in blocks_of(config) for name in IMPORT.findall(block.source.decode())}
    for name, (fields, values) in OPTIONAL.items():
        if any(is_set(vars(config), field, values) for field in ([fields] if isinstance(fields, str) else fields)):
            needed.add(name)
    return OPTIONAL.keys() - needed


def topology_files(config_class: type[PretrainedConfig]) -> list[Path]:
    """The same for a config class, with every part that its topology may have."""
    return list(_closure(MODEL, frozenset(code.partition(".")[0] for code in config_class.auto_classes.values())))


def copy_code(folder: str | PathLike[str], config: PretrainedConfig) -> list[Path]:
    """Copy those modules into a repo's folder, and the config's blocks from outside; return where the modules are."""
    for block in blocks_of(config):
        block.write(config, Path(folder) / "config.json")
    return [Path(shutil.copyfile(source, Path(folder) / name)) for name, source in code_files(config).items()]


def release_code(folder: Path, config: PretrainedConfig) -> dict[str, Path]:
    """Name -> the release's file, for each code file of a repo that is the same byte for byte.

    Args:
        folder: the repo.
        config: its config, which says what code it needs.
    """
    files = code_files(config) | EXTRA_CODE
    return {name: path for name, path in files.items() if (folder / name).is_file() and same_bytes(folder / name, path)}


def written_entries(usual: Callable[..., dict], config: PretrainedConfig) -> dict[str, Any]:
    """The entries of `config.json`, without fields of parts that are left out.

    Where somebody has removed all layers that slide, their window goes too: a config that is read would refuse it.
    """
    unused = left_out(config)
    parts = (part for part in type(config).__mro__ if part.__module__.rpartition(".")[2] in unused)
    names = {name for part in parts for name in part.__annotations__}
    if "sliding_attention" not in config.layer_types:
        names.add("sliding_window")
    return {name: value for name, value in usual(config).items() if name not in names}


def write_config(
    usual: Callable[..., None], config: PretrainedConfig, path: str | PathLike[str], use_diff: bool = True
) -> None:
    """Write `config.json`. transformers has just copied all parts next to it; parts that are not needed are removed."""
    try:
        usual(config, path, use_diff=use_diff)
    finally:
        for name, source in code_files(config).items() if Path(path).name == "config.json" else ():
            copied = Path(path).with_name(name)
            if source is STAND_IN and copied.is_file() and same_bytes(copied, MODEL / name):
                shutil.copyfile(source, copied)


@functools.cache
def _closure(folder: Path, entries: frozenset[str]) -> tuple[Path, ...]:
    found: dict[str, Path] = {}
    waiting = list(entries)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = path = folder / f"{name}.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                roots = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                roots = [(node.module or "").partition(".")[0]]
            elif isinstance(node, ast.ImportFrom):
                if node.level != 1 or not node.module or "." in node.module:
                    raise RuntimeError(f"{path.name}: line {node.lineno}: only `from .name import x` works in a repo")
                waiting.append(node.module)
                continue
            else:
                continue
            for root in roots:
                if root not in THIRD_PARTY and root not in sys.stdlib_module_names:
                    raise RuntimeError(f"{path.name}: line {node.lineno}: an exported repo may not import '{root}'")
    return tuple(found[name] for name in sorted(found))
