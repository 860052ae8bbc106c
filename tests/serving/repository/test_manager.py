"""How what is served follows the models folder, and requests to load and unload."""

import asyncio
import gc
import os
import shutil
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from helpers.altered_bundle import rewrite_manifest
from helpers.model_manager import Kept
from helpers.tiny_bundle import write_tiny

from service.engine import Engine
from service.repository.catalog import Entry, ModelNotFound, VersionNotFound
from service.repository.manager import LoadFailed
from service.repository.model import Model
from service.repository.version_labels import LabelNotMoved

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


def test_the_reason_of_a_refusal_has_a_length_limit(
    folder: Path, kept: Callable[..., Kept]
) -> None:
    write_tiny(folder / "tiny" / "1")
    write_tiny(folder / "tiny" / "2")
    rewrite_manifest(
        folder / "tiny" / "2",
        lambda fields: fields["files"].update(
            {"\U000e0000" * 900: {"sha256": "1" * 64, "bytes": 1}}
        ),
    )
    reason = kept().load().entry("tiny").refused[2]
    assert len(reason) == 500 and reason.endswith("…")


def test_refused_versions_are_listed_at_every_moment(
    folder: Path, kept: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the refusal and the switch that shows it they still count as being loaded."""
    write_tiny(folder / "tiny" / "1")
    found = kept().load()
    for version in (2, 3):
        (write_tiny(folder / "tiny" / str(version)).path / "gate.onnx").write_bytes(b"")
    repository, switch, listed = found.repository, found.repository.switch, []

    def listing_switch(entries: Mapping[str, Entry | None]) -> list[Model]:
        listed.append(repository.listed(found.entry("tiny")))
        return switch(entries)

    monkeypatch.setattr(repository, "switch", listing_switch)
    asyncio.run(found.look())
    assert listed == [[3, 2, 1]]
    assert list(found.entry("tiny").refused) == [3, 2]
    assert not repository.loading


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
        assert oldest.batcher._short.stopping

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
