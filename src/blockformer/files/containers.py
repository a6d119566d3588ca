"""What a folder without readable weights is, by the names of its files: an adapter, a shard, another library's."""

import os
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from .container_kinds import CONTAINERS, JOIN, Container
from .errors import CheckpointError, shown
from .json_files import read_json
from .model_place import is_of_model
from .names import INDEX, PICKLED_SUFFIXES, WEIGHT_FILES, WEIGHT_NAMES, WEIGHTS, has_weights
from .regular import open_regular

ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
ADAPTERS = ("adapter_config.json", *ADAPTER_WEIGHTS)
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
NUMBERED = re.compile(r"(.+)-\d{5}-of-(\d{5})\.\w+")
"""The name of one of several files of weights."""
OF_MLX = ("adapters.safetensors", "adapters.npz")
"""The adapter that MLX writes next to its kind of adapter_config.json."""
OBJECTS = (".pkl", ".pickle")
DEPTH, MOST_FOLDERS = 3, 500
"""How deep the folders lie that are looked at for a model, and how many of them are."""


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
        return misnamed(weights[0]), f"blockformer doctor {folder / weights[0]} says what they are"
    if unfinished := [name for name in names if UNFINISHED.fullmatch(name)]:
        said = f"a download was not finished, or a file was split ({shown(unfinished[0])})"
        return said, "download it again; cat joins the parts of a file that was split"
    if (tag := _lost_step(folder)) is not None:
        said = f"the file 'latest' names {shown(tag)}, which is not there: these are the rest of a run of DeepSpeed"
        return said, f"copy {shown(tag)} too, or name a checkpoint that has its weights"
    if inner := _folders(folder, _has_parts):
        inner = [_with_config(folder, name) for name in inner]
        is_adapter = _has_adapter(folder / inner[-1])
        said = f"{'an adapter lies' if is_adapter else 'the weights lie'} in the subfolder{'s' * (len(inner) > 1)}"
        is_apart = not is_adapter and "config.json" in names and not any((folder / inner[-1]).glob("*.json"))
        fix = "copy config.json to them, and " if is_apart else ""
        return f"{said} {_listed(inner)}", f"{fix}name {folder / inner[-1]}"
    objects = [name for name in names if name.endswith(OBJECTS) and not name.startswith(("tokenizer", "meta"))]
    if objects:
        said = f"{shown(objects[0])} is a pickle of Python objects, such as arrays of NumPy, and is not opened"
        fix = "where you trust it, load it with the code that wrote it, and save the arrays with "
        return said, f"{fix}safetensors.numpy.save_file as model.safetensors, under names with dots"
    if pickles or "trainer_state.json" in names:
        said = f"there is only the state of a training run ({', '.join((pickles or ['trainer_state.json'])[:3])})"
        return said, "the model was not saved or not copied: name a checkpoint that has it"
    return None


def without_config(folder: Path) -> str:
    """What to say of a folder that has no `config.json`: what it is instead, if its files show that, and the remedy."""
    what = what_it_is(folder)
    return f"no config.json; {what}" if what else "; ".join(missing_config(folder))


def missing_config(folder: Path) -> tuple[str, str]:
    """The sentence on a folder without a `config.json`, and the remedy."""
    if not any(path.name.endswith(WEIGHT_FILES) or INDEX.fullmatch(path.name) for path in folder.iterdir()):
        return "there are neither a config.json nor weights", "name the folder of a model"
    return "config.json is missing", where_config_is(folder).replace(
        "with --against", "with blockformer doctor --against"
    )


def where_config_is(folder: Path) -> str:
    """What to do about a missing `config.json`."""
    inner = sorted(path.parent for path in folder.glob("*/config.json"))
    if len(inner) == 1:
        return f"there is one in {shown(inner[0].name)}: copy it, or take it with --against {inner[0]}"
    return "put the config.json of its base model there, or name the base model with --against"


def numbered_files(folder: Path) -> list[str]:
    """The files of safetensors that have a number, where all are of one save."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix == ".safetensors")
    matches = [match for name in names if (match := NUMBERED.fullmatch(name))]
    return [match[0] for match in matches] if len({match.groups() for match in matches}) == 1 else []


def of_another_index(named: Collection[str], there: Collection[str]) -> tuple[str, str]:
    """The sentence on an index that names none of the files that are there, and the remedy."""
    said = f"the index names {some(named)}, which are not there, and the folder has {some(there)}"
    fix = "the index is another model's or an earlier save's: remove it; blockformer doctor FOLDER --mend NEW reads "
    return said, f"{fix}these files, and writes one"


def misnamed(name: str) -> str:
    """The sentence about weights whose file has a name that no library looks for."""
    return f"the weights are called {shown(name)}, and libraries look for {WEIGHTS[0][0]}"


def not_finished(part: str) -> str:
    """The sentence about weights of which a download has left only this part."""
    return f"the download of {shown(part.rpartition('.')[0])} was not finished: {shown(part)} is there"


def some(names: Collection[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(map(shown, [*names][:4])) + more


def unfinished(folder: Path, files: Collection[str]) -> str | None:
    """What to do about a file of weights that aria2 has not written to its end, or None: the place of all is there.

    Args:
        folder: of the checkpoint.
        files: names of the weights.
    """
    found = next((name for name in files if os.path.lexists(folder / f"{name}.aria2")), None)
    if found is None:
        return None
    return f"{not_finished(f'{found}.aria2')}; download it again"


def latest_step(folder: Path) -> str:
    """The folder that DeepSpeed's file `latest` names; "" without such a file."""
    if not (folder / "latest").is_file():
        return ""
    with open_regular(folder / "latest") as file:
        return file.read(200).decode("utf-8", "replace").strip()


def _lost_step(folder: Path) -> str | None:
    """The folder that `latest` names, where it is missing; else None."""
    tag = latest_step(folder)
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
    """The subfolders that hold a model, not a module next to one (a projection); steps are sorted by number."""
    found = _folders(folder, _has_model)
    return [name for name in found if is_of_model(folder / name / "config.json")] or found


def _folders(folder: Path, holds: Callable[[Path], bool]) -> list[str]:
    """The subfolders for which this is true, at the first depth that has any, sorted by number."""
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
    if mlx := next((name for name in OF_MLX if os.path.lexists(folder / name)), None):
        named = shown(config["model"]) if isinstance(config.get("model"), str) else "its base model"
        fuse = f"mlx_lm.fuse --model BASE --adapter-path {folder} --dequantize"
        return f"this is an adapter of MLX for {named} ({mlx}), not a model", f"merge it with {fuse}"
    kind = config.get("peft_type")
    if kind is None and "model_class" in config:
        named = shown(config.get("model_name") or "its base model")
        load = "AutoAdapterModel.from_pretrained(BASE), and its load_adapter(FOLDER)"
        return (
            f"this is an adapter of AdapterHub for {named}, not a model",
            f"load it with the library adapters: {load}",
        )
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
    if not any(os.path.lexists(folder / name) for name in ADAPTER_WEIGHTS):
        said = f"this is the adapter_config.json of {title}{rank} for {named}, and the adapter itself is missing"
        return said, f"copy {ADAPTER_WEIGHTS[0]} too; and then {remedy}"
    return f"this is {title}{rank} for {named}, not a model", remedy
