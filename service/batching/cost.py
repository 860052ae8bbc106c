"""What a row costs an engine, learned from its calls."""

from service.batching.queue import BatchKey

RECENT = 0.2  # the weight of a slow call in what is the best
RISE = 1.2  # by how much one call may raise what is usual
KINDS_KEPT = 1024  # clients choose k and experts, so what is known of them is bounded
UNKNOWN_SECONDS = 1.0  # a row's cost before any call: too long for the event loop


class RowCost:
    def __init__(self) -> None:
        # Seconds for a row if nothing disturbs the engine. In the open, for whoever is in a hurry.
        self.bests: dict[BatchKey, float] = {}
        self._usual: dict[BatchKey, float] = {}

    def best(self, kind: BatchKey) -> float:
        """Much if nobody knows yet."""
        return self.bests.get(kind, UNKNOWN_SECONDS)

    def usual(self, kind: BatchKey) -> float:
        """Seconds for a row as things are now; as of the dearest kind if nobody knows yet."""
        found = self._usual.get(kind)
        return max(self._usual.values(), default=0.0) if found is None else found

    def learn(self, kind: BatchKey, row_seconds: float) -> None:
        best = self.bests.get(kind)
        if best is None:
            if len(self.bests) >= KINDS_KEPT:
                self.bests.clear()
                self._usual.clear()
            self.bests[kind] = self._usual[kind] = row_seconds
            return
        # Quick to fall, slow to rise: one slow call is the machine's doing.
        slower = row_seconds > best
        self.bests[kind] = best + RECENT * (row_seconds - best) if slower else row_seconds
        # One call, however slow, must not make the queue look long.
        usual = self._usual[kind]
        if row_seconds < usual:
            self._usual[kind] = (usual + row_seconds) / 2
        else:
            self._usual[kind] = min(row_seconds, usual * RISE)
