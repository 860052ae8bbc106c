"""How what is served follows the folder, its labels and what somebody says."""

import asyncio
import gc
import json
import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.model_manager import Kept
from helpers.tiny_bundle import write_tiny

from service.engine import Engine
from service.repository.catalog import ModelNotFound, VersionNotFound
from service.repository.manager import LoadFailed
from service.repository.version_labels import LabelNotFound, LabelNotMoved


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def kept(folder: Path) -> Iterator[Callable[..., Kept]]:
    """Makes them, and closes them at the end."""
    made: list[Kept] = []

    def make(default_model: str | None = None, keep_versions: int = 2) -> Kept:
        made.append(Kept(folder, default_model, keep_versions=keep_versions))
        return made[-1]

    yield make
    for one in made:
        one.close()


# --- following the folder --------------------------------------------------------------------


def test_the_newest_versions_are_kept_and_older_ones_are_not_loaded(
    folder: Path, kept: Callable[..., Kept]
) -> None:
    for version in (1, 2, 3):
        write_tiny(folder / "tiny" / str(version), seed=version)
    found = kept().load()
    assert list(found.entry("tiny").versions) == [3, 2]
    assert found.entry("tiny").idle == (1,)
    assert found.opened == [("tiny", 3), ("tiny", 2)]
    with pytest.raises(VersionNotFound, match="Version 1 of model 'tiny' is not loaded"):
        found.get("tiny", "1")
    assert list(kept(keep_versions=0).load().entry("tiny").versions) == [3, 2, 1]


def test_a_refused_version_does_not_take_a_good_ones_place(
    folder: Path, kept: Callable[..., Kept]
) -> None:
    for version in (1, 2, 3):
        write_tiny(folder / "tiny" / str(version), seed=version)
    (folder / "tiny" / "3" / "gate.onnx").write_bytes(b"")
    assert list(kept().load().entry("tiny").versions) == [2, 1]


def test_a_new_version_takes_over_and_the_oldest_is_let_go(
    folder: Path, kept: Callable[..., Kept]
) -> None:
    write_tiny(folder / "tiny" / "1", seed=1)
    write_tiny(folder / "tiny" / "2", seed=2)
    found = kept().load()

    async def follow() -> None:
        catalog = found.repository.catalog
        await found.look()
        assert found.repository.catalog is catalog, "nothing has changed"
        oldest = found.get("tiny", "1")
        write_tiny(folder / "tiny" / "3", seed=3)
        await found.look()
        assert list(found.entry("tiny").versions) == [3, 2]
        assert found.get("tiny").version == 3
        await found.settled()
        assert oldest.batcher._engine_thread.stopping

    asyncio.run(follow())
    assert not [line for line in found.series("dss_") if 'version="1"' in line]
    assert [line for line in found.series("dss_model_info") if 'version="3"' in line]
    assert found.series("dss_model_loads_total") == [
        'dss_model_loads_total{model="tiny",result="loaded"} 3.0'
    ]


def test_a_version_that_is_let_go_leaves_nothing_behind(
    folder: Path, kept: Callable[..., Kept]
) -> None:
    write_tiny(folder / "tiny" / "1", seed=1)
    found = kept(keep_versions=1).load()

    async def swap() -> "weakref.ref[object]":
        engine = weakref.ref(found.get("tiny").engine)
        write_tiny(folder / "tiny" / "2", seed=2)
        await found.look()
        await found.settled()
        return engine

    gc.disable()  # memory must not have to wait for it
    try:
        assert asyncio.run(swap())() is None
    finally:
        gc.enable()


def test_a_folder_without_a_manifest_is_not_looked_into(
    folder: Path, kept: Callable[..., Kept]
) -> None:
    write_tiny(folder / "tiny" / "1")
    write_tiny(folder / "tiny" / "2", seed=2)
    manifest = (folder / "tiny" / "2" / "manifest.json").rename(folder / "aside")
    found = kept().load()
    assert found.opened == [("tiny", 1)]
    manifest.rename(folder / "tiny" / "2" / "manifest.json")
    asyncio.run(found.look())
    assert found.get("tiny").version == 2


def test_a_refused_version_is_tried_again_when_its_files_change_and_only_then(
    folder: Path, kept: Callable[..., Kept]
) -> None:
    write_tiny(folder / "tiny" / "1")
    write_tiny(folder / "tiny" / "2", seed=2)
    labels = folder / "tiny" / "2" / "labels.txt"
    content = labels.read_bytes()
    labels.write_bytes(content[:-1])
    found = kept().load()
    assert found.get("tiny").version == 1
    assert found.series("dss_refused_bundles{") == [
        'dss_refused_bundles{model="tiny",version="2"} 1.0'
    ]
    asyncio.run(found.look())
    assert found.opened.count(("tiny", 2)) == 1
    labels.write_bytes(content)
    asyncio.run(found.look())
    assert found.get("tiny").version == 2
    assert not found.entry("tiny").refused
    assert not found.series("dss_refused_bundles{")


def test_a_bundle_replaced_under_its_number_is_loaded_anew(
    folder: Path, kept: Callable[..., Kept]
) -> None:
    write_tiny(folder / "tiny" / "1", seed=1)
    write_tiny(folder / "other" / "1", seed=2)
    found = kept().load()
    before = found.get("tiny")

    async def replace() -> None:
        shutil.rmtree(folder / "tiny" / "1")
        shutil.copytree(folder / "other" / "1", folder / "tiny" / "1")
        await found.look()
        await found.settled()

    asyncio.run(replace())
    after = found.get("tiny")
    assert after is not before
    assert after.manifest.checksum == found.get("other").manifest.checksum
    assert len([line for line in found.series("dss_model_info") if "tiny" in line]) == 1


def test_a_replacement_that_is_bad_changes_nothing(folder: Path, kept: Callable[..., Kept]) -> None:
    write_tiny(folder / "tiny" / "1")
    found = kept().load()
    before = found.get("tiny")
    (folder / "tiny" / "1" / "manifest.json").write_text("{}")
    asyncio.run(found.look())
    assert found.get("tiny") is before
    assert "not a JSON manifest" in found.entry("tiny").refused[1]


def test_a_manifest_that_is_only_touched_is_not_loaded_anew(
    folder: Path, kept: Callable[..., Kept]
) -> None:
    write_tiny(folder / "tiny" / "1")
    found = kept().load()
    before = found.get("tiny")
    (folder / "tiny" / "1" / "manifest.json").touch()
    asyncio.run(found.look())
    assert found.get("tiny") is before
    assert found.opened == [("tiny", 1)]


def test_a_removed_version_goes_but_a_model_is_not_lost(
    folder: Path, kept: Callable[..., Kept], caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny(folder / "tiny" / "1")
    write_tiny(folder / "tiny" / "2", seed=2)
    found = kept().load()
    shutil.rmtree(folder / "tiny" / "2")
    asyncio.run(found.look())
    assert list(found.entry("tiny").versions) == [1]
    shutil.rmtree(folder / "tiny")
    for _ in range(2):
        asyncio.run(found.look())
    assert found.get("tiny").version == 1
    assert found.entry("tiny").gone == {1}
    assert [record.message for record in caplog.records].count(
        "The folder of model tiny is gone; its loaded versions keep serving."
    ) == 1
    write_tiny(folder / "tiny" / "3", seed=3)
    asyncio.run(found.look())
    assert list(found.entry("tiny").versions) == [3]


def test_everything_goes_on_while_the_whole_folder_is_missing(
    folder: Path, kept: Callable[..., Kept], caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny(folder / "tiny" / "1")
    found = kept().load()
    aside = folder.rename(folder.with_name("aside"))
    for _ in range(2):
        asyncio.run(found.look())
    assert found.get("tiny").version == 1
    assert len(
        [record for record in caplog.records if "The loaded models keep serving" in record.message]
    )
    aside.rename(folder)
    write_tiny(folder / "tiny" / "2", seed=2)
    asyncio.run(found.look())
    assert found.get("tiny").version == 2


# --- labels ----------------------------------------------------------------------------------


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


# --- loading and unloading by name -----------------------------------------------------------


def test_what_is_unloaded_stays_so_until_it_is_loaded(
    folder: Path, kept: Callable[..., Kept]
) -> None:
    write_tiny(folder / "tiny" / "1")
    write_tiny(folder / "tiny" / "2", seed=2)
    found = kept().load()
    asyncio.run(found.keeper.unload_model("tiny"))
    with pytest.raises(ModelNotFound, match="unloaded"):
        found.get("tiny")
    write_tiny(folder / "tiny" / "3", seed=3)
    asyncio.run(found.look())
    assert found.entry("tiny").idle == (3, 2, 1)
    with pytest.raises(LabelNotMoved, match="unloaded"):
        asyncio.run(found.keeper.set_alias("tiny", "stable", 1))
    asyncio.run(found.keeper.load_model("tiny"))
    assert found.get("tiny").version == 3


def test_loading_says_why_the_newest_version_is_refused(
    folder: Path, kept: Callable[..., Kept]
) -> None:
    write_tiny(folder / "tiny" / "1")
    found = kept().load()
    asyncio.run(found.keeper.load_model("tiny"))
    write_tiny(folder / "tiny" / "2", seed=2)
    (folder / "tiny" / "2" / "gate.onnx").write_bytes(b"")
    for _ in range(2):  # a refusal is forgotten each time
        with pytest.raises(LoadFailed, match=r"Version 2 .* gate.onnx .* Version 1 goes on"):
            asyncio.run(found.keeper.load_model("tiny"))
    assert found.opened.count(("tiny", 2)) == 2
    for ask in (found.keeper.load_model, found.keeper.unload_model):
        with pytest.raises(ModelNotFound):
            asyncio.run(ask("nobody"))


# --- what is not the bundle's fault ----------------------------------------------------------


def test_what_the_system_refuses_is_tried_again_and_logged_once(
    folder: Path,
    kept: Callable[..., Kept],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_tiny(folder / "tiny" / "1")
    write_tiny(folder / "tiny" / "2", seed=2)

    def full(*_: object) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", full)
        found = kept().load()
        for _ in range(2):
            asyncio.run(found.look())
        assert found.entry("tiny").refused[2] == "The bundle cannot be read: Too many open files."
    assert found.opened.count(("tiny", 2)) == 3
    assert len([one for one in caplog.records if "Refused tiny/2" in one.message]) == 1
    asyncio.run(found.look())
    assert found.get("tiny").version == 2


def test_a_version_that_is_being_loaded_is_listed(folder: Path) -> None:
    write_tiny(folder / "tiny" / "1")
    write_tiny(folder / "tiny" / "2", seed=2)
    seen: list[list[int]] = []

    def slow(*arguments: object) -> Engine:
        if found.repository.loaded:
            seen.append(found.repository.listed(found.entry("tiny")))
        return Engine(*arguments)  # type: ignore[arg-type]

    found = Kept(folder, engine_factory=slow)  # type: ignore[arg-type]
    found.load()
    write_tiny(folder / "tiny" / "3", seed=3)
    asyncio.run(found.look())
    assert seen == [[3, 2, 1]]
    found.close()


def test_a_failed_label_does_not_hide_a_version_that_came_meanwhile(
    three: Kept, folder: Path
) -> None:
    write_tiny(folder / "tiny" / "4", seed=4)
    with pytest.raises(LabelNotMoved):
        asyncio.run(three.keeper.set_alias("tiny", "stable", 9))
    assert three.get("tiny").version == 3
    asyncio.run(three.look())
    assert three.get("tiny").version == 4
