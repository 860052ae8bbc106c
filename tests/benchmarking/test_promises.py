"""Promises on rows that nobody has seen: float64 answers, what is missed, and a tiny run."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from helpers.fidelity_layer import write_fidelity
from numpy.typing import NDArray

from benchmarks.engines.promises import __main__ as promises
from benchmarks.engines.promises import brute_force, report
from service.bundle.contract import Contract
from service.engine import Engine
from service.topk import RUNGS, Mode, TopK
from trainer.capture.pieces import Piece, Source, write_pieces
from trainer.data.arrays import Head

N, D, K = 60, 20, 4  # classes, hidden, experts


def contract(threshold: float) -> Contract:
    """A row is as difficult as it has mass outside of its expert."""
    levels, ks = list(promises.RECALLS), list(promises.KS)
    return Contract(
        rows=1000,
        levels=levels,
        ks=ks,
        weights=[[0, 1, 0, 0, 0, 0, 0, 0]] * len(ks),
        experts=[[0] * K] * len(ks),
        thresholds=[[threshold] * len(levels)] * len(ks),
    )


# --- the head's own answers --------------------------------------------------------------------


def by_fractions(hidden: NDArray[np.float32], head: Head, k: int) -> list[list[int]]:
    """With numbers that are not rounded at all."""

    def score(row: NDArray[np.float32], c: int) -> Fraction:
        products = (
            Fraction(float(x)) * Fraction(float(y))
            for x, y in zip(row, head.weight[c], strict=True)
        )
        return sum(products, Fraction(0 if head.bias is None else float(head.bias[c])))

    return [
        sorted(range(len(head.weight)), key=lambda c: (-score(row, c), c))[:k] for row in hidden
    ]


@pytest.mark.parametrize("biased", [False, True])
def test_the_best_are_those_of_unrounded_scores(biased: bool) -> None:
    """Also where float32 cannot tell classes apart, and where they are equal."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(40, 12)).astype(np.float32)
    weight[20:30] = weight[3] * (1 + np.arange(10)[:, None] * np.float32(2.0**-23))
    weight[30:] = weight[5]
    bias = np.repeat(rng.normal(size=4).astype(np.float32), 10) if biased else None
    head = Head(weight, bias)
    hidden = np.concatenate([weight[3:6] * 50, rng.normal(size=(20, 12))]).astype(np.float32)
    found = brute_force.best(hidden, head, 12)
    assert found.tolist() == by_fractions(hidden, head, 12)
    in_float32 = hidden @ weight.T + (0 if bias is None else bias)
    by_float32 = np.argsort(-in_float32, axis=1, kind="stable")[:, :12]
    assert (by_float32 != found).any()  # or nothing would have been tested


def test_no_float32_score_is_farther_off_than_said() -> None:
    rng = np.random.default_rng(1)
    head = Head(*(rng.normal(size=shape).astype(np.float32) * 100 for shape in ((500, 64), 500)))
    hidden = (rng.normal(size=(50, 64)) ** 5).astype(np.float32)
    exact = hidden.astype(np.float64) @ head.weight.T.astype(np.float64) + head.bias
    away = np.abs(hidden @ head.weight.T + head.bias - exact).max(axis=1)
    bound = brute_force.off_by(hidden, head)
    assert (away <= bound).all() and (bound < 1e-3 * np.abs(exact).max(axis=1)).all()


# --- what is counted ---------------------------------------------------------------------------


def test_costs_are_rows_of_gate_and_head(tmp_path: Path) -> None:
    made = write_fidelity(tmp_path / "1", n_classes=N, width=D, n_experts=K)
    sizes = made.manifest.expert_sizes
    nothing = np.zeros(0, np.float32)
    rungs = np.array([RUNGS.index(name) for name in ("sparse", "escalated", "exact")], np.uint8)
    found = TopK(
        classes=np.zeros((3, 1), np.int64),
        log_probs=np.zeros((3, 1), np.float32),
        experts=np.array([0, 1, 2]),
        gates=nothing,
        gate_seconds=0.0,
        expert_rows=np.zeros(K, np.int64),
        expert_seconds=np.zeros(K),
        rungs=rungs,
    )
    assert promises.rows_looked_at(made, found).tolist() == [K + sizes[0], K + sizes[1] + N, N]


def test_neighbours_are_drawn_together() -> None:
    """Misses of one stretch of text say less than as many that are spread."""
    together, spread = np.zeros(10_000), np.zeros(10_000)
    together[:500], spread[::20] = 1, 1
    assert promises.interval(spread) == pytest.approx((0.05, 0.05))
    least, most = promises.interval(together)
    assert least < 0.02 and most > 0.08
    assert promises.interval(np.zeros(7)) == (0.0, 0.0)


def test_rows_come_as_they_are_and_then_with_noise() -> None:
    rng = np.random.default_rng(0)
    test, valid = rng.normal(size=(5, 3)), rng.normal(size=(4, 3))
    test, valid = test.astype(np.float32), valid.astype(np.float32)
    found = np.concatenate(list(promises.some_rows([test, valid], 16, 3)))
    both = np.concatenate([test, valid])
    assert np.array_equal(found[:9], both)
    assert (found[9:] != both[:7]).all() and np.allclose(found[9:], both[:7], atol=0.7)
    assert sum(map(len, promises.some_rows([test], 4, 3))) == 4


def test_a_wrong_answer_is_counted(tmp_path: Path) -> None:
    """Of a head whose answers are not the bundle's."""
    made = write_fidelity(tmp_path / "1", n_classes=N, width=D, n_experts=K)
    assert made.rows is not None
    engine, rows = Engine(made), np.random.default_rng(3).normal(size=(40, D)).astype(np.float32)
    own = Head(made.rows.weights, made.rows.bias)
    counted = {"k": 10, "rows": 40, "with_noise": 0}
    assert promises.exactness(engine, own, [rows], 40, print) == {**counted, "differing": 0}
    other = made.rows.weights.copy()
    winners = engine.topk(rows, 1, mode=Mode(exact=True)).classes[:, 0]
    other[winners[0]] = 0
    differing = promises.exactness(engine, Head(other, None), [rows], 40, print)["differing"]
    assert (winners == winners[0]).sum() <= differing <= 40


@pytest.mark.parametrize(
    ("missed", "interval", "word"),
    [
        (0.01, [0.008, 0.012], "yes"),
        (0.011, [0.009, 0.013], "within chance"),
        (0.02, [0.015, 0.025], "no"),
    ],
)
def test_a_promise_is_kept_or_not(missed: float, interval: list[float], word: str) -> None:
    each = {"missed": missed, "may_miss": 0.01, "interval": interval}
    assert report.kept(each) == word


# --- from end to end ---------------------------------------------------------------------------


def write_capture(folder: Path, weight: NDArray[np.float32], *, test: int) -> Path:
    rng = np.random.default_rng(5)

    def piece(split: str, rows: int) -> Piece:
        hidden = rng.normal(size=(rows, D)).astype(np.float32)
        return Piece(split, rows, lambda: (hidden, np.zeros(rows, np.int64)))

    splits = {"train": 10, "valid": 30, **({"test": test} if test else {})}
    pieces = [piece(split, rows) for split, rows in splits.items()]
    write_pieces(Source(weight, pieces, sum(splits.values()), {}), folder, "fp32")
    return folder


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(promises.main, [str(each) for each in arguments])


@pytest.mark.parametrize(("threshold", "sparse"), [(100.0, True), (-100.0, False)])
def test_a_tiny_run(tmp_path: Path, threshold: float, sparse: bool) -> None:
    """With no row escalated random experts break the promise; with all, nothing is missed."""
    made = write_fidelity(
        tmp_path / "small/1", n_classes=N, width=D, n_experts=K, contract=contract(threshold)
    )
    assert made.rows is not None
    captured = write_capture(tmp_path / "captured", made.rows.weights, test=300)
    document = tmp_path / "page.md"
    document.write_text("<!-- promises:begin -->\n<!-- promises:end -->\n")
    options = ["--out", tmp_path / "found.json", "--document", document]
    result = invoke(
        "--title", "Tiny", "--bundle", tmp_path / "small/1", "--capture", captured,
        "--rows", 350, *options,
    )  # fmt: skip
    assert result.exit_code == 0, result.output

    run = json.loads((tmp_path / "found.json").read_text())["Tiny"]
    assert run["rows"] == 300
    assert run["exact"] == {"k": 10, "rows": 350, "with_noise": 20, "differing": 0}
    assert [(each["k"], each["recall"]) for each in run["recalls"]] == [
        (k, recall) for k in (1, 10) for recall in (0.9, 0.99, 0.999)
    ]
    for each in run["recalls"]:
        assert sum(each["rungs"].values()) == pytest.approx(1)
        if sparse:
            assert each["interval"][0] <= each["missed"] <= each["interval"][1]
            assert each["missed"] > 0.2 and report.kept(each) == "no"
        else:
            assert each["missed"] == 0 and each["cost"] > 1 and each["rungs"]["sparse"] == 0
    page = document.read_text()
    assert "| Tiny (300 rows) | 10 | 0.99 |" in page
    assert "Of 350 exact answers together, 0 differ." in page

    document.write_text("<!-- promises:begin -->\n<!-- promises:end -->\n")
    assert invoke("--render", *options).exit_code == 0 and document.read_text() == page


def test_rows_are_needed_that_nobody_has_seen(tmp_path: Path) -> None:
    made = write_fidelity(tmp_path / "1", n_classes=N, width=D, n_experts=K)
    assert made.rows is not None
    captured = write_capture(tmp_path / "captured", made.rows.weights, test=0)
    result = invoke("--bundle", tmp_path / "1", "--capture", captured)
    assert result.exit_code == 1 and "has no test rows" in result.output
    result = invoke("--bundle", tmp_path / "1")
    assert result.exit_code == 2 and "--hidden and --head" in result.output


def test_a_bundle_without_calibration_is_refused(tmp_path: Path) -> None:
    made = write_fidelity(tmp_path / "1", n_classes=N, width=D, n_experts=K)
    assert made.rows is not None
    np.save(tmp_path / "head.npy", made.rows.weights)
    np.save(tmp_path / "rows.npy", np.ones((20, D), np.float32))
    files = ["--hidden", tmp_path / "rows.npy", "--head", tmp_path / "head.npy"]
    result = invoke("--bundle", tmp_path / "1", *files, "--out", tmp_path / "found.json")
    assert result.exit_code == 1 and "no calibration" in result.output
    assert not (tmp_path / "found.json").exists()
