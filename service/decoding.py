"""From top-k answers to classes: the most probable one, or one drawn at random.

Works with anything that has `topk(hidden, k, experts)`: an engine, or a client of a server.

B rows, D hidden, k answers, T steps.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

from service.errors import QueryError

State = TypeVar("State")
Random = int | Generator | Sequence[Generator] | None


class Answer(Protocol):
    @property
    def classes(self) -> ArrayLike: ...  # [B,k]

    @property
    def log_probs(self) -> ArrayLike: ...  # [B,k] descending


class Ranker(Protocol):
    def topk(self, hidden: NDArray[np.float32], k: int, experts: int = 1) -> Answer: ...


class SamplingWrong(QueryError):
    pass


def greedy(ranker: Ranker, hidden: NDArray[np.float32], *, experts: int = 1) -> NDArray[np.int64]:
    """The most probable class of each row [B,D]: [B]."""
    return np.asarray(ranker.topk(hidden, 1, experts).classes, np.int64)[:, 0]


def sample(
    ranker: Ranker,
    hidden: NDArray[np.float32],
    k: int = 40,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    rng: Random = None,
    experts: int = 1,
) -> NDArray[np.int64]:
    """A class for each row [B,D], drawn from its k most probable ones: [B]. See `draw`."""
    answer = ranker.topk(hidden, k, experts)
    return draw(answer, temperature=temperature, top_p=top_p, rng=rng)


def draw(
    answer: Answer, *, temperature: float = 1.0, top_p: float = 1.0, rng: Random = None
) -> NDArray[np.int64]:
    """A class for each row of an answer [B,k], by its probabilities among those k: [B].

    Log-probabilities are divided by the temperature; 0 is the limit, the most probable class. Of
    the k, then, only the first that together reach the probability `top_p` count.

    `rng` is a seed, a generator, or a generator for each row (see `generators`). Each row takes
    one number of it, so that its class does not depend on the other rows; with a generator of its
    own not even on how many there are.
    """
    if not 0 <= temperature < np.inf:
        raise SamplingWrong(f"The temperature is {temperature}; 0 or more is expected.")
    if not 0 < top_p <= 1:
        raise SamplingWrong(f"top_p is {top_p}; more than 0 and at most 1 is expected.")
    classes = np.asarray(answer.classes, np.int64)  # [B,k]
    log_probs = np.asarray(answer.log_probs, np.float64)  # [B,k]
    numbers = _numbers(rng, len(classes))  # [B]
    if temperature == 0:
        return classes[:, 0]
    with np.errstate(over="ignore"):  # a temperature near 0 leaves the first one alone
        weights = np.exp((log_probs - log_probs[:, :1]) / temperature)
    reached = np.cumsum(weights, axis=1)  # [B,k]
    counts = reached - weights < top_p * reached[:, -1:]  # what comes before is not enough
    total = np.where(counts, reached, 0.0).max(axis=1)  # [B]
    place = (reached <= (numbers * total)[:, None]).sum(axis=1)  # [B]
    last = counts.sum(axis=1) - 1
    return np.take_along_axis(classes, np.minimum(place, last)[:, None], axis=1)[:, 0]


def generators(seed: int, count: int) -> list[Generator]:
    """One for each row; the first ones are the same whatever the count."""
    return [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(count)]


def _numbers(rng: Random, count: int) -> NDArray[np.float64]:
    """In [0, 1), one for each row."""
    if isinstance(rng, Sequence):
        if len(rng) != count:
            raise SamplingWrong(f"There are {len(rng)} generators for {count} rows.")
        return np.array([generator.random() for generator in rng])
    return np.random.default_rng(rng).random(count)


Step = Callable[[NDArray[np.int64], State], tuple[NDArray[np.float32], State]]
Choose = Callable[[Ranker, NDArray[np.float32]], NDArray[np.int64]]


def decode(
    step: Step[State],
    ranker: Ranker,
    first: ArrayLike,
    state: State,
    *,
    length: int,
    stop: int | None = None,
    choose: Choose = greedy,
) -> NDArray[np.int64]:
    """Sequences of classes, each made of the ones before: [B,T], T at most `length`.

    `step(classes, state)` takes the newest classes [B], at the beginning `first`, and gives hidden
    vectors [B,D] and the next state. `choose(ranker, hidden)` is `greedy`, or `sample` with its
    options bound. A sequence that has come to `stop` is filled up with it.
    """
    newest = np.asarray(first, np.int64)  # [B]
    ended = np.zeros(len(newest), bool)
    chosen: list[NDArray[Any]] = []
    while len(chosen) < length and not ended.all():
        hidden, state = step(newest, state)
        newest = choose(ranker, hidden)
        if stop is not None:
            newest = np.where(ended, stop, newest)
            ended |= newest == stop
        chosen.append(newest)
    return np.stack(chosen, axis=1) if chosen else np.empty((len(newest), 0), np.int64)
