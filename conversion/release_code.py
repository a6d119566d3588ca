"""Code in a repo of ours that is, byte for byte, the installed release's."""

from pathlib import Path

from transformers import PretrainedConfig

from blockformer.publishing import code_files

from .articles.transformer import EXTRA_CODE
from .files.side_file_kinds import same_bytes


def release_code(folder: Path, config: PretrainedConfig) -> dict[str, Path]:
    """Name -> the release's file, for each file in a repo that is the same.

    Args:
        folder: the repo.
        config: its config, which says what code it needs.
    """
    files = {path.name: path for path in code_files(config)} | EXTRA_CODE
    return {name: path for name, path in files.items() if _is_same(folder / name, path)}


def _is_same(path: Path, other: Path) -> bool:
    return path.is_file() and same_bytes(path, other)
