import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.model_manager import Kept
from helpers.tiny_bundle import write_tiny

from service.engine import Engine
from service.errors import ModelsFolderMissing
from service.repository.catalog import Loading, ModelNotFound, VersionNotFound
from service.repository.folder import scan


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def loaded(models: Path) -> Iterator[Kept]:
    """The shared folder: tiny with versions 1, 2 and a refused 3, and plain with version 1."""
    found = Kept(models).load()
    yield found
    found.close()


def test_nothing_is_served_while_loading(models: Path) -> None:
    fresh = Kept(models)
    assert not fresh.repository.loaded
    with pytest.raises(Loading):
        fresh.get("tiny")


def test_all_good_versions_are_loaded_and_the_newest_answers(loaded: Kept) -> None:
    assert loaded.get("tiny").version == 2
    assert loaded.get("tiny", "1").version == 1
    assert list(loaded.entry("tiny").versions) == [2, 1]


def test_a_bad_bundle_is_refused_with_its_reason(
    models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = Kept(models)
    with caplog.at_level(logging.ERROR):
        found.load()
    found.close()
    reason = found.entry("tiny").refused[3]
    assert "labels.txt" in reason
    assert f"Refused tiny/3: {reason}" in caplog.messages
    with pytest.raises(VersionNotFound, match="was refused"):
        found.get("tiny", "3")


def test_a_bundle_the_engine_cannot_open_is_refused_without_its_trace(folder: Path) -> None:
    write_tiny(folder / "tiny" / "1")

    def explode(*_: object) -> Engine:
        raise RuntimeError("secret")

    found = Kept(folder, engine_factory=explode).load()
    assert "secret" not in found.entry("tiny").refused[1]
    with pytest.raises(ModelNotFound, match="No version of model 'tiny' could be loaded"):
        found.get("tiny")


def test_the_default_is_the_first_name_that_has_a_good_version(folder: Path) -> None:
    write_tiny(folder / "a" / "1")
    (folder / "a" / "1" / "gate.onnx").write_bytes(b"")
    write_tiny(folder / "b" / "1")
    write_tiny(folder / "c" / "1")
    found = Kept(folder).load()
    assert found.get().name == "b"
    found.close()


def test_the_default_can_be_configured(models: Path) -> None:
    found = Kept(models, "tiny").load()
    assert found.get().name == "tiny"
    found.close()


def test_an_empty_folder_has_no_default(folder: Path) -> None:
    folder.mkdir()
    found = Kept(folder).load()
    with pytest.raises(ModelNotFound, match="No model is loaded"):
        found.get()


def test_a_missing_folder_is_named(folder: Path) -> None:
    with pytest.raises(ModelsFolderMissing):
        scan(folder)


@pytest.mark.parametrize(
    "name", ["", "..", ".", "tiny/1", "../tiny", "Tiny", "tiny\x00", "x" * 9999]
)
def test_tricky_names_are_not_found(loaded: Kept, name: str) -> None:
    with pytest.raises(ModelNotFound) as failure:
        loaded.get(name)
    assert len(str(failure.value)) < 300


@pytest.mark.parametrize("version", ["0", "01", "-1", "+1", "1.0", "one", "", "٢", "9" * 9999, "7"])
def test_tricky_versions_are_not_found(loaded: Kept, version: str) -> None:
    with pytest.raises(VersionNotFound) as failure:
        loaded.get("tiny", version)
    assert len(str(failure.value)) < 300


def test_only_numbered_folders_with_a_manifest_are_models(folder: Path) -> None:
    for name in ("good/1", "good/10", "good/9", "good/01", "good/x", "good/.2.tmp", ".hidden/1"):
        (folder / name).mkdir(parents=True)
        (folder / name / "manifest.json").touch()
    for name in ("good/3", "unfinished/1", "-dash/1", "sp ace/1"):
        (folder / name).mkdir(parents=True)
    (folder / "FORMAT.md").touch()
    found = scan(folder)
    assert {name: list(model.versions) for name, model in found.items()} == {"good": [10, 9, 1]}
