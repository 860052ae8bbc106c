"""What becomes of a file after it was read changes nothing; workers share what they have read."""

import gc
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny_bundle import write_tiny

from service import bundle
from service.bundle import snapshots
from service.bundle.snapshots import SharedSnapshots, Snapshot, private_copy
from service.engine import Engine
from service.errors import ChecksumWrong, FileSizeWrong, FileUnreadable

CONTENT = bytes(range(256)) * 400
SHA256 = hashlib.sha256(CONTENT).hexdigest()

# Maps what others show, says under which inode, and holds it until it is told to end.
HOLDER = """
import sys
from pathlib import Path
from service.bundle.snapshots import SharedSnapshots
file, size, sha256, folder = sys.argv[1:]
held = SharedSnapshots(Path(folder))(Path(file), int(size), sha256)
maps = Path("/proc/self/maps").read_text().splitlines()
print({line.split()[4] for line in maps if "memfd:" in line}.pop(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "numbers.bin"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture(params=["private", "shared"])
def snapshot(request: pytest.FixtureRequest, tmp_path: Path) -> Snapshot:
    return private_copy if request.param == "private" else SharedSnapshots(tmp_path / "shared")


def descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def inodes() -> set[str]:
    """Of the copies of this file's name that are mapped; a bundle's are called otherwise."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in maps if "memfd:numbers.bin" in line}


@contextmanager
def holder(file: Path, folder: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Another process that has the file's bytes, and the inode under which it has them."""
    command = [sys.executable, "-c", HOLDER, str(file), str(len(CONTENT)), SHA256, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()
            process.wait()


def test_nothing_that_happens_to_the_file_is_seen(file: Path, snapshot: Snapshot) -> None:
    before = descriptors()
    held = snapshot(file, len(CONTENT), SHA256)
    with file.open("r+b") as stream:
        stream.write(b"overwritten")
    os.truncate(file, 0)
    assert held == CONTENT
    file.unlink()
    assert held == CONTENT
    assert held.readonly
    del held
    assert descriptors() == before
    assert not inodes()


def test_nobody_can_change_it(file: Path, snapshot: Snapshot) -> None:
    held = snapshot(file, len(CONTENT), SHA256)
    ours = [
        link
        for link in Path("/proc/self/fd").iterdir()
        if link.is_symlink() and "memfd:numbers.bin" in str(link.readlink())
    ]
    assert ours
    for link in ours:
        with pytest.raises(PermissionError):
            os.truncate(int(link.name), 1)
        with pytest.raises(PermissionError):
            os.write(int(link.name), b"x")
    assert held == CONTENT


def test_what_is_wrong_is_named_and_leaves_nothing(
    file: Path, snapshot: Snapshot, tmp_path: Path
) -> None:
    before = descriptors()
    with pytest.raises(ChecksumWrong, match=r"numbers\.bin does not match"):
        snapshot(file, len(CONTENT), "0" * 64)
    with pytest.raises(FileSizeWrong, match="shorter"):
        snapshot(file, len(CONTENT) + 1, SHA256)
    with pytest.raises(FileUnreadable, match="No such file"):
        snapshot(tmp_path / "gone.bin", 5, SHA256)
    assert descriptors() == before
    assert not inodes()
    assert not list(tmp_path.glob(f"shared/{SHA256}.*"))


def test_an_empty_file_is_empty(tmp_path: Path, snapshot: Snapshot) -> None:
    (tmp_path / "empty").touch()
    assert snapshot(tmp_path / "empty", 0, hashlib.sha256().hexdigest()) == b""


def test_workers_map_one_copy(file: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    held = SharedSnapshots(shared)(file, len(CONTENT), SHA256)
    file.unlink()  # so the other cannot have read it
    with holder(file, shared) as (first, inode):
        assert inodes() == {inode}
        # The one that made the copy lets it go; a third finds it with the second.
        del held
        gc.collect()
        assert not inodes()
        with holder(file, shared) as (_, third):
            assert third == inode
            first.send_signal(signal.SIGKILL)
            first.wait()
            again = SharedSnapshots(shared)(file, len(CONTENT), SHA256)
            assert inodes() == {inode}
            assert again == CONTENT


def test_a_copy_that_nobody_has_any_more_is_made_anew(file: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with holder(file, shared) as (process, _):
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(list(shared.glob(f"{SHA256}.*"))) == 1
    held = SharedSnapshots(shared)(file, len(CONTENT), SHA256)
    assert held == CONTENT
    (shown,) = shared.glob(f"{SHA256}.*")
    assert shown.name.split(".")[1] == str(os.getpid())
    del held
    gc.collect()
    assert not list(shared.glob(f"{SHA256}.*"))


def test_what_is_shown_is_not_believed(file: Path, tmp_path: Path) -> None:
    """A process's number may be another one's by now."""
    shared = tmp_path / "shared"
    shared.mkdir()
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.truncate(unsealed, len(CONTENT))
    ours, theirs = os.pipe()
    with file.open("rb") as plain:
        for descriptor in (unsealed, ours, plain.fileno(), 99_999):
            (shared / f"{SHA256}.{os.getpid()}.{descriptor}").touch()
        (shared / f"{SHA256}.nonsense").touch()
        assert SharedSnapshots(shared)(file, len(CONTENT), SHA256) == CONTENT
    for descriptor in (unsealed, ours, theirs):
        os.close(descriptor)


def test_a_folder_without_room_is_not_needed(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    made = SharedSnapshots(tmp_path / "shared")
    monkeypatch.setattr(Path, "touch", full)
    assert made(file, len(CONTENT), SHA256) == CONTENT


def test_a_bundle_answers_the_same_whatever_becomes_of_its_files(tmp_path: Path) -> None:
    made = write_tiny(tmp_path / "1")
    engine = Engine(bundle.read(tmp_path / "1"))
    hidden = np.eye(4, dtype=np.float32)
    before = engine.topk(hidden, 5)
    for name in made.manifest.files:
        os.truncate(tmp_path / "1" / name, 0)
    after = engine.topk(hidden, 5)
    assert np.array_equal(before.log_probs, after.log_probs)


def test_nothing_is_copied_for_a_bundle_that_is_wrong_in_small_things(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path / "1")
    (tmp_path / "1" / "gate.onnx").write_bytes(b"")
    monkeypatch.setattr(snapshots, "_copied", None)
    with pytest.raises(FileSizeWrong):
        bundle.read(tmp_path / "1")
