"""A head's rows in whole steps: how they are made, and how far they are from the rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service import errors
from service.bundle import head_rows
from service.bundle.head_rows import measured, quantise


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 70), st.integers(-44, 38), st.integers(0, 2**32 - 1))
def test_bounds_hold_for_rows_of_any_size(n: int, width: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = (rng.uniform(-1, 1, (n, width)) * 10.0**size).astype(np.float32)
    weights[::5] = 0
    quantised, scales = quantise(weights)
    rows = measured("head", weights, quantised, scales, None)
    whole = quantised.astype(np.float64) * scales[:, None].astype(np.float64)
    away = np.sqrt(((weights.astype(np.float64) - whole) ** 2).sum(axis=1))
    assert (rows.errors.astype(np.float64) >= away).all()
    assert (rows.lengths.astype(np.float64) >= np.sqrt((whole**2).sum(axis=1))).all()
    assert rows.longest >= np.sqrt((quantised.astype(np.float64) ** 2).sum(axis=1)).max()
    # Not much more than needed: half a step a number, and little for rounding.
    most = np.sqrt(width) * scales.astype(np.float64) * 0.501
    assert (rows.errors <= most * (1 + 1e-3) + np.finfo(np.float32).tiny).all()


def test_steps_are_those_of_the_largest_number() -> None:
    weights = np.array([[1.27, -0.635, 0.004], [0, 0, 0], [-254, 3, 1]], np.float32)
    quantised, scales = quantise(weights)
    assert quantised.tolist() == [[127, -64, 0], [0, 0, 0], [-127, 2, 0]]
    np.testing.assert_allclose(scales, [0.01, 1, 2], rtol=1e-6)


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        ("scales", np.nan, errors.WeightsNotFinite),
        ("scales", np.inf, errors.WeightsNotFinite),
        ("scales", 0, errors.ShapeWrong),
        ("scales", -1, errors.ShapeWrong),
        ("scales", 1e-45, errors.ShapeWrong),
        ("scales", 1e30, errors.ShapeWrong),
        ("quantised", -128, errors.ShapeWrong),
        ("quantised", 100, errors.ShapeWrong),
    ],
)
def test_steps_that_are_not_the_rows(
    place: str, value: float, expected: type[errors.BundleError]
) -> None:
    weights = np.random.default_rng(0).uniform(-0.5, 0.5, (20, 6)).astype(np.float32)
    weights[7, 2] = -1.0
    quantised, scales = quantise(weights)
    if place == "scales":
        scales[7] = value
    else:
        quantised[7, 2 if value == -128 else 3] = value
    with pytest.raises(expected, match=r"^somewhere/"):
        measured("somewhere", weights, quantised, scales, None)


def test_every_part_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_rows, "NUMBERS_AT_ONCE", 10)
    weights = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    quantised, scales = quantise(weights)
    for row in range(9):
        changed = quantised.copy()
        changed[row, 4] ^= 2  # two steps away
        with pytest.raises(errors.ShapeWrong):
            measured("head", weights, changed, scales, None)


def test_rows_that_are_too_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_rows, "WIDEST", 4)
    weights = np.ones((2, 5), np.float32)
    with pytest.raises(errors.ShapeWrong, match="4 are possible"):
        measured("head", weights, *quantise(weights), None)
