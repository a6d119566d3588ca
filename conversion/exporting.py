"""Turn a folder in our layout into a self-contained repo."""

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig

from blockformer.files.checkpoint import Checkpoint
from blockformer.files.config_file import is_ours
from blockformer.files.errors import ConversionError
from blockformer.files.progress import Progress
from blockformer.files.quantized import refuse_quantized
from blockformer.files.side_file_kinds import STORE
from blockformer.files.sources import Reading, Source
from blockformer.model_classes import MODELS
from blockformer.publishing import signing
from blockformer.publishing.repo_code import release_code
from blockformer.publishing.write_repo import write_repo

from .arguments import check_conversion
from .into_memory import dtype_note, dtype_of_file
from .model_tensors import by_sources, expected_tensors, identity_rules, stored_pairs, unread_pooler, with_sources
from .origin import BEFORE, ORIGIN, read_origin
from .plan import architecture_of, our_config
from .report import ConversionReport
from .rules.groups import Group
from .storage.unused_tensors import UNUSED_FILE
from .writing import AroundWeights, CheckpointWeights

if TYPE_CHECKING:
    from typing_extensions import Unpack


def export_folder(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    force: bool = False,
    strict_finite: bool = False,
    sign: str | PathLike[str] | None = None,
    progress: Progress | None = None,
    **reading: "Unpack[Reading]",
) -> ConversionReport:
    """Turn a folder in our layout (a `Trainer` checkpoint, say) into a self-contained repo, tensor by tensor.

    Args:
        src: a folder or Hub id.
        dst: the repo to create.
        max_shard_size: largest size of one weight file, such as "5GB".
        force: replace a folder that Blockformer made, if nobody changed it.
        strict_finite: refuse NaN and infinite weights instead of reporting them.
        sign: a private key (PEM) to sign the repo with; see `blockformer.publishing.signing.sign`.
        progress: receives progress reports.
        reading: which files are read, and from where; see `convert`.

    Raises:
        ConversionError: see `convert`.
    """
    own: dict[str, Any] = {"max_shard_size": max_shard_size, "force": force, "strict_finite": strict_finite}
    options = check_conversion(src, dst, function="export_folder", progress=progress, sign=sign, **own, **reading)
    if sign is not None:
        signing.check_key(sign)
    with AroundWeights.opened(src, dst, options, **reading) as around:
        checkpoint, place = around.checkpoint, around.place
        if not is_ours(checkpoint.config):
            raise ConversionError(f"{place.path}: not a model of Blockformer; `blockformer convert` makes a repo of it")
        refuse_quantized(checkpoint.config, checkpoint.tensors)
        config = our_config(checkpoint.config)
        groups, tied, parameters = own_groups(checkpoint, config)
        around.report.notes += dtype_note(config, dtype_of_file(checkpoint))

        def fill(folder: Path) -> None:
            code, copies = release_code(place.path, config), record_of(checkpoint, place)
            side = around.fill(folder, config, code, copies)
            around.compare_tokenizers(side)
            around.write_card(folder, config, parameters)

        write_repo(CheckpointWeights(checkpoint, groups, tied, place.files), options, fill, around.report)
    return around.report


def own_groups(checkpoint: Checkpoint, config: PretrainedConfig) -> tuple[list[Group], list[tuple[str, str]], int]:
    """How the weights of a folder in our layout are copied, which are tied, and how many parameters there are.

    Raises:
        ConversionError: the config describes other tensors.
    """
    model_class = MODELS[architecture_of(config)]
    shapes, tied, parameters = expected_tensors(model_class, config)
    pooler = unread_pooler(model_class, config)
    shapes |= pooler
    names = by_sources(checkpoint.tensors, tied)
    headers = {name: checkpoint.tensors[own] for name, own in names.items()}
    groups = with_sources(identity_rules(shapes).plan(headers, shapes, optional=[*tied, *pooler]), names)
    return groups, stored_pairs(tied, groups), parameters


def record_of(checkpoint: Checkpoint, place: Source) -> list[str]:
    """The files by which an earlier conversion is undone.

    Raises:
        ConversionError: the record is damaged.
    """
    if read_origin(checkpoint) is None:
        return []
    folders = (f"{STORE}/", f"{BEFORE}/")
    return [name for name in place.names if name in (ORIGIN, UNUSED_FILE) or name.startswith(folders)]
