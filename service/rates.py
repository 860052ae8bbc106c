"""What a row costs an engine, learned from its calls."""

from service.waiting import Kind

RECENT = 0.2  # the weight of a slow call in what is the best
RISE = 1.2  # by how much one call may raise what is usual
KINDS_KEPT = 1024  # clients choose k and experts, so what is known of them is bounded
UNKNOWN_SECONDS = 1.0  # a row's cost before any call: too long for the event loop


class Rates:
    def __init__(self) -> None:
        self._best: dict[Kind, float] = {}
        self._usual: dict[Kind, float] = {}

    def best(self, kind: Kind) -> float:
        """Seconds for a row if nothing disturbs the engine; much if nobody knows yet."""
        return self._best.get(kind, UNKNOWN_SECONDS)

    def usual(self, kind: Kind) -> float:
        """Seconds for a row as things are now; as of the dearest kind if nobody knows yet."""
        found = self._usual.get(kind)
        return max(self._usual.values(), default=0.0) if found is None else found

    def learn(self, kind: Kind, row_seconds: float) -> None:
        best = self._best.get(kind)
        if best is None:
            if len(self._best) >= KINDS_KEPT:
                self._best.clear()
                self._usual.clear()
            self._best[kind] = self._usual[kind] = row_seconds
            return
        # Quick to fall, slow to rise: one slow call is the machine's doing.
        self._best[kind] = min(row_seconds, best + RECENT * (row_seconds - best))
        # One call, however slow, must not make the queue look long.
        usual = self._usual[kind]
        falls = row_seconds < usual
        self._usual[kind] = (usual + row_seconds) / 2 if falls else min(row_seconds, usual * RISE)
