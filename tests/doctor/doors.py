"""What the doors of the package say of a folder that they do not open."""

import pytest

from blockformer.conversion import ConversionError
from blockformer.trust import verify


def refusal(function, *arguments):
    """The message of a door, called with these arguments."""
    with pytest.raises((ConversionError, OSError, ValueError)) as caught:
        function(*arguments)
    return str(caught.value)


def verified(folder):
    """Raise what verify says."""
    raise ConversionError("; ".join(said for each in verify(folder).problems.values() for said in each))
