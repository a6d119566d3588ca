"""Write a model as a self-contained repo: anyone loads it with `trust_remote_code=True` and nothing else installed."""

import json
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from . import signing
from .model_card import write_card


def save_tokenizer(tokenizer: Any, folder: str | PathLike[str]) -> None:
    """Save a tokenizer so that older tools read it too: not as `TokenizersBackend` but `PreTrainedTokenizerFast`."""
    tokenizer.save_pretrained(folder)
    path = Path(folder) / "tokenizer_config.json"
    if path.exists():
        settings = json.loads(path.read_text(encoding="utf-8"))
        if settings.get("tokenizer_class") == "TokenizersBackend":
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
            path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


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
        tokenizer: the tokenizer that belongs to it.
        max_shard_size: bytes ("5GB") after which a new weight file begins.
        card: the text of `README.md`; None writes the template's.
        force: replace a folder that Blockformer made, if it is as it was.
        sign: a private key (PEM) to sign the repo with; see `blockformer.publishing.signing.sign`.

    Returns:
        The folder.

    Raises:
        ValueError: the model is not one of Blockformer's, or the folder or the key cannot be used.
    """
    from blockformer.conversion.files.atomic import atomic_folder  # conversion stands above this module

    if not str(getattr(model.config, "model_type", "")).startswith("blockformer_"):
        raise ValueError(f"{type(model).__name__} is no Blockformer model: convert its checkpoint instead.")
    if sign is not None:
        signing.check_key(sign)
    with atomic_folder(folder, force=force) as temporary:
        model.save_pretrained(temporary, max_shard_size=max_shard_size)
        if tokenizer is not None:
            save_tokenizer(tokenizer, temporary)
        if card is not None:
            (temporary / "README.md").write_text(card, encoding="utf-8")
        else:
            write_card(temporary, model.config, parameters=model.num_parameters())
        if sign is not None:
            signing.sign(temporary, sign)
    return Path(folder)
