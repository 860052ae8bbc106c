"""The examples, shortened: each goes the whole way, and says what came of it."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from helpers.paths import ROOT

from service import bundle

FOLDER = ROOT / "examples"
EXAMPLES = {  # what it calls its model, and how long it must learn to be of use
    "language_model": ("words", 60),
    "image_classifier": ("pictures", 60),
    "recommender": ("items", 20),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, steps = EXAMPLES[name]
    main = runpy.run_path(str(FOLDER / f"{name}.py"))["main"]
    threads = torch.get_num_threads()
    try:
        main(["--steps", str(steps), "--batches", "12", "--out", str(tmp_path / "out")])
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr().out
    made = bundle.read(tmp_path / "out" / "models" / model / "1")
    assert made.manifest.n_classes >= 4000
    assert made.manifest.training.flops_speedup > 10
    assert re.search(r"FLOPs speedup:? +\d+\.\dx?", said)
    full, sparse = accuracies(said)
    assert sparse >= full - 0.03
    assert said.endswith(f"serve it: dss serve --models {tmp_path}/out/models\n")


def accuracies(said: str) -> tuple[float, float]:
    full = re.search(r"^full softmax:? +(?:accuracy )?([0-9.]+)", said, re.MULTILINE)
    sparse = re.search(r"^(?:sparse head: +)?accuracy +([0-9.]+)", said, re.MULTILINE)
    assert full and sparse, said
    return float(full[1]), float(sparse[1])


def test_they_are_short_and_listed() -> None:
    listed = (FOLDER / "README.md").read_text()
    for file in FOLDER.glob("*.py"):
        assert file.stem in EXAMPLES and f"({file.name})" in listed
        assert len(file.read_text().splitlines()) < 100
