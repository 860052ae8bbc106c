"""What loading is expected to take is compared with what it takes."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from helpers.paths import ROOT

from service import bundle
from service.bundle.format import Precision
from service.engine import BackendName
from service.repository import load_memory
from service.repository.load_memory import load_bytes
from trainer.export.svd_softmax import preview

WIDTH, N_EXPERTS, PER_EXPERT = 64, 8, 12_000  # 25 MB
TOO_MUCH = 2.0  # times what is taken, and the fixed part


def write(
    path: Path,
    *,
    precision: Precision = "fp32",
    experts: int = N_EXPERTS,
    size: int = PER_EXPERT,
    width: int = WIDTH,
    labels: Sequence[str] | None = None,
    svd: bool = False,
    head: bool = False,
) -> bundle.Bundle:
    rng = np.random.default_rng(0)
    rows = experts * size
    weight = rng.normal(size=(rows, width)).astype(np.float32)
    return bundle.write(
        path,
        gate=rng.normal(size=(experts, width)).astype(np.float32),
        weight=weight,
        bias=np.ones(rows, np.float32),
        offsets=np.arange(0, rows + 1, size),
        classes=np.arange(rows, dtype=np.int32),
        n_classes=rows,
        training=bundle.TrainingFacts(utilization=[1 / experts] * experts, flops_speedup=1.0),
        labels=labels,
        precision=precision,
        head=weight if head else None,
        previews={e: preview(weight[e * size : (e + 1) * size], 16, 0.1) for e in range(experts)}
        if svd
        else None,
    )


def check(made: bundle.Bundle, small: Path, backend: BackendName = "auto", rate: float = 0) -> None:
    expected = load_bytes(made.manifest, backend, head=rate > 0).of(1)
    script = ROOT / "tests/helpers/serving/load_peak.py"
    command = [sys.executable, script, small, made.path, backend, str(rate)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    taken = int(done.stdout)
    assert taken <= expected <= TOO_MUCH * taken + 2 * load_memory.FIXED_BYTES


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[Precision, Path]:
    folder = tmp_path_factory.mktemp("small")
    kinds: tuple[Precision, ...] = ("fp32", "fp16", "int8")
    return {
        precision: write(folder / precision, precision=precision, size=20, head=True).path
        for precision in kinds
    }


@pytest.mark.parametrize("backend", ["compiled", "onnx"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_matrices(
    tmp_path: Path, small: dict[Precision, Path], precision: Precision, backend: BackendName
) -> None:
    check(write(tmp_path / "1", precision=precision), small[precision], backend)


def test_approximated_experts(tmp_path: Path, small: dict[Precision, Path]) -> None:
    check(write(tmp_path / "1", svd=True), small["fp32"])


def test_a_head(tmp_path: Path, small: dict[Precision, Path]) -> None:
    made = write(tmp_path / "1", head=True)
    check(made, small["fp32"], rate=0.01)
    with_head = load_bytes(made.manifest, "auto", head=True)
    assert with_head.shared > 1.9 * load_bytes(made.manifest, "auto", head=False).shared


def test_labels_of_wide_characters(tmp_path: Path, small: dict[Precision, Path]) -> None:
    labels = [f"{number} {'x' * 40}\U0001f600" for number in range(200_000)]
    made = write(tmp_path / "1", experts=2, size=100_000, width=2, labels=labels)
    check(made, small["fp32"])


@pytest.mark.parametrize("backend", ["compiled", "onnx"])
def test_many_experts(tmp_path: Path, small: dict[Precision, Path], backend: BackendName) -> None:
    check(write(tmp_path / "1", experts=600, size=4, width=256), small["fp32"], backend)


def test_matrices_within_graphs_are_counted_with_their_copy() -> None:
    manifest = bundle.read(ROOT / "models/demo/1").manifest
    held = sum(manifest.expert_sizes) * manifest.hidden_size * 4
    found = load_bytes(manifest, "auto", head=False)
    assert found.shared == 0
    assert found.private > 2 * held
