from pathlib import Path

import pytest

from service.errors import NotStarted
from service.shared_state import folder as shared_folder


def test_counts_are_in_memory_unless_somewhere_is_asked_for(tmp_path: Path) -> None:
    with shared_folder.temporary(None) as folder:
        assert folder.parent == Path("/dev/shm")  # noqa: S108
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
    with shared_folder.temporary(tmp_path) as folder:
        assert folder.parent == tmp_path
    assert not folder.exists()


def test_without_memory_they_are_among_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folder, "MEMORY", tmp_path / "missing")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with shared_folder.temporary(None) as folder:
        assert folder.parent == tmp_path


def test_where_nothing_can_be_written_is_one_sentence(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(NotStarted) as refusal, shared_folder.temporary(missing):
        pass
    assert str(refusal.value) == (
        f"Workers cannot keep their counts in {missing} (No such file or directory)."
    )


def test_where_there_is_no_room_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        del descriptor, offset, length
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(NotStarted) as refusal, shared_folder.temporary(None):
        pass
    assert str(refusal.value) == (
        "Workers cannot keep their counts in /dev/shm (No space left on device) nor in "
        f"{tmp_path} (No space left on device)."
    )
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_supervisor_left_goes_and_nothing_else(tmp_path: Path) -> None:
    left, unlocked, file = tmp_path / "dss-left", tmp_path / "dss-unlocked", tmp_path / "dss-file"
    for folder in left, unlocked:
        folder.mkdir()
    (left / "lock").touch()
    (left / "0-1.counters").touch()
    file.touch()
    with shared_folder.temporary(tmp_path) as one, shared_folder.temporary(tmp_path) as other:
        assert set(tmp_path.iterdir()) == {one, other, unlocked, file}
