"""`register`: blocks of your own from a file of yours, as values of an axis."""

import ast
import contextlib
import copy
import importlib.util
import json
import re
import sys
import threading
import warnings
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch.nn import functional as F
from transformers import configuration_utils

from .declared_fields import of_the_package
from .files.quiet import without_bars
from .model.attention import LAYER_TYPES, Attention
from .model.axes import BLOCKS, GROUPS, axes
from .model.blocks import ENTRY, SCHEMES, Block
from .model.compat import generation_field_names
from .model.configuration_blockformer import INHERITED_ARGUMENTS
from .model.configuration_decoder import BlockformerDecoderConfig
from .model.layer import Layer
from .model.modeling_decoder import BlockformerDecoderForCausalLM
from .model.states import StateLayer
from .model_classes import CONFIGS
from .publishing.repo_code import MODEL, topology_files

PLAIN_LIBRARY = frozenset("__future__ collections dataclasses enum functools itertools math typing".split())
"""What a block may import of the standard library: nothing that reads, writes or runs something else."""
_TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,  # the first, the last, and two between: a block may tell layers apart
    "num_attention_heads": 2,
}
_STATES = (
    "begin with state_in(held, hidden_states) and end with keep(held, state), or write reads_whole_text = True in the "
    "class, which then refuses to go on with a cache"
)
_LOCK = threading.Lock()


def register(file: str | PathLike[str]) -> dict[str, list[str]]:
    """Make the blocks in your file values of their axes.

    The file is Python, and imports only torch and its siblings in a repo (`from .blocks import block`). Each class in
    it under `@block(axis, value)` is one more value of that axis: `norm_type` (called with the config and the size of
    the last dimension), `mlp_type` (with the config and the inner width), `attention_type` (a self-attention that
    extends `Attention`), `layer_types` (the attention of some layers, which extends `StateLayer` or `Attention`),
    `position_type` (`gives` says which positions: vectors, rotations or biases) or `residual` (a layer that extends
    `Layer`). Every repo of a model that uses it carries the file as it is now. Registering the same file again changes
    nothing.

    Args:
        file: its path. Its name is the one that it has in a repo.

    Returns:
        axis -> the values that the file adds.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not Python or not UTF-8, imports more than a repo has, declares no block, one of another
            axis or one whose name is taken; or the state of a model with the block does not come back from a file.

    Examples:
        >>> register("my_norm.py")  # doctest: +SKIP
        {'norm_type': ['my_norm']}
    """
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; name the Python file that holds the block.")
    source = path.read_bytes()
    with _LOCK:
        there = {block.file: block.source for block in _registered()}
        if there.get(path.name) != source:
            _check_name(path, path.name in there)
            _check_source(path, source)
            _load(path, source)
        return {
            axis: values
            for axis, known in BLOCKS.items()
            if (values := [value for value, block in known.items() if block.file == path.name])
        }


def _registered() -> list[Block]:
    return [block for known in BLOCKS.values() for block in known.values()]


def _check_name(path: Path, is_taken: bool) -> None:
    if not re.fullmatch(r"[A-Za-z]\w*\.py", path.name, re.ASCII):
        raise ValueError(f"{path}: a block is imported by its name: call the file by letters, digits and _, .py last.")
    if (MODEL / path.name).exists() or path.name == ENTRY:
        raise ValueError(f"{path}: a repo has a file {path.name} of Blockformer's: give yours another name.")
    if is_taken:
        raise ValueError(
            f"{path}: a file {path.name} with other content is registered: give this one another name, or start a new "
            "process to work with its new content."
        )


def _check_source(path: Path, source: bytes) -> None:
    """Refuse what is not Python, and imports that a repo could not follow."""
    try:
        text = source.decode("utf-8")
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path}: not Python: {error}") from error
    siblings = set.intersection(*({each.stem for each in topology_files(config)} for config in CONFIGS.values()))
    siblings = siblings - {"compat", "release"} | {"blocks"}
    siblings |= {name.removesuffix(".py") for block in of_the_package() for name in block.digests}
    for node in ast.walk(tree):
        where = f"{path}: line {getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            _check_roots(where, [alias.name for alias in node.names])
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            _check_roots(where, [node.module or ""])
        elif isinstance(node, ast.ImportFrom) and (node.level > 1 or node.module not in siblings):
            fix = "write `from .name import x` with one of " + ", ".join(sorted(siblings))
            raise ValueError(
                f"{where}: '{'.' * node.level}{node.module or ''}' is not a file next to it in a repo: {fix}."
            )
    # The loader of remote code finds imports by this pattern, also in strings.
    for name in re.findall(r"^\s*(?:from|import)\s+\.(\S+)", text, re.MULTILINE):
        if name not in siblings:
            raise ValueError(f"{path}: a line of text looks like an import of '.{name}' to transformers: reword it.")


def _check_roots(where: str, names: list[str]) -> None:
    for name in names:
        root = name.partition(".")[0]
        if root == "blockformer":
            fix = "write `from .blocks import block`, which works here and in a repo"
            raise ValueError(f"{where}: a repo has no package '{name}': {fix}.")
        if root != "torch" and root not in PLAIN_LIBRARY:
            allowed = f"torch, files next to it in a repo and {', '.join(sorted(PLAIN_LIBRARY - {'__future__'}))}"
            raise ValueError(f"{where}: a block may not import '{name}': it may import {allowed}.")


def _load(path: Path, source: bytes) -> None:
    """Import a file as one of the model's modules, and undo that if anything about it is wrong."""
    before = {axis: dict(known) for axis, known in BLOCKS.items()}
    name = f"{MODEL.parent.name}.{MODEL.name}.{path.stem}"
    spec: Any = importlib.util.spec_from_file_location(name, path.resolve())
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        try:
            # Run what was read: Python's own import may run a compiled file (.pyc) that was made from another source.
            code = compile(source, str(path.resolve()), "exec")
            exec(code, module.__dict__)  # nosec B102 # a file that the user asked to import
        except Exception as error:
            raise ValueError(f"{path}: importing it fails: {type(error).__name__}: {error}") from error
        if any(block.source != source for block in _registered() if block.file == path.name):
            raise ValueError(f"{path}: the file changed while it was read: register it again.")
        _check_values(path, before)
        for axis, known in BLOCKS.items():
            for value in known.keys() - before[axis].keys():
                _check_state(path, axis, value)
    except BaseException:
        del sys.modules[name]
        for axis in [*BLOCKS]:  # each in one step, since other threads may be making configs
            if axis in before:
                BLOCKS[axis] = before[axis]
            else:
                del BLOCKS[axis]
        raise


def _check_values(path: Path, before: dict[str, dict[str, Block]]) -> None:
    """Refuse axes that take no blocks, names that are taken, fields that are ours, and a file without a block."""
    if strange := BLOCKS.keys() - before.keys():
        known = ", ".join(sorted(before))
        raise ValueError(f"{path}: {min(strange)!r} takes no blocks from outside; the axes that do: {known}.")
    added = [block for block in _registered() if before[block.axis].get(block.value) is not block]
    if not added:
        raise ValueError(f"{path} has no block: write @block(axis, value) above a class.")
    ours = {name: each for config in CONFIGS.values() for name, each in axes(config).items()}
    for block in added:
        what, name, earlier = f"{block.axis}={block.value!r}", block.cls.__name__, before[block.axis].get(block.value)
        taken = LAYER_TYPES if block.axis == "layer_types" else ours[block.axis].values
        if block.value in taken or (earlier is not None and earlier.path.parent == MODEL):
            raise ValueError(f"{path}: {what} is one of Blockformer's: give your block another name.")
        if earlier is not None:
            raise ValueError(f"{path}: {what} is registered from {earlier.file}: give your block another name.")
        if block.axis == "layer_types" and _is_of_the_library(block.value):
            raise ValueError(f"{path}: {what} is another layer in transformers: give your block another name.")
        if block.axis == "attention_type" and not issubclass(block.cls, Attention):
            fix = "from .attention import Attention, and extend it: caches, masks and backends are its own"
            raise ValueError(f"{path}: {name} is not an Attention: {fix}.")
        if block.axis == "layer_types" and not issubclass(block.cls, StateLayer | Attention):
            fix = "from .states import StateLayer, and extend it; caches, padding and refusals are its own"
            raise ValueError(f"{path}: {name} is neither a StateLayer nor an Attention: {fix}.")
        if block.axis == "residual" and not issubclass(block.cls, Layer):
            fix = "from .layer import Layer, and extend it: norms, attention and network are its own"
            raise ValueError(f"{path}: {name} is not a Layer: {fix}.")
        if not issubclass(block.cls, torch.nn.Module):
            raise ValueError(f"{path}: {name} is not a torch.nn.Module.")
        if block.axis == "position_type" and block.gives not in SCHEMES:
            fix = f"write `gives = ...` in the class, one of {', '.join(map(repr, SCHEMES))}"
            raise ValueError(f"{path}: {name} does not say which positions it gives: {fix}.")
        for name, field in block.fields.items():
            if name in ours or name in _names_of_the_library() or name.startswith("_"):
                whose = "Blockformer's" if name in ours else "transformers', or a name that it uses itself"
                raise ValueError(f"{path}: {name} is a field of {whose}: give yours another name.")
            if field.group not in GROUPS:
                raise ValueError(
                    f"{path}: the group of {name} must be one of {', '.join(GROUPS)}, not {field.group!r}."
                )
            try:
                json.dumps(field.default, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}: the default of {name} cannot stand in config.json: {error}.") from error


def _is_of_the_library(layer_type: str) -> bool:
    """Whether the library has layers of this type, or takes the word for another one's, in this release."""
    remapped = getattr(configuration_utils, "remap_legacy_layer_types", list)([layer_type])
    return layer_type in getattr(configuration_utils, "ALLOWED_LAYER_TYPES", ()) or remapped != [layer_type]


def _names_of_the_library() -> set[str]:
    """Names that a config has or takes without a declaration."""
    config = BlockformerDecoderConfig()
    return {*dir(config), *vars(config), *generation_field_names()} | INHERITED_ARGUMENTS


def _check_state(path: Path, axis: str, value: str) -> None:
    """Train, save and load a tiny model with a block: refused unless the same model comes back."""
    what, is_layer = f"{path}: a model with {axis}={value!r}", axis == "layer_types"
    goes_on = not (is_layer and getattr(BLOCKS[axis][value].cls, "reads_whole_text", False))
    modes = (torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False))
    with contextlib.ExitStack() as stack, torch.device("cpu"), torch.random.fork_rng(devices=[]), without_bars():
        for mode in modes:
            stack.enter_context(mode)
        torch.manual_seed(0)
        ids = torch.randint(_TINY["vocab_size"], (2, 6))
        try:
            setting: Any = [value, "full_attention", value, value] if is_layer else value
            model = BlockformerDecoderForCausalLM(BlockformerDecoderConfig(**{**_TINY, axis: setting}))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.01 * torch.randn_like(parameter))
            model.train()(ids, labels=ids).loss.backward()
            wanted = model.eval()(ids).logits
            start = model(ids[:, :4], use_cache=True)
            rest = [model(ids[:, 4:], past_key_values=start.past_key_values).logits] if goes_on else [wanted[:, 4:]]
        except Exception as error:
            raise ValueError(f"{what} does not run: {type(error).__name__}: {error}") from error
        if not torch.isfinite(wanted).all():
            raise ValueError(f"{what} returns NaN or infinity.")
        if not torch.allclose(torch.cat((start.logits, *rest), dim=1), wanted, rtol=1e-3, atol=1e-4):
            fix = _STATES if is_layer else "a block computes each token's state from this state only"
            raise ValueError(f"{what} writes other text with a cache than without: {fix}.")
        if is_layer and goes_on:
            _check_beams(what, model, ids, wanted)
        _check_rows(what, model, ids, wanted, BLOCKS[axis][value])
        _check_checkpointing(what, model, ids)
        if axis == "position_type":
            _check_plan(path, model, BLOCKS[axis][value])
        fix = "make every tensor an nn.Parameter or a persistent buffer (self.register_buffer(name, tensor))"
        try:
            # As `from_pretrained` loads a file; where there are several processes, only the first writes files.
            saved = load(save(model.state_dict()))
            again = BlockformerDecoderForCausalLM.from_pretrained(None, config=model.config, state_dict=saved).eval()
            found = again(ids).logits
        except Exception as error:
            raise ValueError(f"{what} cannot be saved and loaded ({type(error).__name__}: {error}): {fix}.") from error
        lost = [
            name
            for name, tensor in dict(model.named_buffers()).items()
            if not torch.equal(tensor, dict(again.named_buffers())[name])
        ]
        if lost or not torch.equal(found, wanted):
            where = f": {', '.join(lost)} differ" if lost else ", though all that was saved is the same"
            raise ValueError(f"{what} does not come back from its files{where}: {fix}.")


def _check_beams(what: str, model, ids, wanted) -> None:
    """Refuse layers whose states differ from the states in the cache that they get: ids [B, T], logits [B, T, V]."""
    with torch.no_grad():
        cache = model(ids[:, :3], use_cache=True).past_key_values
        model(ids.flip(1), use_cache=True)  # another text, which no cache of this one knows of
        cache.reorder_cache(torch.tensor([1, 0]))
        found = [model(ids.flip(0)[:, place : place + 1], past_key_values=cache).logits for place in range(3, 6)]
    if not torch.allclose(torch.cat(found, dim=1), wanted.flip(0)[:, 3:], rtol=1e-3, atol=1e-4):
        raise ValueError(f"{what} writes other text where beams or calls take turns than without a cache: {_STATES}.")


def _check_rows(what: str, model, ids, wanted, block: Block) -> None:
    """Refuse a block to which padding or other sequences in a row make a difference: ids [B, T], logits [B, T, V]."""
    rows, length = ids.shape
    padded, mask = (F.pad(each, (3, 0)) for each in (ids, torch.ones_like(ids)))
    with torch.no_grad():
        found = model(padded, attention_mask=mask).logits[:, 3:]
        positions = torch.arange(length).repeat(rows)[None]
        packed = wanted
        if getattr(block.cls, "knows_sequences", True):  # otherwise such rows are refused
            packed = model(ids.reshape(1, -1), position_ids=positions, use_cache=False).logits
    fixes = ["take positions from position_ids; of a bias, compute with differences of positions only"] * 2
    if block.axis == "layer_types":
        fixes[0] = "where is_token is 0, leave the state as it was"
        fixes[1] = "begin anew where sequences changes, or refuse such rows by knows_sequences = False in the class"
    if not torch.allclose(found, wanted, rtol=1e-3, atol=1e-4):
        raise ValueError(f"{what} writes other text with padding than without: {fixes[0]}.")
    if not torch.allclose(packed.view_as(wanted), wanted, rtol=1e-3, atol=1e-4):
        raise ValueError(
            f"{what} computes other states for sequences that share a row than for each by itself: {fixes[1]}."
        )


def _check_checkpointing(what: str, model, ids) -> None:
    """Refuse a block whose gradients are others where states are computed again in the backward pass."""

    def gradients() -> dict:
        torch.manual_seed(0)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}

    model = copy.deepcopy(model).train()
    plain = gradients()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the newest releases, about the name
        model.gradient_checkpointing_enable()
    try:
        found = gradients()
    except Exception as error:
        raise ValueError(f"{what} does not run with gradient checkpointing: {error}") from error
    for name, gradient in plain.items():
        if name not in found or not torch.allclose(found[name], gradient, rtol=1e-3, atol=1e-5):
            fix = "pass tensors to later layers with leave and read of .blocks, each layer under its own name"
            raise ValueError(f"{what} learns something else with gradient checkpointing ({name}): {fix}.")


def _check_plan(path: Path, model, block: Block) -> None:
    """Refuse positions with parameters whose gradients processes of tensor parallelism would not add up."""
    place = SCHEMES[block.gives]
    for name, module in getattr(model.model, place).named_modules() if block.gives != "vectors" else ():
        has_parameters = any(True for _ in module.parameters(recurse=False))
        if has_parameters and f"{place}.{name}".rstrip(".") not in model.config.base_model_tp_plan:
            fix = f"write tensor_parallel_plan = {{'{name}': SHARED}} in the class, with SHARED of .axes"
            what = f"'{name}'" if name else "the block"
            raise ValueError(f"{path}: each process of tensor parallelism has other gradients of {what}: {fix}.")
