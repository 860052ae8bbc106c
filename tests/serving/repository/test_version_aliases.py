"""How version aliases follow labels.json, and requests to set and remove them."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.model_manager import Kept
from helpers.tiny_bundle import write_tiny

from service.repository.catalog import ModelNotFound, VersionNotFound
from service.repository.version_labels import LabelNotFound, LabelNotMoved


def point(folder: Path, **labels: int) -> None:
    (folder / "tiny" / "labels.json").write_text(json.dumps(labels))


@pytest.fixture
def three(folder: Path, kept: Callable[..., Kept]) -> Kept:
    """Versions 1 to 3, of which 1 is loaded only for its label."""
    for version in (1, 2, 3):
        write_tiny(folder / "tiny" / str(version), seed=version)
    point(folder, stable=1)
    return kept().load()


def test_a_labelled_version_is_loaded_however_old(three: Kept) -> None:
    assert list(three.entry("tiny").versions) == [3, 2, 1]
    assert three.get("tiny", "stable").version == 1
    assert three.get("tiny").version == three.get("tiny", "default").version == 3
    assert three.series("dss_model_label_version") == [
        'dss_model_label_version{label="stable",model="tiny"} 1.0'
    ]


def test_a_label_follows_its_file(three: Kept, folder: Path) -> None:
    point(folder, stable=2, default=2)
    asyncio.run(three.look())
    assert three.get("tiny", "stable").version == three.get("tiny").version == 2
    assert list(three.entry("tiny").versions) == [3, 2]
    point(folder, stable=1)
    asyncio.run(three.look())
    assert three.get("tiny", "stable").version == 1
    (folder / "tiny" / "labels.json").unlink()
    asyncio.run(three.look())
    with pytest.raises(VersionNotFound):
        three.get("tiny", "stable")
    assert not three.series("dss_model_label_version{")


@pytest.mark.parametrize("target", [7, 4])
def test_a_label_does_not_move_to_what_cannot_be_served(
    three: Kept, folder: Path, target: int, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny(folder / "tiny" / "4", seed=4)
    (folder / "tiny" / "4" / "gate.onnx").write_bytes(b"")
    point(folder, stable=target, canary=target)
    for _ in range(2):
        asyncio.run(three.look())
    assert three.get("tiny", "stable").version == 1
    assert f"Version {target}" in three.entry("tiny").alias_problems["stable"]
    assert len([one for one in caplog.records if "Label stable" in one.message]) == 1
    with pytest.raises(VersionNotFound, match="'canary' of model 'tiny' points at no loaded"):
        three.get("tiny", "canary")


def test_a_label_moves_when_its_version_comes(three: Kept, folder: Path) -> None:
    point(folder, stable=4)
    asyncio.run(three.look())
    assert three.get("tiny", "stable").version == 1
    write_tiny(folder / "tiny" / "4", seed=4)
    asyncio.run(three.look())
    assert three.get("tiny", "stable").version == 4
    assert not three.entry("tiny").alias_problems


def test_a_wrong_file_moves_nothing(three: Kept, folder: Path) -> None:
    (folder / "tiny" / "labels.json").write_text('{"stable": 2, ')
    asyncio.run(three.look())
    assert three.get("tiny", "stable").version == 1
    assert "not JSON" in three.entry("tiny").alias_problems["labels.json"]


def test_a_labelled_version_goes_on_without_its_folder(three: Kept, folder: Path) -> None:
    shutil.rmtree(folder / "tiny" / "1")
    asyncio.run(three.look())
    assert three.get("tiny", "stable").version == 1
    assert three.entry("tiny").gone == {1}


def test_labels_are_set_and_removed(three: Kept, folder: Path) -> None:
    asyncio.run(three.keeper.set_alias("tiny", "canary", 3))
    assert three.get("tiny", "canary").version == 3
    assert json.loads((folder / "tiny" / "labels.json").read_text()) == {"canary": 3, "stable": 1}
    asyncio.run(three.keeper.remove_alias("tiny", "stable"))
    assert list(three.entry("tiny").versions) == [3, 2]
    with pytest.raises(LabelNotFound):
        asyncio.run(three.keeper.remove_alias("tiny", "stable"))
    asyncio.run(three.keeper.set_alias("tiny", "stable", 1))
    assert three.get("tiny", "stable").version == 1


def test_a_label_that_cannot_be_set_changes_nothing(three: Kept, folder: Path) -> None:
    write_tiny(folder / "tiny" / "4", seed=4)
    (folder / "tiny" / "4" / "gate.onnx").write_bytes(b"")
    before = (folder / "tiny" / "labels.json").read_bytes()
    for label, version, why in [
        ("stable", 4, "gate.onnx"),
        ("stable", 9, "no such version"),
        ("Not-A-Label", 1, "cannot be a label"),
    ]:
        with pytest.raises(LabelNotMoved, match=why):
            asyncio.run(three.keeper.set_alias("tiny", label, version))
    with pytest.raises(ModelNotFound):
        asyncio.run(three.keeper.set_alias("nobody", "stable", 1))
    assert three.get("tiny", "stable").version == 1
    assert (folder / "tiny" / "labels.json").read_bytes() == before


def test_a_label_that_cannot_be_written_is_not_moved(
    three: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "replace", read_only)
    with pytest.raises(LabelNotMoved, match="Read-only file system"):
        asyncio.run(three.keeper.set_alias("tiny", "stable", 3))
    assert three.get("tiny", "stable").version == 1


def test_a_failed_label_does_not_hide_a_version_that_came_meanwhile(
    three: Kept, folder: Path
) -> None:
    write_tiny(folder / "tiny" / "4", seed=4)
    with pytest.raises(LabelNotMoved):
        asyncio.run(three.keeper.set_alias("tiny", "stable", 9))
    assert three.get("tiny").version == 3
    asyncio.run(three.look())
    assert three.get("tiny").version == 4
