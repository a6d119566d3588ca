"""What a type checker must know about an installed Blockformer; `smoke.sh` has mypy read it, nobody runs it."""

from pathlib import Path

from transformers import PreTrainedModel
from typing_extensions import assert_type

import blockformer
from blockformer.conversion import ConversionReport

model = blockformer.from_official("folder")
assert_type(model, PreTrainedModel)
assert_type(blockformer.convert("folder", "repo"), ConversionReport)
assert_type(blockformer.export_model(model, "repo"), Path)
