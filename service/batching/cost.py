"""What an engine call costs: learned from calls, estimated for those that were never made."""

from collections.abc import Callable

from service.batching.queue import BatchKey

SLOWER_WEIGHT = 0.2  # of a slow call in the fastest cost
RISE = 1.2  # by how much one call may raise the typical cost
KEYS_KEPT = 1024  # clients choose k and experts, so what is known of them is bounded
UNKNOWN_SECONDS = 1.0  # a row's cost before any call: too long for the event loop

RowScores = Callable[[int, int], int]  # how many scores a row takes, of k and experts


class RowCost:
    """Seconds of a row, for each batch key; callers ask for the seconds of a whole call."""

    def __init__(self, row_scores: RowScores) -> None:
        self._row_scores = row_scores
        self._fastest: dict[BatchKey, float] = {}
        self._typical: dict[BatchKey, float] = {}
        self._last_key: BatchKey | None = None  # which was called last

    def __len__(self) -> int:
        return len(self._fastest)

    def fastest(self, key: BatchKey, rows: int) -> float:
        """Seconds of a call that nothing disturbs; many for a key that was never called."""
        return rows * self._fastest.get(key, UNKNOWN_SECONDS)

    def least(self, key: BatchKey, rows: int) -> float:
        """Seconds that a call takes at least; none for a key that was never called."""
        return rows * self._fastest.get(key, 0.0)

    def typical(self, key: BatchKey, rows: int) -> float:
        """Seconds of a call as things are now; for a key never called, by the scores it takes."""
        row_seconds = self._typical.get(key)
        return rows * (self._estimate(key) if row_seconds is None else row_seconds)

    def _estimate(self, key: BatchKey) -> float:
        """A row's cost, if a score costs what it did in the last call; before any call nothing."""
        last = self._last_key
        if last is None:
            return 0.0
        # Another thread may have forgotten it in this moment.
        score_seconds = self._typical.get(last, 0.0) / self._row_scores(last[0], last[1])
        return score_seconds * self._row_scores(key[0], key[1])

    def learn(self, key: BatchKey, rows: int, seconds: float) -> None:
        """A call with so many rows took so long."""
        row_seconds = seconds / rows
        fastest = self._fastest.get(key)
        if fastest is None:
            self._begin(key, row_seconds)
            return
        self._last_key = key
        # Quick to fall, slow to rise: one slow call is the machine's doing.
        if row_seconds > fastest:
            row_fastest = fastest + SLOWER_WEIGHT * (row_seconds - fastest)
        else:
            row_fastest = row_seconds
        self._fastest[key] = row_fastest
        # One call, however slow, must not make the queue look long.
        typical = self._typical[key]
        if row_seconds < typical:
            self._typical[key] = (typical + row_seconds) / 2
        else:
            self._typical[key] = min(row_seconds, typical * RISE)

    def learn_given_up(self, key: BatchKey, rows: int, seconds: float) -> None:
        """A call with so many rows was given up after so long: it costs no less."""
        self._begin(key, max(seconds / rows, self._typical.get(key, 0.0)))

    def _begin(self, key: BatchKey, row_seconds: float) -> None:
        if len(self._fastest) >= KEYS_KEPT:
            self._fastest.clear()
            self._typical.clear()
        self._fastest[key] = self._typical[key] = row_seconds
        self._last_key = key
