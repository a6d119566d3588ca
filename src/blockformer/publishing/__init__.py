"""Self-contained repos: the code they carry, their model card, and the upload. Never part of an exported repo."""

from .export import export_model, save_tokenizer
from .model_card import write_card
from .repo_code import code_files, copy_code, full_auto_map

__all__ = [
    "code_files",
    "copy_code",
    "export_model",
    "full_auto_map",
    "save_tokenizer",
    "write_card",
]
