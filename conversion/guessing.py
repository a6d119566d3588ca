"""Which family a checkpoint is of whose `config.json` does not say it: for the error, which a user can act on."""

from blockformer.files.checkpoint import Checkpoint
from blockformer.files.errors import ConversionError, shown
from blockformer.files.quiet import quiet

from .families.registry import FAMILIES
from .plan import plan_in
from .rules.groups import targets_of
from .rules.table import RuleTable


def missing_type(checkpoint: Checkpoint) -> ConversionError:
    """The error for a `config.json` without `model_type`, with the families whose tensors these are.

    Args:
        checkpoint: which is planned as one of each family; that takes a few seconds, and reads headers only.
    """
    fitting = (name for name in FAMILIES if _fits(checkpoint, name))
    # Of equals the shortest name: families that came later added something to an older one's.
    found = sorted(fitting, key=lambda name: (-_alike(checkpoint, name), len(name)))
    said = "config.json: model_type is missing; set it, or name the family (family=, --family)"
    if not found:
        return ConversionError(f"{said}. The tensors fit none of {', '.join(sorted(FAMILIES))}")
    if found[1:]:
        others = " and ".join(map(shown, found[1:]))
        said += f". The tensors and settings are most like {shown(found[0])}, and the tensors also fit {others}"
    else:
        said += f". The tensors look like {shown(found[0])}"
    return ConversionError(f'{said}: if it is one, write "model_type": "{found[0]}"')


def _alike(checkpoint: Checkpoint, name: str) -> int:
    """How many settings have the values that a family's models usually have."""
    usual = FAMILIES[name].settings.defaults.to_dict()
    return sum(name in usual and usual[name] == value for name, value in checkpoint.config.items())


def _fits(checkpoint: Checkpoint, name: str) -> bool:
    with quiet(errors=True):
        try:
            family, headers = FAMILIES[name], checkpoint.tensors
            variant = family.names.variant_of(checkpoint.config, headers, checkpoint.read)
            config = family.settings.our_config(family.config_from(checkpoint.config, variant))
            to_class = family.names.spelled(variant).to_class
            headers = {to_class(own): info for own, info in headers.items()}
            layout = family.names.layout(variant, config)
            groups = RuleTable(family.names.storage(variant, config), layers=layout.layers).plan(headers, rest=True)
            layout.plan(targets_of(groups))
            plan_in(checkpoint, name, None)  # builds the models, unlike the lines before
        except Exception:  # of another family's classes, whatever they raise for settings that are not theirs
            return False
    return True
