"""Signatures of whole repos by a key of one's own: OpenSSF's model-signing library, its manifest over all files."""

import stat
from os import PathLike
from pathlib import Path
from typing import Any

from ..files.atomic import MARK

SIGNATURE = "model.sig"
"""The signature's file in a repo, a Sigstore bundle."""
UNSIGNED = (SIGNATURE, MARK)
"""Files that a signature does not cover: itself, the mark that holds times of files, and (not listed) Git's files."""


class SigningError(ValueError):
    """A key that cannot be used, or the library for signatures is missing."""


def check_key(key: str | PathLike[str]) -> None:
    """Refuse what `sign` would refuse, before any work is done.

    Raises:
        SigningError: the key does not exist, or the library is not installed.
    """
    _library()
    _check_file(key)


def sign(folder: str | PathLike[str], key: str | PathLike[str]) -> Path:
    """Sign all files of a repo; an earlier signature is replaced.

    Args:
        folder: the repo.
        key: a private key of an elliptic curve in a PEM file, without a password:
            `openssl ecparam -name prime256v1 -genkey -noout -out key.pem` makes one, and
            `openssl ec -in key.pem -pubout -out key.pub` its public part.

    Returns:
        The signature's file.

    Raises:
        SigningError: the key does not exist, or the library is not installed.
    """
    library, path = _library(), Path(folder) / SIGNATURE
    _check_file(key)
    try:
        signer = library.signing.Config().set_hashing_config(_hashing(library))
        signer = signer.use_elliptic_key_signer(private_key=Path(key))
    except (ValueError, TypeError) as error:
        what = "not a private key of an elliptic curve in PEM, without a password"
        raise SigningError(f"{key}: {what}: {error}") from None
    path.unlink(missing_ok=True)
    signer.sign(Path(folder), path)
    return path


def check_signature(folder: Path, key: str | PathLike[str]) -> list[str]:
    """The faults of a repo's signature, one sentence each.

    Args:
        folder: the repo.
        key: the public key (PEM) that it must be signed with.

    Raises:
        SigningError: the key does not exist, or the library is not installed.
    """
    library = _library()
    _check_file(key)
    path = folder / SIGNATURE
    if not path.exists():
        return [f"the signature is missing ({SIGNATURE})"]
    try:
        verifier = library.verifying.Config().use_elliptic_key_verifier(public_key=Path(key))
    except (ValueError, TypeError) as error:
        raise SigningError(f"{key}: not a public key of an elliptic curve in PEM: {error}") from None
    verifier.set_hashing_config(_hashing(library).set_allow_symlinks(True))  # the Hub's cache has links
    try:
        verifier.verify(folder, path)
    except ValueError as error:
        return [f"{SIGNATURE}: {error}"]
    except Exception as error:  # whatever a damaged file makes the library raise
        return [f"{SIGNATURE} is damaged, or not a signature: {type(error).__name__}: {error}"]
    return []


def _hashing(library: Any) -> Any:
    return library.hashing.Config().set_ignored_paths(paths=UNSIGNED)


def _library() -> Any:
    try:
        import model_signing
    except ImportError as error:
        fix = "pip install model-signing pyOpenSSL"
        raise SigningError(f"signatures need the library model-signing ({error}): {fix}") from None
    return model_signing


def _check_file(key: str | PathLike[str]) -> None:
    try:
        is_file = stat.S_ISREG(Path(key).stat().st_mode)
    except OSError:
        is_file = False
    if not is_file:
        raise SigningError(f"{key}: no such key file")
