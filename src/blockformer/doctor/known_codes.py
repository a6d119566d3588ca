"""The training code whose checkpoints are known, and which of them a checkpoint is of."""

from collections.abc import Collection

from blockformer.files.errors import ConversionError

from .any_checkpoint import AnyCheckpoint
from .litgpt import LITGPT
from .llama2_c import LLAMA2_C
from .llama_names import TORCHTITAN, TORCHTUNE
from .nano_gpt import NANO_GPT
from .nanochat import NANOCHAT
from .own_code import CONFIG, OwnCode
from .x_transformers import X_TRANSFORMERS

OWN_CODE = (NANO_GPT, LLAMA2_C, LITGPT, TORCHTUNE, TORCHTITAN, NANOCHAT, X_TRANSFORMERS)


def code_of(names: Collection[str], checkpoint: AnyCheckpoint) -> OwnCode | None:
    """The training code that a checkpoint comes from, by its names.

    The one whose settings lie there; else one that saves none.

    Args:
        names: of its tensors, without what wrappers put into them.
        checkpoint: whose they are.
    """
    fitting = [code for code in OWN_CODE if code.fits(names, checkpoint, checkpoint.extras)]
    told = [code for code in fitting if code.has_settings(checkpoint, checkpoint.extras)]
    asking = [code for code in fitting if code.key == CONFIG]
    return next(iter([*told, *asking, *fitting]), None)


def code_named(name: str) -> OwnCode:
    """The training code of this name, which can be written.

    Raises:
        ConversionError: none is.
    """
    written = {code.name.lower(): code for code in OWN_CODE if code.back is not None}
    if name not in written:
        raise ConversionError(f"{name!r} cannot be written; name one of {', '.join(written)}")
    return written[name]
