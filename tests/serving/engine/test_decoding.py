"""Classes from top-k answers: the best, or drawn by their probabilities."""

import subprocess
import sys
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
from helpers.tiny_bundle import rows_for
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chisquare

from service.bundle import Bundle
from service.decoding import SamplingWrong, decode, draw, generators, greedy, sample
from service.engine import Engine
from service.errors import KOutOfRange

PROBABILITIES = [0.4, 0.3, 0.2, 0.05]  # of classes 9, 2, 7 and 1; the rest is not among the best
CLASSES = [9, 2, 7, 1]


class Answer(NamedTuple):
    """Lists, as a client of a server may have them."""

    classes: list[list[int]]
    log_probs: list[list[float]]


def answer(rows: int) -> Answer:
    return Answer([CLASSES] * rows, [np.log(PROBABILITIES).tolist()] * rows)


def rows(count: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def engine(tiny: Bundle) -> Engine:
    return Engine(tiny)


def test_greedy_is_the_first_class(engine: Engine) -> None:
    hidden = rows(50)
    for experts in (1, 2):
        first = engine.topk(hidden, 4, experts).classes[:, 0]
        found = greedy(engine, hidden, experts=experts)
        assert found.dtype == np.int64 and np.array_equal(found, first)


def test_of_one_there_is_no_choice(engine: Engine) -> None:
    hidden = rows(50)
    for seed in range(5):
        assert np.array_equal(sample(engine, hidden, 1, rng=seed), greedy(engine, hidden))


def test_the_limits_of_temperature_and_top_p_are_greedy(engine: Engine) -> None:
    hidden = rows(50)
    for options in (
        {"temperature": 0.0},
        {"temperature": 1e-6},
        {"temperature": 1e-300},
        {"top_p": 1e-9},
    ):
        assert np.array_equal(sample(engine, hidden, 4, rng=0, **options), greedy(engine, hidden))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_classes_come_as_often_as_their_probability_says(temperature: float, top_p: float) -> None:
    expected = np.array(PROBABILITIES) ** (1 / temperature)
    expected /= expected.sum()
    if top_p < 1:  # by hand: what is left of 4 at each temperature
        expected = expected[: {0.5: 2, 1.0: 3, 2.0: 3}[temperature]]
        expected /= expected.sum()
    drawn = draw(answer(20_000), temperature=temperature, top_p=top_p, rng=1)
    found = np.array([(drawn == cls).sum() for cls in CLASSES])
    assert found[len(expected) :].sum() == 0
    assert chisquare(found[: len(expected)], 20_000 * expected).pvalue > 0.001


def test_top_p_is_by_hand() -> None:
    """Of 0.95 in all, 0.4 and 0.3 are 74%, so 74% needs two classes and 75% three."""
    for top_p, among in ((0.42, {9}), (0.43, {9, 2}), (0.73, {9, 2}), (0.75, {9, 2, 7})):
        assert set(draw(answer(2000), top_p=top_p, rng=0).tolist()) == among


def test_a_high_temperature_makes_all_alike() -> None:
    drawn = draw(answer(20_000), temperature=1e9, rng=1)
    found = [(drawn == cls).sum() for cls in CLASSES]
    assert chisquare(found).pvalue > 0.001


def test_the_same_seed_gives_the_same_and_another_another(engine: Engine) -> None:
    hidden = rows(100)
    once, again, other = (sample(engine, hidden, 4, rng=seed) for seed in (3, 3, 4))
    assert np.array_equal(once, again) and not np.array_equal(once, other)
    generator = np.random.default_rng(3)
    assert np.array_equal(sample(engine, hidden, 4, rng=generator), once)
    assert not np.array_equal(sample(engine, hidden, 4, rng=generator), once)  # it has moved on


@given(st.integers(1, 30), st.integers(0, 1000))
def test_a_row_does_not_depend_on_the_others(count: int, seed: int) -> None:
    together = draw(answer(30), rng=seed)
    assert np.array_equal(draw(answer(count), rng=seed), together[:count])
    # Other rows before it make a difference, unless each row has a generator of its own.
    own = generators(seed, 30)
    one_by_one = draw(answer(30), rng=own)
    last = draw(answer(1), rng=generators(seed, 30)[count - 1 : count])
    assert last[0] == one_by_one[count - 1]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": np.nan}, "temperature is nan"),
        ({"temperature": np.inf}, "temperature is inf"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"rng": generators(0, 2)}, "2 generators for 3 rows"),
    ],
)
def test_what_is_refused(options: dict[str, float], sentence: str) -> None:
    with pytest.raises(SamplingWrong, match=sentence):
        draw(answer(3), **options)  # type: ignore[arg-type]


def test_more_than_there_is_is_the_engines_to_refuse(engine: Engine) -> None:
    with pytest.raises(KOutOfRange):
        sample(engine, rows(1), 40)


# --- one after the other ----------------------------------------------------------------------


def test_each_class_is_given_to_the_next_step(engine: Engine) -> None:
    given: list[list[int]] = []

    def step(classes: NDArray[np.int64], state: int) -> tuple[NDArray[np.float32], int]:
        given.append(classes.tolist())
        return rows_for(state % 3, (state + 1) % 3), state + 1

    found = decode(step, engine, [7, 8], 0, length=5)
    best = greedy(engine, rows_for(0, 1, 2))
    assert found.tolist() == [
        [best[t % 3] for t in range(5)],
        [best[(t + 1) % 3] for t in range(5)],
    ]
    assert given == [[7, 8], *found.T.tolist()[:-1]]


def test_a_sequence_ends_at_the_stop_and_all_of_them_the_loop(engine: Engine) -> None:
    best = greedy(engine, rows_for(0, 1, 2)).tolist()
    stop = best[2]
    steps = 0

    def step(_: NDArray[np.int64], state: int) -> tuple[NDArray[np.float32], int]:
        nonlocal steps
        steps += 1
        return rows_for(min(state, 2), min(state + 1, 2)), state + 1

    found = decode(step, engine, [0, 0], 0, length=9, stop=stop)
    assert found.tolist() == [[best[0], best[1], stop], [best[1], stop, stop]]
    assert steps == 3
    assert decode(step, engine, [0, 0], 0, length=0).shape == (2, 0)


def test_sampled_sequences_are_the_same_alone(engine: Engine) -> None:
    """With a generator for each of them."""

    def step(classes: NDArray[np.int64], state: None) -> tuple[NDArray[np.float32], None]:
        return rows_for(*(classes % 3)), state

    def write(first: list[int], own: list[np.random.Generator]) -> list[list[int]]:
        choose = partial(sample, k=4, temperature=3.0, rng=own)
        return decode(step, engine, first, None, length=20, choose=choose).tolist()

    together = write([0, 1, 2], generators(5, 3))
    assert len(set(map(tuple, together))) == 3
    for row in range(3):
        assert write([row], generators(5, 3)[row : row + 1]) == together[row : row + 1]


def test_it_needs_numpy_alone() -> None:
    code = (
        "import sys, service.decoding\n"
        "print({'torch', 'onnxruntime', 'numba', 'fastapi'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
