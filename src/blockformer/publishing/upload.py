"""`push_to_hub` of our models: one commit, with a model card, and without the weight files of an earlier push.

transformers' own leaves those in the repo. Where an earlier push was not in shards and this one is, whoever loads the
repo gets the old weights, without a word. A model of a repo's own code, loaded without this package, keeps the
library's.
"""

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, constants
from huggingface_hub.errors import EntryNotFoundError
from transformers import PreTrainedModel

from ..files.names import weights_of
from ..files.new_repo import check_whole
from ..model.runtime import PACKAGE
from . import repo_code
from .export import check_parts
from .model_card import write_card

EMPTY_CARD = "This model card has been automatically generated."
"""A sentence of the library's template of a card, in which nothing is filled in."""

WEIGHT_FILES = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
"""The names that the library gives to weights. Of two checkpoints in one folder it reads the unsharded one."""

HUB_OPTIONS = ("repo_id", "commit_message", "commit_description", "private", "revision", "create_pr")


def plug_in() -> None:
    """Have this package's models upload by these functions, and their repos carry the code that they need."""
    PACKAGE.update(
        push_to_hub=lambda usual, *given, **options: push_to_hub(*given, **options),
        save_pretrained=save_pretrained,
        to_diff_dict=repo_code.written_entries,
        to_json_file=repo_code.write_config,
    )


def push_to_hub(
    model: PreTrainedModel,
    repo_id: str,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str = "50GB",
    tags: str | Iterable[str] = (),
) -> CommitInfo:
    """Publish a model: weights, config, code and card in one commit.

    Args:
        model: what to publish.
        repo_id: the repo, made if it is not there.
        commit_message: in one line.
        commit_description: more of it.
        private: of a repo that is made; None takes the owner's default.
        token: the access token; None takes the stored one.
        revision: the branch, made if it is not there; None is `main`.
        create_pr: propose the commit, instead of making it.
        max_shard_size: bytes ("50GB") after which a new weight file begins.
        tags: of the card, in addition to the model's own.

    Raises:
        ConnectionError: the Hub cannot be reached.
        ValueError: the model has other weights than its class, such as adapters.
        HfHubHTTPError: the Hub refuses, also when somebody else pushed meanwhile. The repo is as it was.
    """
    check_parts(model)
    with _connection(repo_id):
        repo_id = HfApi(token=token).create_repo(repo_id, private=private, exist_ok=True).repo_id
    with _connection(repo_id), tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        _write_card(model, Path(folder), repo_id, token, [tags] if isinstance(tags, str) else tags)
        check_whole(Path(folder))
        words = {"commit_message": commit_message, "commit_description": commit_description}
        return _commit(_files_in(Path(folder)), repo_id, token, revision=revision, create_pr=create_pr, **words)


def save_pretrained(
    usual: Callable[..., None],
    model: PreTrainedModel,
    save_directory: str | PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Any] | None = None,
    push_to_hub: bool = False,
    **options: Any,
) -> None:
    """transformers' `save_pretrained`, `usual`, whose `push_to_hub=True` uploads as `push_to_hub` does.

    Of an earlier save in the folder it leaves no weights that would be read in place of the new ones. With
    `push_to_hub`, `options` may hold `repo_id` (else the folder's name), `commit_message`, `commit_description`,
    `private`, `revision` and `create_pr`.
    """
    folder = Path(save_directory)
    hub = {name: options.pop(name) for name in HUB_OPTIONS if push_to_hub and name in options}
    before = _files_in(folder) if push_to_hub else {}
    weights = [folder / name for name in weights_of(options.get("variant"), use_safetensors=True)[0]]
    earlier = _times_of(weights)
    usual(model, folder, is_main_process=is_main_process, state_dict=state_dict, **options)
    if is_main_process:
        _remove_replaced(earlier, _times_of(weights))
    if push_to_hub and is_main_process:
        token = options.get("token")
        name = hub.pop("repo_id", folder.name)
        with _connection(name):
            repo_id = HfApi(token=token).create_repo(name, private=hub.pop("private", None), exist_ok=True).repo_id
            _write_card(model, folder, repo_id, token)
            written = {name: file for name, file in _files_in(folder).items() if before.get(name) != file}
            _commit(written, repo_id, token, **hub)


def _times_of(files: Iterable[Path]) -> dict[Path, int]:
    """The time of the last change of each file that is there, in nanoseconds."""
    return {path: path.stat().st_mtime_ns for path in files if path.is_file()}


def _remove_replaced(before: dict[Path, int], after: dict[Path, int]) -> None:
    """Remove the single file of weights that shards have replaced, or the index of shards that one file has.

    transformers removes the shards of an earlier save, but neither of these two, and reads the single file first.

    Args:
        before, after: the times of the two before the save and after it.
    """
    written = {path for path, time in after.items() if before.get(path) != time}
    for path in after.keys() - written if written else ():
        path.unlink()


@contextmanager
def _connection(repo_id: str) -> Iterator[None]:
    """Say what to do where the Hub cannot be reached: its client's errors, of several libraries, are alike by name."""
    try:
        yield
    except Exception as error:
        if not {"ConnectionError", "TransportError"} & {cls.__name__ for cls in type(error).__mro__}:
            raise
        if constants.HF_HUB_OFFLINE:
            reason, fix = "HF_HUB_OFFLINE is set", "Unset it and push again"
        else:
            reason, fix = f"{constants.ENDPOINT} cannot be reached ({error})", "Check the connection and push again"
        rest = "a push is one commit, so the repo gets all of it or nothing. Or write a folder with export_model."
        raise ConnectionError(f"publishing {repo_id} failed, since {reason}. {fix}: {rest}") from error


def _files_in(folder: Path) -> dict[str, tuple[Path, int]]:
    """name -> the path of each file and the time of its last change, in nanoseconds."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): (path, path.stat().st_mtime_ns) for path in files}


def _write_card(
    model: PreTrainedModel, folder: Path, repo_id: str, token: bool | str | None, tags: Iterable[str] = ()
) -> None:
    """Write the card of the repo with the model's tags; ours where the repo has none, or one with nothing filled in."""
    try:
        card = ModelCard.load(repo_id, token=token)  # type: ignore[arg-type] # True is fine
    except EntryNotFoundError:
        card = None
    if card is None or EMPTY_CARD in card.content:
        write_card(folder, model.config, parameters=model.num_parameters())
        tags = [*(card.data.tags or [] if card is not None else []), *tags]
        card = ModelCard.load(folder / "README.md")
    card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *(model.model_tags or []), *tags]))
    card.save(folder / "README.md")


def _commit(
    files: dict[str, tuple[Path, int]],
    repo_id: str,
    token: bool | str | None,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> CommitInfo:
    """Upload files and delete the weight files that are not among them, in one commit.

    `HfApi.upload_folder` has `delete_patterns` for that, but may make several commits of a large folder, and whoever
    loads in between gets some of each.
    """
    api = HfApi(token=token)
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    there = api.model_info(repo_id, revision=revision)
    operations: list[Any] = [CommitOperationAdd(name, path) for name, (path, _) in files.items()]
    for sibling in there.siblings or []:
        if WEIGHT_FILES.fullmatch(sibling.rfilename) and sibling.rfilename not in files:
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
