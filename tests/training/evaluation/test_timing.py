from itertools import groupby

from trainer.evaluation.timing import CALLS, TURNS, WARM_UP, timed


def test_sides_take_turns_and_each_has_its_own_median() -> None:
    seen: list[str] = []
    medians = timed(lambda: seen.append("a"), lambda: seen.append("b") or sum(range(20_000)))
    turns = [(side, len(list(calls))) for side, calls in groupby(seen)]
    assert turns == [("a", WARM_UP + CALLS), ("b", WARM_UP + CALLS)] * TURNS
    assert 0 < medians[0] < medians[1]
