"""Write a model as a self-contained repo: anyone loads it with `trust_remote_code=True` and nothing else installed."""

import json
import warnings
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from ..files.json_files import json_text
from ..files.new_repo import RepoOptions
from . import signing
from .model_card import write_card
from .write_repo import ModelWeights, RepoReport, write_repo

_MERGE = "merge adapters into it first (merge_and_unload of PEFT)"


def save_tokenizer(tokenizer: Any, folder: str | PathLike[str]) -> None:
    """Save a tokenizer so that older tools read it too: not as `TokenizersBackend` but `PreTrainedTokenizerFast`."""
    tokenizer.save_pretrained(folder)
    path = Path(folder) / "tokenizer_config.json"
    if path.exists():
        settings = json.loads(path.read_text(encoding="utf-8"))
        if settings.get("tokenizer_class") == "TokenizersBackend":
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
            path.write_text(json_text(settings), encoding="utf-8")


def fitting_tokenizer(tokenizer: Any, config: Any) -> Any:
    """A tokenizer, loaded if it is named by a path or Hub id, that makes no token outside the config's vocabulary.

    Raises:
        ValueError: it makes one.
    """
    if isinstance(tokenizer, str | PathLike):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    size = max(config.vocab_size, getattr(config, "decoder_vocab_size", None) or 0)
    largest = max(tokenizer.get_vocab().values(), default=0) if hasattr(tokenizer, "get_vocab") else 0
    if largest >= size:
        fix = "pass the tokenizer that it was trained with, or call resize_token_embeddings"
        raise ValueError(f"the tokenizer has a token {largest}, the model's vocabulary 0 to {size - 1}: {fix}.")
    return tokenizer


def check_parts(model: PreTrainedModel) -> None:
    """Refuse a model that its config does not describe: a repo of it could not be loaded.

    Raises:
        ValueError: it is another library's, or has adapters or other parts that the config does not name.
    """
    if not str(getattr(getattr(model, "config", None), "model_type", "")).startswith("blockformer_"):
        fix = "load it first" if isinstance(model, str | PathLike) else "convert its checkpoint instead"
        raise ValueError(f"{type(model).__name__} is not a Blockformer model: {fix}.")
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"{type(model).__name__} only contains a Blockformer model: {_MERGE}.")
    if getattr(model.config, "quantization_config", None) is not None:
        return  # whose names are the quantizing library's
    with torch.device("meta"):
        wanted = type(model)(model.config).state_dict().keys()
    if wrong := sorted(model.state_dict().keys() ^ wanted):
        what = f"{wrong[0]} is {'missing' if wrong[0] in wanted else 'not a weight of ' + type(model).__name__}"
        raise ValueError(f"the config does not describe this model, {what}: {_MERGE}, and put back replaced parts.")


def export_model(
    model: PreTrainedModel,
    folder: str | PathLike[str],
    tokenizer: Any = None,
    max_shard_size: int | str = "5GB",
    card: str | None = None,
    force: bool = False,
    sign: str | PathLike[str] | None = None,
) -> Path:
    """Write a model as a self-contained repo: weights, config with the full `auto_map`, code, tokenizer, card.

    The folder appears whole or not at all.

    Args:
        model: a Blockformer model.
        folder: the repo to make.
        tokenizer: the tokenizer that belongs to it, or its folder or Hub id.
        max_shard_size: largest size of one weight file, such as "5GB".
        card: the text of `README.md`; None writes the template's.
        force: replace a folder that Blockformer made, if nobody changed it.
        sign: a private key (PEM) to sign the repo with; see `blockformer.publishing.signing.sign`.

    Returns:
        The folder.

    Raises:
        ValueError: the model is not one of Blockformer's or has other weights than its class, such as adapters; the
            tokenizer has tokens that it does not have; or an option, the folder or the key cannot be used.
    """
    options = RepoOptions(max_shard_size, force, sign=sign)
    check_parts(model)
    if sign is not None:
        signing.check_key(sign)
    if tokenizer is not None:
        tokenizer = fitting_tokenizer(tokenizer, model.config)

    def fill(temporary: Path) -> None:
        if tokenizer is not None:
            save_tokenizer(tokenizer, temporary)
        if card is not None:
            (temporary / "README.md").write_text(card, encoding="utf-8")
        else:
            write_card(temporary, model.config, parameters=model.num_parameters())

    report = RepoReport(type(model).__name__, Path(folder))
    write_repo(ModelWeights(model), options, fill, report)
    for note in report.notes:
        warnings.warn(f"{folder}: {note}", stacklevel=2)
    return report.target
