"""Weights that are not numbers, and graphs that are not their weights, wherever they are."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from helpers.altered_bundle import replace_file
from helpers.tiny_bundle import N_CLASSES, SIZES, WIDTH, write_tiny
from numpy.typing import NDArray
from onnx import numpy_helper

from service import bundle, errors
from service.bundle import finite, graphs
from service.bundle.format import Precision
from service.cli.main import cli
from service.engine import Engine
from service.engine.verification import verify_answers
from trainer.export.svd_softmax import preview

BAD = [np.nan, np.inf, -np.inf]
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int8")
LAST = "experts/002.onnx"


def write_biased(path: Path, precision: Precision = "fp32", svd: bool = False) -> Path:
    """Every kind of array that a graph can hold; samples reach the first expert only."""
    rng = np.random.default_rng(0)
    gate = np.zeros((3, WIDTH), np.float32)
    gate[[0, 1, 2], [0, 1, 2]] = 4.0
    offsets = np.cumsum([0, *SIZES])
    weight = rng.normal(size=(offsets[-1], WIDTH)).astype(np.float32)
    return bundle.write(
        path,
        gate=gate,
        gate_bias=np.ones(3, np.float32),
        weight=weight,
        bias=np.ones(len(weight), np.float32),
        offsets=offsets,
        classes=np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 9, 10, 11], np.int32),
        n_classes=N_CLASSES,
        training=bundle.TrainingFacts(utilization=[1.0, 0, 0], flops_speedup=1.0),
        samples=np.array([[1, 0, 0, 0.5]], np.float32),
        precision=precision,
        previews={2: preview(weight[offsets[2] :], 2, 0.5)} if svd else None,
        head=rng.normal(size=(N_CLASSES, WIDTH)).astype(np.float32),
    ).path


def change_array(folder: Path, file: str, which: str, change: Callable[[NDArray], object]) -> None:  # type: ignore[type-arg]
    model = onnx.load_model_from_string((folder / file).read_bytes())
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == which)
    array = numpy_helper.to_array(tensor).copy()
    change(array)
    tensor.CopyFrom(numpy_helper.from_array(array, which))
    replace_file(folder, file, model.SerializeToString())


def change_file(folder: Path, file: str, dtype: str, place: int, value: float) -> None:
    numbers = np.frombuffer((folder / file).read_bytes(), dtype).copy()
    numbers[place] = value
    replace_file(folder, file, numbers.tobytes())


# --- numbers that are not finite --------------------------------------------------------------


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_weight_that_no_sample_reaches(
    tmp_path: Path, precision: Precision, value: float
) -> None:
    folder = write_biased(tmp_path / "1", precision)
    dtype = "<f2" if precision == "fp16" else "<f4"
    change_file(folder, "experts/weights.bin", dtype, -1, value)
    with pytest.raises(errors.WeightsNotFinite, match="W of expert 2 holds a NaN or an infinity"):
        bundle.read(folder)
    result = CliRunner().invoke(cli, ["verify", str(folder)])
    assert result.exit_code == 1 and "W of expert 2" in result.output


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(
    ("file", "which", "precision", "svd"),
    [
        ("gate.onnx", "U", "fp32", False),
        ("gate.onnx", "bias", "fp32", False),
        (LAST, "bias", "fp32", False),
        (LAST, "scale", "int8", False),
        (LAST, "P", "fp32", True),
        (LAST, "Q", "fp32", True),
    ],
)
def test_an_array_within_a_graph(
    tmp_path: Path, file: str, which: str, precision: Precision, svd: bool, value: float
) -> None:
    folder = write_biased(tmp_path / "1", precision, svd)

    def change(array: NDArray[np.float32]) -> None:
        array.flat[-1] = value

    change_array(folder, file, which, change)
    with pytest.raises(errors.WeightsNotFinite, match=f"{which} of {file} holds"):
        bundle.read(folder)


def test_a_weight_of_version_1(tmp_path: Path) -> None:
    folder = Path(shutil.copytree("models/demo/1", tmp_path / "1"))

    def change(array: NDArray[np.float32]) -> None:
        array[3, 7] = np.nan

    change_array(folder, "experts/099.onnx", "W", change)
    with pytest.raises(errors.WeightsNotFinite, match=r"W of experts/099\.onnx"):
        bundle.read(folder)


def test_a_weight_of_the_head(tmp_path: Path) -> None:
    folder = write_biased(tmp_path / "1")
    change_file(folder, "head/weights.bin", "<f4", 11, np.inf)
    assert bundle.read(folder).head is None
    with pytest.raises(errors.WeightsNotFinite, match=r"head/weights\.bin"):
        bundle.read(folder, head=True)


@pytest.mark.parametrize("which", ["gate", "gate_bias", "weight", "bias", "head", "head_bias"])
def test_no_such_bundle_is_written(tmp_path: Path, which: str) -> None:
    arrays = {
        "gate": np.ones((1, 2), np.float32),
        "gate_bias": np.ones(1, np.float32),
        "weight": np.ones((3, 2), np.float32),
        "bias": np.ones(3, np.float32),
        "head": np.ones((3, 2), np.float32),
        "head_bias": np.ones(3, np.float32),
    }
    arrays[which].flat[-1] = np.nan
    with pytest.raises(errors.WeightsNotFinite, match=f"The array {which} holds"):
        bundle.write(
            tmp_path / "1",
            **arrays,  # type: ignore[arg-type]
            offsets=np.array([0, 3]),
            classes=np.arange(3, dtype=np.int32),
            n_classes=3,
            training=bundle.TrainingFacts(utilization=[1.0], flops_speedup=1.0),
        )
    assert not (tmp_path / "1").exists()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_first_number_that_is_not_finite(
    dtype: type[np.floating], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finite, "NUMBERS_AT_ONCE", 8)
    numbers = np.full(50, np.finfo(dtype).max, dtype)
    numbers[::2] = np.finfo(dtype).smallest_subnormal
    assert finite.first_not_finite(numbers) is None
    for place in (49, 17, 8, 7, 0):
        numbers[place] = np.nan if place % 2 else -np.inf
        assert finite.first_not_finite(numbers) == place


# --- graphs and their weights -----------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_good_bundle_verifies(tmp_path: Path, precision: Precision) -> None:
    for svd in (False, True) if precision == "fp32" else (False,):
        folder = write_biased(tmp_path / f"{precision}{svd}", precision, svd)
        opened = bundle.read(folder, head=True)
        verify_answers(opened, Engine(opened))
    write_tiny(tmp_path / "plain", precision=precision)
    result = CliRunner().invoke(cli, ["verify", str(tmp_path / "plain")])
    assert result.exit_code == 0 and "good" in result.output


def verify_refused(folder: Path) -> str:
    opened = bundle.read(folder, head=True)
    with pytest.raises(errors.GraphDiffers) as refusal:
        verify_answers(opened, Engine(opened))
    return str(refusal.value)


@pytest.mark.parametrize("value", [60, -64])
def test_whole_numbers_that_are_not_the_weights(tmp_path: Path, value: int) -> None:
    folder = write_biased(tmp_path / "1", "int8")
    change_file(folder, "experts/quantised.bin", "i1", -1, value)
    assert LAST in verify_refused(folder)


def test_a_scale_that_is_not_the_weights(tmp_path: Path) -> None:
    folder = write_biased(tmp_path / "1", "int8")

    def change(array: NDArray[np.float32]) -> None:
        array[-1] *= 2

    change_array(folder, LAST, "scale", change)
    assert LAST in verify_refused(folder)


@pytest.mark.parametrize("which", ["P", "Q"])
def test_a_preview_that_is_not_the_weights(tmp_path: Path, which: str) -> None:
    folder = write_biased(tmp_path / "1", svd=True)

    def change(array: NDArray[np.float32]) -> None:
        array[-1] = -array[-1]

    change_array(folder, LAST, which, change)
    assert f"Q of {LAST}" in verify_refused(folder)


def test_every_graph_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here each graph computes with other weights than the bundle has."""
    folder = write_biased(tmp_path / "1")
    opened = bundle.read(folder, head=True)
    outside = bundle.Bundle.external

    def other(self: bundle.Bundle, expert: int) -> dict[str, NDArray[np.generic]]:
        found = outside(self, expert)
        seen.append(expert)
        if len(seen) % 2 and expert == broken:
            found["W"] = found["W"] + np.float32(1)
        return found

    engine = Engine(opened)
    monkeypatch.setattr(bundle.Bundle, "external", other)
    for broken in range(3):
        seen: list[int] = []
        with pytest.raises(errors.GraphDiffers, match=f"experts/00{broken}"):
            verify_answers(opened, engine)
    assert graphs.constants(opened.gate_model).keys() == {"U", "bias"}
