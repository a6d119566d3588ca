"""Blockformer: every classic Transformer, from one small set of blocks, natively Hugging Face.

Once this package is imported, the Auto classes of transformers know its models. It imports neither torch nor
transformers before something of the model is needed.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING

from .model.release import VERSION as __version__  # noqa: F401
from .on_import import watch_imports

if TYPE_CHECKING:
    from .api import *
    from .conversion import convert, from_official
    from .training.callbacks import ExpertLoad, StopOnNonFiniteLoss
    from .training.checkpoints import last_complete_checkpoint
    from .trust import upgrade, verify

__all__ = [
    "PRESETS",
    "BlockformerDecoderConfig",
    "BlockformerDecoderForCausalLM",
    "BlockformerDecoderForQuestionAnswering",
    "BlockformerDecoderForSequenceClassification",
    "BlockformerDecoderForTokenClassification",
    "BlockformerDecoderModel",
    "BlockformerEncoderConfig",
    "BlockformerEncoderDecoderConfig",
    "BlockformerEncoderDecoderForConditionalGeneration",
    "BlockformerEncoderDecoderForQuestionAnswering",
    "BlockformerEncoderDecoderForSequenceClassification",
    "BlockformerEncoderDecoderModel",
    "BlockformerEncoderForMaskedLM",
    "BlockformerEncoderForMultipleChoice",
    "BlockformerEncoderForNextSentencePrediction",
    "BlockformerEncoderForPreTraining",
    "BlockformerEncoderForQuestionAnswering",
    "BlockformerEncoderForReplacedTokenDetection",
    "BlockformerEncoderForSequenceClassification",
    "BlockformerEncoderForTokenClassification",
    "BlockformerEncoderModel",
    "ExpertLoad",
    "StopOnNonFiniteLoss",
    "adamw",
    "convert",
    "explain",
    "export_model",
    "from_official",
    "last_complete_checkpoint",
    "muon",
    "mup_groups",
    "mup_model",
    "optimizer_groups",
    "prepare_for_inference",
    "prepare_for_training",
    "preset",
    "prune_heads",
    "register",
    "reshape",
    "restore_heads",
    "upgrade",
    "verify",
    "warm_up",
]

# The modules of public names outside of `api`, because they import more libraries.
_ELSEWHERE = {
    "ExpertLoad": "training.callbacks",
    "StopOnNonFiniteLoss": "training.callbacks",
    "convert": "conversion",
    "from_official": "conversion",
    "last_complete_checkpoint": "training.checkpoints",
    "upgrade": "trust",
    "verify": "trust",
}

watch_imports()


def __getattr__(name):
    if name in __all__:
        return getattr(importlib.import_module(f".{_ELSEWHERE.get(name, 'api')}", __name__), name)
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__():
    return sorted({*globals(), *__all__})
