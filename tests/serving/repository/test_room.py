"""Versions that need more memory than is left are refused, and loaded once there is room."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.large_bundle import write_wide
from helpers.model_manager import Kept
from helpers.tiny_bundle import write_tiny

from service.bundle.manifest import read_manifest
from service.errors import NoRoom
from service.repository import room as rooms
from service.repository.load_memory import LoadBytes, load_bytes
from service.repository.room import LocalRoom, SharedRoom

MB = 10**6
NEEDED = LoadBytes(shared=100 * MB, private=20 * MB)


class Machine:
    """As much memory as a test says."""

    def __init__(self, left: int) -> None:
        self.left: int | None = left

    def bytes_left(self) -> int | None:
        return self.left


# --- one process ------------------------------------------------------------------------------


@pytest.fixture
def machine() -> Machine:
    return Machine(10**12)


@pytest.fixture
def kept(tmp_path: Path, machine: Machine) -> Iterator[Kept]:
    write_tiny(tmp_path / "models" / "tiny" / "1")
    found = Kept(tmp_path / "models", room=LocalRoom(machine.bytes_left)).load()
    yield found
    found.close()


def needs(path: Path) -> int:
    return load_bytes(read_manifest(path), "auto", head=False).of(1)


def test_a_version_too_large_is_refused_with_both_numbers_and_the_old_one_serves(
    tmp_path: Path, kept: Kept, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = needs(write_wide(tmp_path / "models" / "tiny" / "2", seed=1, width=4, classes=12))
    monkeypatch.setattr("service.bundle.read", lambda *_, **__: pytest.fail("it was read"))
    machine.left = needed - 1
    asyncio.run(kept.look())
    entry = kept.entry("tiny")
    assert entry.refused == {2: "Loading it needs 28 MB, and 27 MB are left."}
    assert kept.get("tiny").version == 1


def test_it_is_loaded_once_there_is_room(
    tmp_path: Path, kept: Kept, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    needed = needs(write_wide(tmp_path / "models" / "tiny" / "2", seed=1, width=4, classes=12))
    with caplog.at_level(logging.ERROR):
        for left in (5 * MB, 6 * MB, 7 * MB):  # what is left changes all the time
            machine.left = left
            asyncio.run(kept.look())
    assert kept.entry("tiny").refused == {2: "Loading it needs 28 MB, and 5 MB are left."}
    assert [record.message for record in caplog.records] == [
        "Refused tiny/2: Loading it needs 28 MB, and 5 MB are left."
    ]
    machine.left = needed
    asyncio.run(kept.look())
    assert kept.get("tiny").version == 2 and not kept.entry("tiny").refused


def test_a_server_starts_with_the_version_that_fits(tmp_path: Path) -> None:
    models = tmp_path / "models"
    small = needs(write_tiny(models / "both" / "1").path)
    large = needs(write_wide(models / "both" / "2", seed=1))
    assert large > small + MB
    found = Kept(models, room=LocalRoom(lambda: large - 1)).load()
    assert found.get("both").version == 1
    assert list(found.entry("both").refused) == [2]
    found.close()


def test_a_system_that_does_not_tell_admits(kept: Kept, machine: Machine) -> None:
    machine.left = None
    LocalRoom(machine.bytes_left).admit("1" * 64, NEEDED)
    assert kept.get("tiny").version == 1


def test_large_numbers_are_gigabytes() -> None:
    with pytest.raises(NoRoom, match=r"^Loading it needs 3\.2 GB, and 1\.1 GB are left\.$"):
        rooms.check_room(3_200_000_000, 1, 1_100_000_000)


# --- several workers --------------------------------------------------------------------------


class Workers:
    """Processes of one server that ask one after the other."""

    def __init__(self, folder: Path, workers: int, patch: pytest.MonkeyPatch) -> None:
        self.machine = Machine(0)
        self.alive = {1, 2, 3, 4}
        self._patch = patch
        self._room = SharedRoom(folder, workers, self.machine.bytes_left)
        patch.setattr(rooms, "_is_alive", lambda process: process in self.alive)

    def admit(self, process: int, needed: LoadBytes = NEEDED, checksum: str = "a") -> None:
        self._patch.setattr(rooms.os, "getpid", lambda: process)
        self._room.admit(checksum, needed)

    def finish(self, process: int, checksum: str = "a") -> None:
        self._patch.setattr(rooms.os, "getpid", lambda: process)
        self._room.finished(checksum)


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workers:
    return Workers(tmp_path, 2, monkeypatch)


def test_what_all_workers_need_is_counted(two: Workers) -> None:
    two.machine.left = 139 * MB
    with pytest.raises(NoRoom, match="needs 140 MB in 2 workers, and 139 MB are left"):
        two.admit(1)
    two.machine.left = 140 * MB
    two.admit(1)


def test_the_first_that_asks_is_answered_for_all(two: Workers) -> None:
    """The others come when it has taken its part."""
    two.machine.left = 140 * MB
    two.admit(1)
    two.machine.left = 20 * MB
    two.admit(2)
    two.finish(1)
    two.finish(2)


def test_a_worker_that_replaces_another_asks_anew_for_itself(two: Workers) -> None:
    two.machine.left = 140 * MB
    for worker in (1, 2):
        two.admit(worker)
        two.finish(worker)
    two.alive.discard(2)
    two.machine.left = 19 * MB
    with pytest.raises(NoRoom, match="needs 20 MB, and 19 MB are left"):
        two.admit(3)
    two.machine.left = 20 * MB
    two.admit(3)


def test_what_others_were_promised_is_not_left(two: Workers) -> None:
    """The first worker is ahead: the second has yet to load the model before."""
    two.machine.left = 140 * MB
    two.admit(1)
    two.finish(1)
    two.machine.left = 20 * MB
    small = LoadBytes(shared=0, private=5 * MB)
    with pytest.raises(NoRoom, match="needs 10 MB in 2 workers, and 0 MB are left"):
        two.admit(1, small, "b")
    two.admit(2)
    two.finish(2)
    two.machine.left = 10 * MB
    two.admit(1, small, "b")


def test_a_promise_that_nobody_takes_up_ends(two: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "time", lambda: 1000.0)
    two.machine.left = 140 * MB
    two.admit(1)
    two.finish(1)
    monkeypatch.setattr(rooms, "time", lambda: 1000.0 + rooms.RESERVED_SECONDS)
    two.machine.left = 10 * MB
    two.admit(1, LoadBytes(shared=0, private=5 * MB), "b")


def test_a_killed_worker_leaves_no_promise(two: Workers) -> None:
    two.machine.left = 140 * MB
    two.admit(1)
    two.admit(2)
    two.alive -= {1, 2}
    two.admit(3)
    two.admit(4)


def test_a_version_that_is_loaded_again_asks_again(two: Workers) -> None:
    two.machine.left = 140 * MB
    for worker in (1, 2):
        two.admit(worker)
        two.finish(worker)
    two.machine.left = 0
    with pytest.raises(NoRoom):
        two.admit(1)


def test_a_refusal_promises_nothing(two: Workers) -> None:
    for left in (0, 100 * MB):
        two.machine.left = left
        for worker in (1, 2):
            with pytest.raises(NoRoom):
                two.admit(worker)
    two.machine.left = 140 * MB
    two.admit(2)
    two.admit(1)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then each worker counts for all."""
    gone = Workers(tmp_path / "gone", 2, monkeypatch)
    gone.machine.left = 140 * MB
    gone.admit(1)
    gone.finish(1)
    gone.machine.left = 139 * MB
    with pytest.raises(NoRoom):
        gone.admit(2)
