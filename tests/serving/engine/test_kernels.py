"""The compiled loops against numpy in float64, and what they promise about arrays and threads."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.paths import ROOT
from hypothesis import given
from hypothesis import strategies as st
from serving.engine.test_engine import SIZES, D, N, make_bundle

from service import bundle
from service.bundle.graphs import Preview
from service.engine import Engine
from service.engine.kernels import cache, gate, scores, search
from service.engine.kernels.products import float_products
from service.errors import BackendUnsuitable

sizes = st.integers(1, 300)


@given(sizes, st.integers(0, 2**32 - 1))
def test_exponentials_are_those_of_numpy(size: int, seed: int) -> None:
    x = np.random.default_rng(seed).uniform(-100, 3, size).astype(np.float32)
    shift = x.max()
    wanted = np.exp((x - shift).astype(np.float64))
    np.testing.assert_allclose(scores.sum_of_exponentials(x, shift), wanted.sum(), rtol=1e-6)
    single = [scores.exponential(number) for number in x - shift]
    np.testing.assert_allclose(single, wanted, rtol=1e-6, atol=1e-37)


@given(sizes, st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_the_best_are_those_of_a_stable_sort(size: int, k: int, seed: int) -> None:
    x = np.random.default_rng(seed).integers(-5, 5, size).astype(np.float32)  # with many ties
    k = min(k, size)
    values, places = np.empty(k, np.float32), np.empty(k, np.int64)
    scores.best_of(x, k, values, places)
    wanted = np.argsort(-x, kind="stable")[:k]
    assert places.tolist() == wanted.tolist()
    assert values.tolist() == x[wanted].tolist()


@given(st.integers(1, 40), st.integers(1, 300), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_products_of_many_rows_are_those_of_each_bit_for_bit(
    width: int, size: int, n: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(n, width)).astype(np.float32)
    matrix = rng.normal(size=(width, size)).astype(np.float32)
    together = np.zeros((n, size), np.float32)
    float_products.score_many(rows, np.arange(n), matrix.ravel(), 0, size, together)
    np.testing.assert_allclose(together, rows @ matrix, rtol=1e-4, atol=1e-4)
    for row in range(n):
        alone = np.zeros(size, np.float32)
        float_products.score_one(rows[row], matrix.ravel(), 0, size, alone)
        assert alone.tobytes() == together[row].tobytes()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    made = make_bundle(tmp_path_factory.mktemp("kernels") / "1", 7, SIZES["roomy"])
    return Engine(made, backend="compiled")


def test_arrays_of_any_kind_are_answered_without_compiling(engine: Engine) -> None:
    rows = np.random.default_rng(0).normal(size=(6, D)).astype(np.float32)
    frozen = np.frombuffer(rows.tobytes(), np.float32).reshape(6, D)
    unaligned = np.frombuffer(b"x" + rows.tobytes(), np.float32, offset=1).reshape(6, D)
    assert not frozen.flags.writeable and not unaligned.flags.aligned
    entries = (gate.rank_experts, search.answer_from(np.float32), scores.all_finite)
    expected = engine.topk(rows, 5), engine.topk(rows, N, 2)
    for given_rows in (frozen, unaligned, np.asfortranarray(rows), rows.astype(np.float64)):
        found = engine.topk(given_rows, 5), engine.topk(given_rows, N, 2)
        for answer, other in zip(found, expected, strict=True):
            assert answer.classes.tolist() == other.classes.tolist()
            assert answer.log_probs.tobytes() == other.log_probs.tobytes()
    assert [len(entry.signatures) for entry in entries] == [1, 1, 1]  # type: ignore[attr-defined]


def test_threads_share_the_rows_of_a_call(tmp_path: Path) -> None:
    made = make_bundle(tmp_path / "1", 7, SIZES["tight"])
    one, three = Engine(made, backend="compiled"), Engine(made, threads=3, backend="compiled")
    rows = np.random.default_rng(0).normal(size=(200, D)).astype(np.float32)
    for k, experts in ((1, 1), (5, 1), (N, 1), (7, 3)):
        together, shared = one.topk(rows, k, experts), three.topk(rows, k, experts)
        assert shared.classes.tolist() == together.classes.tolist()
        assert shared.log_probs.tobytes() == together.log_probs.tobytes()
        assert shared.expert_rows.tolist() == together.expert_rows.tolist()


def test_scores_are_kept_in_bounded_memory(engine: Engine) -> None:
    """As many rows as exceed what is scored at once."""
    rows = np.random.default_rng(0).normal(size=(search.SCORES_AT_ONCE // 20, D))
    rows = rows.astype(np.float32)
    answer = engine.topk(rows, 3)
    last = engine.topk(rows[-50:], 3)
    assert answer.classes[-50:].tolist() == last.classes.tolist()


SCRIPT = """
import numpy as np
from service.engine.kernels import cache, scores
finite = scores.all_finite
rows = np.ones((2, 3), np.float32)
assert finite(rows) and not finite(rows * np.float32("inf")) and not finite(rows * np.nan)
print(cache.folder() or "nowhere", sum(finite.stats.cache_hits.values()))
"""


def said_with_cache(path: Path) -> list[str]:
    """By a fresh process that is to keep machine code there: where it did, and what it found."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"NUMBA_CACHE_DIR": str(path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stdout.split()


def test_machine_code_is_kept_and_found_even_where_nothing_can_be_written(tmp_path: Path) -> None:
    folder = f"{tmp_path}/dss-{cache.fingerprint()[:16]}"
    assert said_with_cache(tmp_path) == [folder, "0"]
    assert said_with_cache(tmp_path) == [folder, "1"]
    for path in [*tmp_path.rglob("*"), tmp_path]:  # as in a read-only image
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert said_with_cache(tmp_path) == [folder, "1"]


def test_without_a_folder_to_write_to_loops_are_compiled_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert said_with_cache(tmp_path / "file" / "below") == ["nowhere", "0"]


def test_a_change_of_any_source_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = cache.fingerprint.__wrapped__()
    copies = []
    for number, source in enumerate(cache.SOURCES):  # two folders have an __init__.py
        (tmp_path / str(number)).mkdir()
        copies.append(Path(shutil.copy(source, tmp_path / str(number))))
    monkeypatch.setattr(cache, "SOURCES", copies)
    assert cache.fingerprint.__wrapped__() == before
    with copies[-1].open("a") as file:
        file.write("\n")
    assert cache.fingerprint.__wrapped__() != before


def test_every_source_of_loops_is_known() -> None:
    """Whatever a compiled function could have been made from."""
    pattern = re.compile(r"^@(ordered|reordered|compiled|intrinsic)\b|compiled\(", re.MULTILINE)
    modules = (ROOT / "service").rglob("*.py")
    users = {path for path in modules if pattern.search(path.read_text())}
    assert users <= set(cache.SOURCES)


def test_approximated_experts_are_left_to_onnx_runtime(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    preview = Preview(np.eye(2, 4, dtype=np.float32), np.ones((30, 2), np.float32), 5)
    made = bundle.write(
        tmp_path / "1",
        gate=np.ones((1, 4), np.float32),
        weight=rng.normal(size=(30, 4)).astype(np.float32),
        offsets=np.array([0, 30]),
        classes=np.arange(30, dtype=np.int32),
        n_classes=30,
        training=bundle.TrainingFacts(utilization=[1.0], flops_speedup=1.0),
        previews={0: preview},
    )
    with pytest.raises(BackendUnsuitable):
        Engine(made, backend="compiled")
    rows = rng.normal(size=(3, 4)).astype(np.float32)
    assert Engine(made).topk(rows, 2).classes.tolist() == (
        Engine(made, backend="onnx").topk(rows, 2).classes.tolist()
    )
