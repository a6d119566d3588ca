"""What a folder without readable weights is, by the names of its files: an adapter, a shard, another library's."""

import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointError, shown
from .json_files import read_json
from .names import PICKLED_SUFFIXES, WEIGHT_FILES, WEIGHT_NAMES, WEIGHTS, has_weights
from .regular import open_regular

ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
NEVER_MERGED = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT", "CPT")
"""Kinds of adapters that are read as tokens or states, and not added to weights."""
RANK = re.compile(r"(?P<start>.*?)(world_size_(?P<world>\d+)_)?rank[_-]?(?P<rank>\d+)(?P<end>\.(pt|pth|bin|ckpt))")
"""The name of the file that one process of an FSDP run writes."""
OTHER_STATE = re.compile(r"(optim|optimizer|extra|rng|random|scheduler|grad_scaler|data|zero_pp|bf16_zero|mp_)")
"""How the names of files of processes begin that hold no weights, or not in this way."""
NOT_WEIGHTS = re.compile(
    r"(optimizer|optim|scheduler|scaler|rng_state|random_states|training_args|trainer_state|colbert_linear|sparse_linear|"
    r"tokenizer|token_bytes)"
    r".*"
)
"""Names of pickled files that hold no weights of a model."""
UNFINISHED = re.compile(
    r".+\.(safetensors|bin|pth?|ckpt|gguf)\.(incomplete|part[\w-]*|aria2|crdownload|download|tmp)(_\w+)?"
)
"""Names that programs give to a file of weights until all of it is there."""
DEPTH, MOST_FOLDERS = 3, 500
"""How deep the folders lie that are looked at for a model, and how many of them are."""
OLDER = "transformers before 5 converts it: the Auto class's from_pretrained(FOLDER, {}=True).save_pretrained(NEW)"
JOIN = "blockformer doctor {folder} --mend NEW writes a plain checkpoint of it"
GGUF_REMEDY = (
    "make plain weights of it with transformers and the package gguf: model = AutoModelForCausalLM.from_pretrained("
    "'{folder}', gguf_file='{name}'), model.hf_quantizer = None, del model.config.quantization_config, "
    "model.save_pretrained(NEW); the tokenizer likewise with AutoTokenizer"
)

ZERO_REMEDY = (
    "join them with DeepSpeed's own program: python -m deepspeed.utils.zero_to_fp32 {folder} NEW --safe_serialization "
    "(the folder has it as zero_to_fp32.py too, which is code of that folder)"
)


@dataclass(frozen=True)
class Container:
    """A kind of files that are no model's weights as libraries read them.

    Attributes:
        name: of the kind, which does not change between releases.
        starts: how the names of its files or folders begin.
        ends: how they end.
        inside: a pattern of a file that a folder of such a name must hold; "" for none.
        what: it is, in words.
        remedy: what to do; `{name}` and `{folder}` are filled in.
        is_pickled: whether doctor reads them as any pickled file.
    """

    name: str
    starts: tuple[str, ...]
    what: str
    remedy: str
    is_pickled: bool = False
    ends: tuple[str, ...] = ()
    inside: str = ""

    def shown_by(self, names: Iterable[str], folder: Path) -> str | None:
        """The first of these names in a folder that shows it, or None."""
        named = (name for name in sorted(names) if name.startswith(self.starts) or name.endswith(self.ends))
        return next((name for name in named if not self.inside or any((folder / name).glob(self.inside))), None)


ZERO = "these are the parts that DeepSpeed ZeRO saves"
MEGATRON = "common.pt"
"""What Megatron-LM writes next to the parts of a distributed checkpoint, whose names and layers are its own."""
CONTAINERS = (
    Container("tensorflow", ("tf_model",), "these are weights for TensorFlow", OLDER.format("from_tf")),
    Container("flax", ("flax_model",), "these are weights for Flax", OLDER.format("from_flax")),
    Container("zero", ("global_step",), ZERO, JOIN, inside="*_states.pt"),
    Container("zero", ("zero_pp_rank", "bf16_zero_pp_rank"), ZERO, JOIN),
    Container(
        "fsdp",
        ("pytorch_model_fsdp",),
        "these are the parts that FSDP saves",
        f"join them: accelerate merge-weights {{folder}}/{{name}} {{folder}}, or {JOIN}",
        inside="*",
    ),
    Container(
        "deepspeed",
        (),
        "these are the weights that DeepSpeed saves",
        JOIN,
        is_pickled=True,
        ends=("_model_states.pt",),
    ),
    Container(
        "megatron",
        ("mp_rank_", "iter_0", MEGATRON),
        "this is a checkpoint of Megatron-LM",
        "convert it with the tool of its framework (Megatron-Bridge, NeMo) to a Hugging Face folder",
    ),
    Container("dcp", (".metadata",), "this is a distributed checkpoint (DCP)", JOIN),
    Container(
        "dcp-parts",
        (),
        "these are parts of a distributed checkpoint (DCP) without .metadata, which says what is in them",
        "copy .metadata from the folder where they were saved; an interrupted save has none: take one from before",
        ends=(".distcp",),
    ),
    Container(
        "litgpt-lora",
        ("lit_model.pth.lora",),
        "these are LoRA weights of LitGPT, without the model",
        "merge them: litgpt merge_lora {folder}; and name the folder again, which has lit_model.pth then",
    ),
    Container(
        "litgpt",
        ("lit_model.pth",),
        "this is a checkpoint of LitGPT",
        "blockformer doctor {folder} --mend NEW writes it as the official class that computes the same",
        is_pickled=True,
    ),
    Container(
        "consolidated",
        ("consolidated",),
        "these are weights in the layout of their maker's own code, whose queries and keys have another order",
        "name the repo in transformers' layout",
    ),
    Container(
        "onnx", ("onnx", "model.onnx"), "this is a model for ONNX", "name the checkpoint that it was exported from"
    ),
    Container(
        "mlx", ("weights.npz",), "these are weights for MLX", "name the checkpoint that they were converted from"
    ),
    Container(
        "numpy",
        (),
        "these are arrays of NumPy",
        "load them with numpy.load, and save them with safetensors.numpy.save_file as model.safetensors",
        ends=(".npz",),
    ),
    Container(
        "orbax",
        ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "ocdbt.process"),
        "this is a checkpoint of Orbax, for JAX",
        "name the checkpoint that it was converted from, or save it in transformers' layout with its training code",
    ),
    Container(
        "nemo",
        (),
        "this is an archive of NeMo",
        "export it with NeMo to a Hugging Face folder: nemo.collections.llm.export_ckpt(FILE, target='hf')",
        ends=(".nemo",),
    ),
    Container(
        "gguf",
        (),
        "this is a GGUF file for llama.cpp",
        GGUF_REMEDY,
        ends=(".gguf",),
    ),
    Container(
        "archive",
        (),
        "this is an archive",
        "unpack it, and name the folder that comes out of it",
        ends=(".zip", ".tar", ".tar.gz", ".tgz", ".tar.zst", ".7z", ".rar"),
    ),
)


def container_of(names: Collection[str], folder: Path) -> tuple[Container, str, str] | None:
    """The kind of a folder by the names in it, what it is, and the remedy; None if it is of none of them."""
    for each in CONTAINERS:
        if (name := each.shown_by(names, folder)) is not None:
            return each, f"{each.what} ({name})", each.remedy.format(folder=folder, name=name)
    ranks = ranks_of(names)
    return (FSDP_SHARD, *shard_said(ranks, folder)) if ranks else None


def ranks_of(names: Iterable[str]) -> list[re.Match[str]]:
    """The names of files that the processes of an FSDP run write; one file of the first process may hold everything."""
    found = [match for name in sorted(names) if (match := RANK.fullmatch(name)) and not OTHER_STATE.match(name)]
    is_single = len(found) == 1 and found[0]["world"] is None and int(found[0]["rank"]) == 0
    return [] if is_single else found


FSDP_SHARD = Container("fsdp-shard", (), "this is an FSDP shard", JOIN)


def what_it_is(place: Path) -> str | None:
    """What a folder or file is, and the remedy, in one sentence; None if its files show nothing unusual."""
    folder = place if place.is_dir() else place.parent
    names = sorted(path.name for path in place.iterdir()) if place.is_dir() else [place.name]
    adapter = adapter_said(folder) if {*names} & {*ADAPTERS} else None
    if adapter is not None:
        return "; ".join(adapter)
    found = container_of(names, folder)
    if found is not None:
        return f"{found[1]}: {found[2]}"
    said = without_model(folder, names) if place.is_dir() else None
    return None if said is None else ": ".join(said)


def without_model(folder: Path, names: Collection[str]) -> tuple[str, str] | None:
    """What a folder without weights under the usual names is, and the remedy; None if it has some, or shows nothing."""
    if not {*WEIGHT_NAMES}.isdisjoint(names):
        return None
    if not names:
        return "the folder is empty", "name the one with the model"
    if inner := folders_with_weights(folder):
        return _inner_model(folder, inner)
    pickles = [name for name in names if name.endswith(PICKLED_SUFFIXES) and not (folder / name).is_dir()]
    safe = [name for name in names if name.endswith(".safetensors") and name not in ADAPTERS]
    weights = [name for name in (*safe, *pickles) if not NOT_WEIGHTS.fullmatch(name)]
    if len(safe) > 1:
        said = f"the weights lie in {_listed(safe)} without {WEIGHTS[0][1]}, by which libraries find them"
        return said, f"blockformer doctor {folder} says what they are"
    if weights:
        said = f"the weights are called {shown(weights[0])}, and libraries look for {WEIGHTS[0][0]}"
        return said, f"blockformer doctor {folder / weights[0]} says what they are"
    if unfinished := [name for name in names if UNFINISHED.fullmatch(name)]:
        said = f"a download was not finished, or a file was split ({shown(unfinished[0])})"
        return said, "download it again; cat joins the parts of a file that was split"
    if (tag := _lost_step(folder, names)) is not None:
        said = f"the file 'latest' names {shown(tag)}, which is not there: these are the rest of a run of DeepSpeed"
        return said, f"copy {shown(tag)} too, or name a checkpoint that has its weights"
    if inner := _folders(folder, _has_parts):
        inner = [_with_config(folder, name) for name in inner]
        what = "an adapter lies" if _has_adapter(folder / inner[-1]) else "the weights lie"
        return f"{what} in the subfolder{'s' * (len(inner) > 1)} {_listed(inner)}", f"name {folder / inner[-1]}"
    if pickles or "trainer_state.json" in names:
        said = f"there is only the state of a training run ({', '.join((pickles or ['trainer_state.json'])[:3])})"
        return said, "the model was not saved or not copied: name a checkpoint that has it"
    return None


def _lost_step(folder: Path, names: Collection[str]) -> str | None:
    """The folder that DeepSpeed's file `latest` names, where it is missing; else None."""
    if "latest" not in names or not (folder / "latest").is_file():
        return None
    with open_regular(folder / "latest") as file:
        tag = file.read(200).decode("utf-8", "replace").strip()
    return None if not tag or "/" in tag or os.path.lexists(folder / tag) else tag


def _with_config(folder: Path, name: str) -> str:
    """The folder around this one, where it has the `config.json`; else this one."""
    around = name.rpartition("/")[0]
    return around if around and (folder / around / "config.json").exists() else name


def _inner_model(folder: Path, inner: list[str]) -> tuple[str, str]:
    if inner[-1].rpartition("/")[2].startswith(UNSAVED):
        return f"the run ended while it saved {shown(inner[-1])}", "take a checkpoint from before"
    return f"the model is in the subfolder{'s' * (len(inner) > 1)} {_listed(inner)}", f"name {folder / inner[-1]}"


UNSAVED = "tmp-"
"""How Trainer calls the folder of a checkpoint until all of it is there."""


def _listed(names: list[str]) -> str:
    return ", ".join(map(shown, names[:4]))


def folders_with_weights(folder: Path) -> list[str]:
    """The subfolders that hold a model, those of steps in the order of their numbers."""
    return _folders(folder, _has_model)


def _folders(folder: Path, holds: Callable[[Path], bool]) -> list[str]:
    """The subfolders of which this is true, of the first depth that has any, in the order of their numbers."""
    level = [folder]
    for _ in range(DEPTH):
        inner = (path for place in level for path in sorted(place.iterdir()) if not path.name.startswith("."))
        level = [path for path in inner if path.is_dir() and not path.is_symlink()][:MOST_FOLDERS]
        if found := [path.relative_to(folder).as_posix() for path in level if holds(path)]:
            return sorted(found, key=_step)
    return []


def _step(name: str) -> tuple[bool, int, str]:
    last = name.rpartition("/")[2]
    return not last.startswith(UNSAVED), int("".join(filter(str.isdecimal, last)) or 0), name


def _has_model(folder: Path) -> bool:
    return (folder / "config.json").exists() and has_weights(folder)


def _has_adapter(folder: Path) -> bool:
    return any((folder / name).exists() for name in ADAPTERS)


def _has_parts(folder: Path) -> bool:
    """Whether a folder holds weights in another way: an adapter, parts of a run, files with other names."""
    names = sorted(path.name for path in folder.iterdir())
    files = [name for name in names if name.endswith(WEIGHT_FILES) and not NOT_WEIGHTS.fullmatch(name)]
    files = [name for name in files if not OTHER_STATE.match(name) and not (folder / name).is_dir()]
    is_run = ".metadata" in names or any("_model_states." in name for name in names)
    return is_run or bool(files) or _has_adapter(folder)


def shard_said(ranks: Collection[re.Match[str]], folder: Path) -> tuple[str, str]:
    """The sentence on the files of some processes of a run, and the remedy."""
    known = list(ranks)
    world = int(known[0]["world"] or 0) or max(int(each["rank"]) for each in known) + 1
    if len(known) == 1:
        said = f"this is an FSDP shard, {int(known[0]['rank']) + 1} of {world}, not a model"
    else:
        said = f"these are {len(known)} of {world} FSDP shards, not a model"
    fix = f"consolidate with blockformer doctor {folder} --mend NEW"
    return said, fix if len(known) == world else f"put the shards of all processes into one folder, and {fix}"


def adapter_said(folder: Path) -> tuple[str, str] | None:
    """The sentence on the adapter in a folder, and the remedy; None without an adapter."""
    if not any(os.path.lexists(folder / name) for name in ADAPTERS):
        return None
    try:
        config = read_json(folder / "adapter_config.json") if (folder / "adapter_config.json").is_file() else {}
    except CheckpointError:
        config = {}
    if has_weights(folder):
        return (
            "an adapter (adapter_config.json, adapter_model) is next to whole weights, and from_pretrained of "
            "transformers then loads the adapter's base model in place of them",
            "if the weights are the merged ones, move the adapter's files away; if they are the base, merge the "
            "adapter with merge_and_unload() of PEFT",
        )
    kind = config.get("peft_type")
    title = "a LoRA adapter" if kind in (None, "LORA") else f"an adapter ({shown(kind)})"
    rank = f" of rank {config['r']}" if type(config.get("r")) is int else ""
    base = config.get("base_model_name_or_path")
    named = shown(base) if isinstance(base, str) and base else "its base model"
    if kind in NEVER_MERGED:
        remedy = f"PEFT loads it on top of {named}: PeftModel.from_pretrained(BASE, FOLDER); it cannot be merged"
    elif kind in (None, "LORA"):
        ours = f"blockformer doctor {folder} --against BASE --mend NEW"
        remedy = f"merge it into {named}: {ours}, or merge_and_unload() of PEFT"
    else:
        remedy = f"merge it into {named} with PEFT: merge_and_unload() and save_pretrained"
    if not any(os.path.lexists(folder / name) for name in ADAPTERS[1:]):
        said = f"this is the adapter_config.json of {title}{rank} for {named}, and the adapter itself is missing"
        return said, f"copy {ADAPTERS[1]} too; and then {remedy}"
    return f"this is {title}{rank} for {named}, not a model", remedy
