"""The Hub-repo writer: a folder that anyone loads with `trust_remote_code=True` and nothing of ours installed.

Such a repo holds the core's modules beside the weights. Only what the modules of the config's `auto_map` import,
directly or not, is copied, and it is checked to need nothing but torch and transformers.
"""

import ast
import functools
import json
import re
import shutil
import sys
from collections.abc import Mapping
from importlib import resources
from os import PathLike
from pathlib import Path
from string import Template
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

CORE = Path(__file__).parent
THIRD_PARTY = frozenset({"torch", "transformers"})
"""What exported code may import besides the standard library: it is there wherever the repo can be loaded at all."""

EMPTY_CARD = "This model card has been automatically generated."
"""What the library's form of a card says, in which nothing is filled in."""

WEIGHT_FILES = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
"""The names that the library gives to weights. Of two checkpoints in one folder it reads the unsharded one."""

# What a model class is for: the ending of its name -> the Hub's pipeline tag.
TASKS = {
    "ForCausalLM": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForMultipleChoice": "multiple-choice",
    "ForConditionalGeneration": "text2text-generation",
    "Model": "feature-extraction",
}


def full_auto_map(config: PretrainedConfig) -> dict[str, str]:
    """The `auto_map` entries of every Auto class that a config's topology serves, `AutoConfig` included."""
    return dict(type(config).auto_classes)


def code_files(config: PretrainedConfig) -> list[Path]:
    """The modules that a repo of this config needs: those of its `auto_map` and everything they import, however deep.

    Raises:
        RuntimeError: one of them imports something that a repo does not have.
    """
    return list(_closure(CORE, frozenset(target.partition(".")[0] for target in full_auto_map(config).values())))


@functools.cache
def _closure(core: Path, entries: frozenset[str]) -> tuple[Path, ...]:
    found: dict[str, Path] = {}
    waiting = list(entries)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = path = core / f"{name}.py"
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


def copy_code(folder: str | PathLike[str], config: PretrainedConfig) -> list[Path]:
    """Copy the core's modules into a repo of this config and return where they went."""
    return [Path(shutil.copyfile(path, Path(folder) / path.name)) for path in code_files(config)]


def save_tokenizer(tokenizer: Any, folder: str | PathLike[str]) -> None:
    """Save a tokenizer so that older tools read it too: not as `TokenizersBackend` but `PreTrainedTokenizerFast`."""
    tokenizer.save_pretrained(folder)
    path = Path(folder) / "tokenizer_config.json"
    if path.exists():
        settings = json.loads(path.read_text(encoding="utf-8"))
        if settings.get("tokenizer_class") == "TokenizersBackend":
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
            path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_card(
    folder: str | PathLike[str],
    config: PretrainedConfig,
    *,
    origin: str = "",
    base_model: str | None = None,
    parity: str = "",
    parameters: int | None = None,
    generation: Mapping[str, Any] | None = None,
) -> Path:
    """Write a repo's model card, `README.md`, from the template in `model_cards/`.

    Args:
        folder: the repo.
        config: the model's config, with `architectures` set.
        origin: a sentence on where the weights come from.
        base_model: the Hub id of the checkpoint they come from.
        parity: what a comparison with the official implementation measured.
        parameters: their number.
        generation: the generation settings that differ from the library's defaults.
    """
    architecture = (config.architectures or ["BlockformerDecoderForCausalLM"])[0]
    entries = full_auto_map(config)
    auto_class = next((auto for auto, code in entries.items() if code.endswith(f".{architecture}")), "AutoModel")
    task = next((tag for ending, tag in TASKS.items() if architecture.endswith(ending)), "feature-extraction")
    text = resources.files("blockformer.model_cards").joinpath("template.md").read_text(encoding="utf-8")
    card = Template(text).substitute(
        pipeline_tag=task,
        base_model=f"base_model: {json.dumps(base_model)}\n" if base_model else "",
        architecture=architecture,
        auto_class=auto_class,
        use=_usage(auto_class),
        origin=origin or "The weights were trained with Blockformer.",
        parity=parity or "Not compared with another implementation.",
        parameters=f"{parameters:,}" if parameters else "see the weights",
        settings=_table(_settings(config)),
        generation=_table(generation) if generation else "The library's defaults.",
        files=", ".join(f"`{path.name}`" for path in code_files(config)),
    )
    path = Path(folder) / "README.md"
    path.write_text(card, encoding="utf-8")
    return path


def _usage(auto_class: str) -> str:
    if auto_class == "AutoModelForCausalLM":
        return (
            'inputs = tokenizer("Once upon a time", return_tensors="pt")\n'
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))"
        )
    if auto_class == "AutoModelForSeq2SeqLM":
        return (
            'inputs = tokenizer(["three hundred and five"], padding=True, return_tensors="pt")\n'
            "print(tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=40), skip_special_tokens=True))"
        )
    return 'outputs = model(**tokenizer("Once upon a time", return_tensors="pt"))'


def _settings(config: PretrainedConfig) -> dict[str, Any]:
    """The fields of a config that say what the model is, long lists cut short."""
    fields = config.to_dict()
    hidden = {"auto_map", "architectures", "transformers_version", "_name_or_path", "id2label", "label2id"}
    kept = {name: value for name, value in sorted(fields.items()) if name not in hidden and value is not None}
    kinds = kept.get("layer_types")
    if kinds:
        kept["layer_types"] = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    return kept


def _table(entries: Mapping[str, Any]) -> str:
    rows = [f"| `{name}` | {_cell(value)} |" for name, value in entries.items()]
    return "\n".join(["| field | value |", "|---|---|", *rows])


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("|", "\\|").replace("\n", " ")[:200]


def generation_settings(model: PreTrainedModel) -> dict[str, Any]:
    """The generation settings of a model that differ from the library's defaults."""
    settings = getattr(model, "generation_config", None)
    if settings is None:
        return {}
    hidden = ("transformers_version", "_from_model_config")
    return {name: value for name, value in settings.to_diff_dict().items() if name not in hidden}


def export_model(
    model: PreTrainedModel,
    folder: str | PathLike[str],
    tokenizer: Any = None,
    max_shard_size: int | str = "5GB",
    card: str | None = None,
    force: bool = False,
) -> Path:
    """Write a model as a self-contained repo: weights, config with the full `auto_map`, code, tokenizer, card.

    The folder appears whole or not at all.

    Args:
        model: a Blockformer model.
        folder: the repo to make.
        tokenizer: the tokenizer that belongs to it.
        max_shard_size: bytes ("5GB") after which a new weight file begins.
        card: the text of `README.md`; None writes the template's.
        force: replace a model folder that is there already.

    Returns:
        The folder.

    Raises:
        ValueError: the model is not one of Blockformer's, or the folder cannot be used.
    """
    from blockformer.conversion.atomic import atomic_folder  # conversion stands above this module

    if not str(getattr(model.config, "model_type", "")).startswith("blockformer_"):
        raise ValueError(f"{type(model).__name__} is no Blockformer model: convert its checkpoint instead.")
    with atomic_folder(folder, force=force) as temporary:
        model.save_pretrained(temporary, max_shard_size=max_shard_size)
        if type(model).__module__.startswith("blockformer."):  # a model loaded from a repo saves that repo's code
            copy_code(temporary, model.config)
        if tokenizer is not None:
            save_tokenizer(tokenizer, temporary)
        if card is not None:
            (temporary / "README.md").write_text(card, encoding="utf-8")
        else:
            numbers = {"parameters": model.num_parameters(), "generation": generation_settings(model)}
            write_card(temporary, model.config, **numbers)
    return Path(folder)


def upload_model(
    model: PreTrainedModel,
    folder: str | PathLike[str],
    repo_id: str,
    timestamps: Mapping[str, float],
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    token: bool | str | None = None,
    create_pr: bool = False,
    revision: str | None = None,
) -> Any:
    """Upload a model that `save_pretrained` has just written, in one commit: the last step of its `push_to_hub`.

    The library would leave the weight files of an earlier push in the repo. Where that one was not in shards and this
    one is, whoever loads the repo gets the old weights, without a word.

    Args:
        model: what was saved.
        folder: where it was saved.
        repo_id: the repo; it exists.
        timestamps: of the files that were there before, by name; they are uploaded if they are newer.
        commit_message: in one line.
        commit_description: more of it.
        token: the access token; None takes the stored one.
        create_pr: propose the commit, instead of making it.
        revision: the branch, made if it is not there; None is `main`.

    Returns:
        huggingface_hub's `CommitInfo`.

    Raises:
        HfHubHTTPError: the Hub refuses, also when somebody else pushed meanwhile. The repo is as it was.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard

    card = Path(folder) / "README.md"
    if card.exists() and EMPTY_CARD in card.read_text(encoding="utf-8"):
        tags = ModelCard.load(card).data.tags or []
        write_card(folder, model.config, parameters=model.num_parameters(), generation=generation_settings(model))
        ours = ModelCard.load(card)
        ours.data.tags = list(dict.fromkeys([*ours.data.tags, *tags]))
        ours.save(card)
    files = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
    names = {path.relative_to(folder).as_posix(): path for path in files}
    names = {
        name: path
        for name, path in names.items()
        if path.stat().st_mtime > timestamps.get(name.partition("/")[0], float("-inf"))
    }
    api = HfApi(token=token)
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    there = api.model_info(repo_id, revision=revision)
    operations: list[Any] = [CommitOperationAdd(name, path) for name, path in names.items()]
    for sibling in there.siblings or []:
        if WEIGHT_FILES.fullmatch(sibling.rfilename) and sibling.rfilename not in names:
            operations.append(CommitOperationDelete(sibling.rfilename))
    return api.create_commit(
        repo_id,
        operations,
        commit_message=commit_message or "Upload model",
        commit_description=commit_description,
        create_pr=create_pr,
        revision=revision,
        parent_commit=there.sha,
    )
