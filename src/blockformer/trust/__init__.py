"""What a repo may be trusted with: whether its code is a release's, its files are harmless, its signature holds."""

from .result import Verification
from .upgrading import upgrade
from .verification import verify

__all__ = ["Verification", "upgrade", "verify"]
