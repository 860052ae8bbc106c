"""What an engine call costs: learned from calls, estimated for those that were never made.

A row with a promised recall costs little if its expert is good enough and a scan of all classes if
not. Calls of such rows are planned for the scan, whatever the calls before have cost: easy rows
must not make room for hard ones that would then hold up all others.
"""

from collections.abc import Callable

from service.batching.queue import BatchKey
from service.topk import Mode

SLOWER_WEIGHT = 0.2  # of a slow call in the fastest cost
RISE = 1.2  # by how much one call may raise the typical cost
KEYS_KEPT = 1024  # clients choose k and experts, so what is known of them is bounded
UNKNOWN_SECONDS = 1.0  # a row's cost before any call: too long for the event loop

RowScores = Callable[[int, int, Mode], int]  # how many scores a row takes, of k and experts


class RowCost:
    """Seconds of a row, for each batch key; callers ask for the seconds of a whole call."""

    def __init__(self, row_scores: RowScores) -> None:
        self._row_scores = row_scores
        self._fastest: dict[BatchKey, float] = {}
        self._typical: dict[BatchKey, float] = {}
        self._last_search: BatchKey | None = None  # which searched experts last
        self._scan_score: float | None = None  # seconds of a score in the last scan of all classes

    def __len__(self) -> int:
        return len(self._fastest)

    def fastest(self, key: BatchKey, rows: int) -> float:
        """Seconds of a call that nothing disturbs; many for a key that was never called."""
        if key.mode.recall is not None:
            return rows * max(self._fastest.get(key, 0.0), self._scan_seconds(key))
        return rows * self._fastest.get(key, UNKNOWN_SECONDS)

    def least(self, key: BatchKey, rows: int) -> float:
        """Seconds that a call takes at least; none for a key that was never called."""
        return rows * self._fastest.get(key, 0.0)

    def typical(self, key: BatchKey, rows: int) -> float:
        """Seconds of a call as things are now; for a key never called, by the scores it takes."""
        row_seconds = self._typical.get(key)
        return rows * (self._estimate(key) if row_seconds is None else row_seconds)

    def most(self, key: BatchKey, rows: int) -> float:
        """The same if every row with a promised recall has to be scanned."""
        typical = self.typical(key, rows)
        if key.mode.recall is None or self._scan_score is None:
            return typical
        return max(typical, rows * self._scan_seconds(key))

    def _scan_seconds(self, key: BatchKey) -> float:
        """A row's cost if it is scanned; much as long as none was."""
        if self._scan_score is None:
            return UNKNOWN_SECONDS
        return self._scan_score * self._scores(key)

    def _estimate(self, key: BatchKey) -> float:
        """A row's cost, if a score costs what it did in the last call; before any call nothing."""
        last, mode = self._last_search, key.mode
        if self._scan_score is not None and (mode.exact or mode.recall is not None or not last):
            return self._scan_score * self._scores(key)
        if last is None:
            return 0.0
        # Another thread may have forgotten it in this moment.
        return self._typical.get(last, 0.0) / self._scores(last) * self._scores(key)

    def _scores(self, key: BatchKey) -> int:
        return self._row_scores(key.k, key.experts, key.mode)

    def learn(self, key: BatchKey, rows: int, seconds: float) -> None:
        """A call with so many rows took so long."""
        row_seconds = seconds / rows
        fastest = self._fastest.get(key)
        if fastest is None:
            self._begin(key, row_seconds)
            return
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
        self._remember(key)

    def learn_given_up(self, key: BatchKey, rows: int, seconds: float) -> None:
        """A call with so many rows was given up after so long: it costs no less."""
        self._begin(key, max(seconds / rows, self._typical.get(key, 0.0)))

    def _begin(self, key: BatchKey, row_seconds: float) -> None:
        if len(self._fastest) >= KEYS_KEPT:
            self._fastest.clear()
            self._typical.clear()
        self._fastest[key] = self._typical[key] = row_seconds
        self._remember(key)

    def _remember(self, key: BatchKey) -> None:
        """Not of a promised recall: what that has cost says nothing of a score."""
        if key.mode.exact:
            self._scan_score = self._typical[key] / self._scores(key)
        elif key.mode.recall is None:
            self._last_search = key
