"""Bundles signed and checked with real keys, and every way in which they can be altered."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from helpers.tiny_bundle import write_tiny

from service import bundle as bundles
from service.bundle import signing
from service.bundle.signing import (
    SIGNATURE,
    KeyUnusable,
    NotSigned,
    SignatureRefused,
    SigningNotInstalled,
)
from service.cli.main import cli

PEM = serialization.Encoding.PEM
CURVES = {"P-256": ec.SECP256R1(), "P-384": ec.SECP384R1(), "P-521": ec.SECP521R1()}


class Keys:
    """A pair, in files."""

    def __init__(
        self, folder: Path, curve: ec.EllipticCurve, password: bytes | None = None
    ) -> None:
        folder.mkdir(parents=True)
        self.private, self.public = folder / "private.pem", folder / "public.pem"
        made = ec.generate_private_key(curve)
        locked = (
            serialization.BestAvailableEncryption(password)
            if password
            else serialization.NoEncryption()
        )
        self.private.write_bytes(made.private_bytes(PEM, serialization.PrivateFormat.PKCS8, locked))
        self.public.write_bytes(
            made.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        )


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys", CURVES["P-256"])


@pytest.fixture
def signed(tmp_path: Path, keys: Keys) -> Path:
    path = tmp_path / "models" / "tiny" / "1"
    write_tiny(path)
    signing.sign(path, keys.private)
    return path


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_what_a_key_signed_its_other_half_accepts(tmp_path: Path, curve: ec.EllipticCurve) -> None:
    keys, path = Keys(tmp_path / "keys", curve), tmp_path / "1"
    write_tiny(path)
    signing.sign(path, keys.private)
    signing.check(path, keys.public)
    signing.sign(path, keys.private)  # again: the old signature is none of the files
    signing.check(path, keys.public)
    assert not (path / f"{SIGNATURE}.new").exists()
    bundles.read(path)


def test_a_signature_goes_with_its_folder(signed: Path, keys: Keys, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(signed, moved)
    signing.check(moved, keys.public)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def sign_as_another(path: Path) -> None:
    signing.sign(path, Keys(path.parent / "another", CURVES["P-256"]).private)


def alter_what_was_signed(path: Path) -> None:
    found = json.loads((path / SIGNATURE).read_text())
    payload = found["dsseEnvelope"]["payload"]
    found["dsseEnvelope"]["payload"] = payload[:-8] + payload[-8:].swapcase()
    (path / SIGNATURE).write_text(json.dumps(found))


def leave_no_signature_inside(path: Path) -> None:
    found = json.loads((path / SIGNATURE).read_text())
    found["dsseEnvelope"]["signatures"] = []
    (path / SIGNATURE).write_text(json.dumps(found))


def link(path: Path) -> None:
    (path / "samples.npy").rename(path.parent / "samples.npy")
    (path / "samples.npy").symlink_to(path.parent / "samples.npy")


ALTERED: dict[str, tuple[Callable[[Path], object], str]] = {
    "manifest": (lambda path: flip(path / "manifest.json"), "manifest.json altered"),
    "gate": (lambda path: flip(path / "gate.onnx"), "gate.onnx altered"),
    "labels": (lambda path: flip(path / "labels.txt"), "labels.txt altered"),
    "added": (lambda path: (path / "more.txt").touch(), "more.txt added"),
    "added for git": (lambda path: (path / ".gitignore").touch(), ".gitignore added"),
    "removed": (lambda path: (path / "samples.npy").unlink(), "samples.npy missing"),
    "renamed": (
        lambda path: (path / "samples.npy").rename(path / "s.npy"),
        "s.npy added; samples.npy missing",
    ),
    "many added": (
        lambda path: [(path / f"{n}.txt").touch() for n in range(9)],
        "0.txt, 1.txt, 2.txt and 6 more added",
    ),
    "linked": (link, "not by the key"),
    "another key": (sign_as_another, "not by the key"),
    "payload": (alter_what_was_signed, "not by the key"),
    "no signature inside": (leave_no_signature_inside, "not by the key"),
    "no JSON": (lambda path: (path / SIGNATURE).write_text("{"), "not by the key"),
    "empty": (lambda path: (path / SIGNATURE).write_text("{}"), "not by the key"),
}


@pytest.mark.parametrize(("alter", "reason"), ALTERED.values(), ids=ALTERED)
def test_whatever_is_altered_is_refused(
    signed: Path, keys: Keys, alter: Callable[[Path], object], reason: str
) -> None:
    alter(signed)
    with pytest.raises(SignatureRefused, match=reason.replace(".", r"\.")) as refused:
        signing.check(signed, keys.public)
    assert str(refused.value).count(".") >= 1 and "\n" not in str(refused.value)


@pytest.mark.parametrize("instead", ["nothing", "a folder"])
def test_a_bundle_without_a_signature_is_refused(signed: Path, keys: Keys, instead: str) -> None:
    (signed / SIGNATURE).unlink()
    if instead == "a folder":
        (signed / SIGNATURE).mkdir()
    with pytest.raises(NotSigned, match=f"it has no {SIGNATURE}"):
        signing.check(signed, keys.public)


def test_unusable_keys_are_named(signed: Path, keys: Keys, tmp_path: Path) -> None:
    other = tmp_path / "ed25519.pem"
    made = ed25519.Ed25519PrivateKey.generate()
    other.write_bytes(
        made.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    for wrong in (keys.private, other, signed / "labels.txt"):
        with pytest.raises(KeyUnusable, match="is not a public key that can be used here"):
            signing.check(signed, wrong)
    for wrong in (keys.public, signed / "labels.txt"):
        with pytest.raises(KeyUnusable, match="is not a private key that can be used here"):
            signing.sign(signed, wrong)
    with pytest.raises(KeyUnusable, match="No such file"):
        signing.check(signed, tmp_path / "none.pem")
    signing.check(signed, keys.public)  # the old signature is still there


def test_a_key_may_have_a_password(signed: Path, tmp_path: Path) -> None:
    locked = Keys(tmp_path / "locked", CURVES["P-256"], b"open sesame")
    for wrong in (None, b"something else"):
        with pytest.raises(KeyUnusable, match="its password"):
            signing.sign(signed, locked.private, wrong)
    signing.sign(signed, locked.private, b"open sesame")
    signing.check(signed, locked.public)


def test_without_the_package_one_sentence_says_what_to_install(
    signed: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "model_signing", None)
    for command in (["sign", str(signed), "--key", str(keys.private)], _verify(signed, keys)):
        done = CliRunner().invoke(cli, command)
        assert done.exit_code == 1
        assert "install doubly-sparse-softmax[signing]" in done.stderr
    with pytest.raises(SigningNotInstalled):
        signing.check(signed, keys.public)


def _verify(path: Path, keys: Keys, *more: str) -> list[str]:
    return ["verify", str(path), "--key", str(keys.public), *more]


def test_the_commands(tmp_path: Path) -> None:
    path, keys = tmp_path / "1", Keys(tmp_path / "keys", CURVES["P-384"], b"pass")
    write_tiny(path)
    (tmp_path / "password").write_text("pass\n")
    unsigned = CliRunner().invoke(cli, _verify(path, keys))
    assert (unsigned.exit_code, "is not signed" in unsigned.stderr) == (1, True)
    sign = ["sign", str(path), "--key", str(keys.private)]
    sign += ["--password-file", str(tmp_path / "password")]
    done = CliRunner().invoke(cli, sign)
    assert done.output == f"{path} is signed: {path / SIGNATURE}\n"
    done = CliRunner().invoke(cli, _verify(path, keys))
    expected = f"{path} is a good bundle, signed by {keys.public}: 12 classes in 3 experts.\n"
    assert done.output == expected
    done = CliRunner().invoke(cli, _verify(path, keys, "--json"))
    assert json.loads(done.stdout)["signed"] is True
    flip(path / "labels.txt")
    done = CliRunner().invoke(cli, _verify(path, keys))
    assert (done.exit_code, "labels.txt altered" in done.stderr) == (1, True)


def test_only_a_good_bundle_is_signed(tmp_path: Path, keys: Keys) -> None:
    path = tmp_path / "1"
    write_tiny(path)
    flip(path / "gate.onnx")
    done = CliRunner().invoke(cli, ["sign", str(path), "--key", str(keys.private)])
    assert done.exit_code == 1 and not (path / SIGNATURE).exists()
