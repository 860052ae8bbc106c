"""What a row costs an engine, learned from its calls."""

from service.batching.queue import BatchKey

SLOWER_WEIGHT = 0.2  # of a slow call in the fastest cost
RISE = 1.2  # by how much one call may raise the typical cost
KEYS_KEPT = 1024  # clients choose k and experts, so what is known of them is bounded
UNKNOWN_SECONDS = 1.0  # a row's cost before any call: too long for the event loop


class RowCost:
    """Seconds of a row, for each batch key; callers ask for the seconds of a whole call."""

    def __init__(self) -> None:
        self._fastest: dict[BatchKey, float] = {}
        self._typical: dict[BatchKey, float] = {}

    def __len__(self) -> int:
        return len(self._fastest)

    def fastest(self, key: BatchKey, rows: int) -> float:
        """Seconds of a call that nothing disturbs; many for a key that was never called."""
        return rows * self._fastest.get(key, UNKNOWN_SECONDS)

    def typical(self, key: BatchKey, rows: int) -> float:
        """Seconds of a call as things are now; of the dearest key for one never called."""
        row_seconds = self._typical.get(key)
        if row_seconds is None:
            row_seconds = max(self._typical.values(), default=0.0)
        return rows * row_seconds

    def learn(self, key: BatchKey, rows: int, seconds: float) -> None:
        """A call with so many rows took so long."""
        row_seconds = seconds / rows
        fastest = self._fastest.get(key)
        if fastest is None:
            if len(self._fastest) >= KEYS_KEPT:
                self._fastest.clear()
                self._typical.clear()
            self._fastest[key] = self._typical[key] = row_seconds
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
