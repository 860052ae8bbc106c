"""Which settings are worth long turns: those on, or near, the front of their method.

Every setting is asked a few rows first. One stays unless another of its method, for as many
answers, is clearly quicker and misses no more: at first of some rows, where that must be beyond
doubt, then of all rows. Whoever is far slower than a full scan, which misses nothing, goes at once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.engines.contestants import Contestant
from benchmarks.engines.curves.queries import Queries, missed_by, rows_of
from benchmarks.engines.timing import call_times, one_thread

CALLS, WARM_UP = 30, 5
CLEARLY, FAR = 1.15, 5.0  # times quicker
FAR_SLOWER = 1.5  # times a full scan
FEW = 8  # every eighth row is asked at first


@dataclass(frozen=True)
class Tried:
    contestant: Contestant
    microseconds: float
    missed: int  # answers

    def recall(self, data: Queries) -> float:
        """If all rows were asked."""
        return 1 - self.missed / (len(data.hidden) * self.contestant.k)


def shortlist(
    contestants: Iterable[Contestant], data: Queries, scans: Mapping[int, float]
) -> list[Tried]:
    """Of one method; `scans` has the full scan's microseconds for so many answers.

    One thread is timed; what is missed is counted by as many as there are.
    """
    times = quick_times(contestants, data)
    found = [(each, us) for each, us in times if us <= FAR_SLOWER * scans.get(each.k, np.inf)]
    found = found or sorted(times, key=lambda pair: pair[1])[:1]
    for rows, doubt in ((slice(None, None, FEW), 1.0), (slice(None), 0.0)):
        field = [asked(each, time, data, rows) for each, time in found]
        stay = unbeaten(field, doubt)
        found = [(each.contestant, each.microseconds) for each in stay]
    return stay


def quick_times(contestants: Iterable[Contestant], data: Queries) -> list[tuple[Contestant, float]]:
    with one_thread():
        return [(each, quick_time(each, data)) for each in contestants]


def quick_time(contestant: Contestant, data: Queries) -> float:
    """The median of a few calls."""
    contestant.prepare()
    rows = rows_of(contestant, data)
    chosen = np.random.default_rng(0).integers(len(rows), size=WARM_UP + CALLS)
    singles = [rows[row : row + 1] for row in chosen]
    return float(np.median(call_times(contestant.one, singles, WARM_UP)))


def asked(
    contestant: Contestant, microseconds: float, data: Queries, rows: slice = slice(None)
) -> Tried:
    return Tried(contestant, microseconds, missed_by(contestant, data, rows))


def unbeaten(field: Sequence[Tried], doubt: float = 0.0) -> list[Tried]:
    return [each for each in field if not any(beats(other, each, doubt) for other in field)]


def beats(other: Tried, each: Tried, doubt: float) -> bool:
    """With doubt, by more misses than chance makes, about the root of their number, unless it is
    far quicker: of few rows many settings miss nothing."""
    if other.contestant.k != each.contestant.k or other.missed > each.missed:
        return False
    times_quicker = each.microseconds / other.microseconds
    beyond_doubt = other.missed + doubt * (1 + other.missed**0.5) <= each.missed
    return times_quicker > (CLEARLY if beyond_doubt else FAR)
