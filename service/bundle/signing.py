"""Signs a bundle's files with a private key, and checks them with the public one. No network.

`model-signing` does both: it hashes every file of the folder and signs the list (ECDSA on P-256,
P-384 or P-521, keys as PEM). The signature lies beside the manifest and covers all files but
itself. It is an optional package: a server does not need it.
"""

import base64
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from service.errors import DSSError

SIGNATURE = "signature.json"
EXTRA = "doubly-sparse-softmax[signing]"
SHOWN = 3  # names of files in a sentence
MISMATCH = "Signature mismatch"  # how model-signing begins if the key is right and a file is not


class SigningNotInstalled(DSSError):
    pass


class KeyUnusable(DSSError):
    """A key file cannot be read, or holds no key of the right kind."""


class NotSigned(DSSError):
    """A bundle has no signature."""


class SignatureRefused(DSSError):
    """A bundle is not what the key's owner has signed."""


def sign(bundle: Path, private_key: Path, password: bytes | None = None) -> Path:
    """Writes the signature; an old one is replaced."""
    signing = _installed("signing")
    try:
        # The password is handed on to a function that takes bytes, whatever the hint says.
        config = signing.Config().use_elliptic_key_signer(
            private_key=private_key, password=password
        )
    except Exception as error:
        raise _unusable(private_key, "private", error) from error
    unfinished = bundle / f"{SIGNATURE}.new"
    try:
        unfinished.unlink(missing_ok=True)
        config.set_hashing_config(_hashing()).sign(bundle, unfinished)
        unfinished.replace(bundle / SIGNATURE)
    except (OSError, ValueError) as error:
        raise SignatureRefused(f"{bundle} cannot be signed: {_reason(error)}.") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return bundle / SIGNATURE


def check(bundle: Path, public_key: Path) -> None:
    """That these files, no more and no fewer, were signed with the key's private half."""
    verifying = _installed("verifying")
    try:
        config = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    except Exception as error:
        raise _unusable(public_key, "public", error) from error
    if not (bundle / SIGNATURE).is_file():
        raise NotSigned(f"{bundle} is not signed: it has no {SIGNATURE}; see dss sign.")
    config.set_hashing_config(_hashing())
    try:
        with contextlib.redirect_stdout(sys.stderr):  # it prints warnings
            config.verify(bundle, bundle / SIGNATURE)
    except Exception as error:  # whatever is wrong with a signature, the bundle is refused
        if isinstance(error, ValueError) and str(error).startswith(MISMATCH):
            raise SignatureRefused(
                f"{bundle} is not what was signed: {_changes(bundle)}."
            ) from error
        raise SignatureRefused(
            f"The signature of {bundle} is not by the key {public_key}, or was altered."
        ) from error


def _installed(module: str) -> Any:  # noqa: ANN401
    try:
        from model_signing import hashing, signing, verifying
    except ImportError as error:
        raise SigningNotInstalled(
            f"Signatures need the package model-signing: install {EXTRA}."
        ) from error
    return {"hashing": hashing, "signing": signing, "verifying": verifying}[module]


def _hashing() -> Any:  # noqa: ANN401
    """Every file but the signature, also those that git would ignore; links are refused."""
    hashing = _installed("hashing").Config()
    return hashing.set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)


def _unusable(key: Path, half: str, error: Exception) -> KeyUnusable:
    if isinstance(error, OSError):
        return KeyUnusable(f"The key file {key} cannot be read: {error.strerror}.")
    return KeyUnusable(
        f"{key} is not a {half} key that can be used here: it must be PEM, on the curve P-256, "
        "P-384 or P-521, and its password, if it has one, must be given."
    )


def _changes(bundle: Path) -> str:
    """Which files differ from those in a signature that the key has made."""
    envelope = json.loads((bundle / SIGNATURE).read_bytes())["dsseEnvelope"]
    resources = json.loads(base64.b64decode(envelope["payload"]))["predicate"]["resources"]
    signed = {one["name"]: one["digest"] for one in resources}
    files = _hashing().hash(bundle).resource_descriptors()
    found = {one.identifier: one.digest.digest_hex for one in files}
    changes = {
        "added": found.keys() - signed.keys(),
        "missing": signed.keys() - found.keys(),
        "altered": {name for name in found.keys() & signed.keys() if found[name] != signed[name]},
    }
    return "; ".join(f"{_listed(sorted(names))} {what}" for what, names in changes.items() if names)


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name)[1:-1] for name in names[:SHOWN])
    return f"{shown} and {len(names) - SHOWN} more" if len(names) > SHOWN else shown


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).rstrip(".")
