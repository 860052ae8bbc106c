from pathlib import Path

import pytest

from service import settings


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DSS_PORT", "DSS_HOST", "DSS_LIMITS__MAX_ROWS", "DSS_LIMITS__MAX_K"):
        monkeypatch.delenv(name, raising=False)


def config(folder: Path, text: str) -> Path:
    path = folder / "dss.toml"
    path.write_text(text)
    return path


def test_defaults() -> None:
    loaded = settings.load()
    assert loaded.limits.max_body_bytes == 8 * 2**20
    assert (loaded.limits.max_rows, loaded.limits.max_k) == (4096, 1000)
    assert (loaded.host, loaded.port, loaded.models) == ("127.0.0.1", 8000, Path("models"))
    assert loaded.default_model is None
    assert loaded.workers == 1


def test_a_flag_beats_the_environment_beats_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config(tmp_path, 'port = 1\nhost = "file"\nlog_level = "error"\n')
    monkeypatch.setenv("DSS_PORT", "2")
    monkeypatch.setenv("DSS_HOST", "environment")
    loaded = settings.load({"port": 3}, path)
    assert (loaded.port, loaded.host, loaded.log_level) == (3, "environment", "error")


def test_nested_settings_merge_key_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = config(tmp_path, "[limits]\nmax_rows = 5\nmax_k = 6\n")
    monkeypatch.setenv("DSS_LIMITS__MAX_ROWS", "7")
    limits = settings.load({}, path).limits
    assert (limits.max_rows, limits.max_k, limits.max_body_bytes) == (7, 6, 8 * 2**20)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("colour = 1", "There is no setting 'colour'."),
        ("[limits]\nmax_cows = 1", "There is no setting 'limits.max_cows'."),
        ('port = "a"', "The setting 'port' is wrong"),
        ("port = 70000", "The setting 'port' is wrong"),
        ("workers = 0", "The setting 'workers' is wrong"),
        ("[limits]\nmax_rows = 0", "The setting 'limits.max_rows' is wrong"),
        ("[queue]\nmax_rows = 1", "queue.max_rows must not be smaller than limits.max_rows"),
        ("port =", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(settings.SettingsError) as failure:
        settings.load({}, config(tmp_path, text))
    assert sentence in str(failure.value)
    assert "\n" not in str(failure.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(settings.SettingsError, match="cannot be read"):
        settings.load({}, tmp_path / "none.toml")


def test_a_malformed_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSS_LIMITS", "{")
    with pytest.raises(settings.SettingsError):
        settings.load()


def test_an_unknown_nested_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSS_LIMITS__MAX_COWS", "1")
    with pytest.raises(settings.SettingsError, match=r"limits\.max_cows"):
        settings.load()


def test_the_environment_is_not_read_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSS_PORT", "1234")
    assert settings.load().port == 1234


def test_settings_survive_the_way_to_a_worker(tmp_path: Path) -> None:
    path = config(tmp_path, "workers = 3\n[limits]\nmax_rows = 5\n")
    loaded = settings.load({"default_model": "tiny"}, path)
    assert settings.load(loaded.model_dump(mode="json")).model_dump() == loaded.model_dump()
