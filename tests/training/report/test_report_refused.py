"""Folders that no report can be made of."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.training.report_runs import (
    COMMAND,
    tiny_layer,
    tiny_results,
    write_language_model,
    write_layer,
)

from service.cli import main
from service.errors import DSSError
from trainer.data import run_folder
from trainer.data.files import write_json
from trainer.report import report
from trainer.report import runs as report_data


def no_run(folder: Path) -> None:
    (folder / "config.json").unlink()


def unknown_task(folder: Path) -> None:
    write_json(folder / "config.json", {"task": "chess"})


def no_results(folder: Path) -> None:
    (folder / "results.json").unlink()


def no_vocabulary(folder: Path) -> None:
    (folder / "hidden" / "labels.txt").unlink()


def no_layer(folder: Path) -> None:
    (folder / "layers" / "kept" / "layer.npz").unlink()


def broken_layer(folder: Path) -> None:
    (folder / "layers" / "kept" / "layer.npz").write_bytes(b"PK\x03\x04 no more")


def broken_json(folder: Path) -> None:
    (folder / "results.json").write_text("{")


def no_rank(folder: Path) -> None:
    results = tiny_results()
    del results["comparison"]["points"][2]["accuracy"]["5"]
    write_json(folder / "results.json", results)


def unlisted_layer(folder: Path) -> None:
    results = tiny_results()
    del results["layers"]["free"]
    write_json(folder / "results.json", results)


@pytest.mark.parametrize(
    ("spoil", "failure"),
    [
        (no_run, report_data.NotARun),
        (unknown_task, report_data.NotARun),
        (no_results, run_folder.RunUnfinished),
        (no_vocabulary, run_folder.RunUnfinished),
        (no_layer, run_folder.RunUnfinished),
        (broken_layer, report_data.RunUnreadable),
        (broken_json, report_data.RunUnreadable),
        (no_rank, report_data.ResultsMalformed),
        (unlisted_layer, report_data.ResultsMalformed),
    ],
)
def test_a_folder_that_cannot_be_reported_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None], failure: type[DSSError]
) -> None:
    good = write_layer(tmp_path / "good", tiny_layer(), [1.0, 0.0, 0.0])
    bad = write_language_model(tmp_path / "bad")
    spoil(bad)
    result = CliRunner().invoke(
        main.cli, ["report", str(good), str(bad), "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 1
    assert re.fullmatch(r"Error: [^\n]*\.\n", result.output)
    assert not (tmp_path / "out").exists()
    with pytest.raises(failure, match=re.escape(str(bad))):
        report.gather([bad])


def test_a_layer_that_is_still_being_trained_is_unfinished(tmp_path: Path) -> None:
    run = write_layer(tmp_path / "own", tiny_layer(), [1.0, 0.0, 0.0])
    (run / run_folder.SUMMARY).unlink()
    with pytest.raises(run_folder.RunUnfinished):
        report.gather([run])


def test_a_file_is_not_overwritten_by_a_folder(tmp_path: Path) -> None:
    run = write_layer(tmp_path / "own", tiny_layer(), [1.0, 0.0, 0.0])
    (tmp_path / "out").write_text("mine")
    with pytest.raises(report.NotAFolder):
        report.write([run], tmp_path / "out", COMMAND)
    assert (tmp_path / "out").read_text() == "mine"
