"""The last step of `push_to_hub`."""

import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from .model_card import generation_settings, write_card

EMPTY_CARD = "This model card has been automatically generated."
"""What the library's form of a card says, in which nothing is filled in."""

WEIGHT_FILES = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
"""The names that the library gives to weights. Of two checkpoints in one folder it reads the unsharded one."""


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
