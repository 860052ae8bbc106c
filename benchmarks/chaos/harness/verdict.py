"""What a scenario finds: counts, sizes, latencies, and whether its criteria hold."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MIB = 2**20
FLAT_SHARE, FLAT_BYTES = 0.05, 8 * MIB


class NotPossible(Exception):
    """A scenario cannot run on this machine; the text says why."""


def _silent(text: str) -> None:
    del text


@dataclass(frozen=True)
class Context:
    """How a scenario shall run."""

    folder: Path  # empty, its own
    quick: bool = False
    requests: int = 100_000  # of the fuzzer
    soak_minutes: float = 30.0
    seed: int = 1
    say: Callable[[str], None] = _silent

    def choose(self, quick: float, long: float) -> float:
        return quick if self.quick else long

    def count(self, quick: int, long: int) -> int:
        return quick if self.quick else long


@dataclass(frozen=True)
class Criterion:
    words: str
    passed: bool
    found: str


@dataclass
class Figures:
    """Of one scenario. `lost` are requests that were sent whole and never answered."""

    sent: int = 0
    answered: int = 0  # with 200, and right
    refused: int = 0  # answered with 4xx because they were wrong
    rejected: int = 0  # answered with 429
    failed: Counter[str] = field(default_factory=Counter)  # all else, by kind
    wrong: int = 0
    lost: int = 0
    rss_start: int | None = None
    rss_end: int | None = None
    fds_start: int | None = None
    fds_end: int | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # the first failures, in words
    criteria: list[Criterion] = field(default_factory=list)
    attacks: list[dict[str, Any]] = field(default_factory=list)  # beside ordinary traffic

    @property
    def passed(self) -> bool:
        return all(criterion.passed for criterion in self.criteria)

    def require(self, words: str, passed: bool, found: object = "") -> None:
        self.criteria.append(Criterion(words, bool(passed), str(found)))

    def note(self, text: str) -> None:
        if len(self.notes) < 10:
            self.notes.append(text)

    def fail(self, kind: str, text: str = "") -> None:
        self.failed[kind] += 1
        if text:
            self.note(f"{kind}: {text}")

    def add(self, other: "Figures") -> None:
        """Count another's requests as this one's own."""
        for name in ("sent", "answered", "refused", "rejected", "wrong", "lost"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.failed += other.failed
        for text in other.notes:
            self.note(text)

    def require_right(self) -> None:
        self.require("no wrong answer", not self.wrong, self.wrong)

    def require_none_lost(self) -> None:
        self.require("no accepted request lost", not self.lost, self.lost)

    def require_none_failed(self) -> None:
        self.require("no failed request", not self.failed, dict(self.failed) or 0)

    def require_flat_memory(self) -> None:
        start, end = self.rss_start or 0, self.rss_end or 0
        found = f"{start / MIB:.0f} MB, then {end / MIB:.0f} MB"
        self.require("memory flat: less than 5% or 8 MB more", flat(start, end), found)

    def require_flat_descriptors(self) -> None:
        start, end = self.fds_start or 0, self.fds_end or 0
        self.require("no more descriptors than before", end <= start, f"{start}, then {end}")

    def as_json(self) -> dict[str, Any]:
        return {"passed": self.passed} | asdict(self) | {"failed": dict(self.failed)}


def flat(start: int, end: int) -> bool:
    return end - start <= max(FLAT_SHARE * start, FLAT_BYTES)
