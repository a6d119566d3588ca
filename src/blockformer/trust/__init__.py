"""What a repo may be trusted with: whether its code is a release's, its files are harmless, its signature holds."""

from .upgrading import upgrade
from .verification import Verification, verify

__all__ = ["Verification", "upgrade", "verify"]
