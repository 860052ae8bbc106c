"""How many rows of each split are made."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Wanted:
    """None: all there are."""

    train: int | None = None
    valid: int | None = None
    test: int | None = None

    def of(self, split: str) -> int | None:
        return self.facts()[split]

    def facts(self) -> dict[str, int | None]:
        return asdict(self)

    def or_else(self, default: "Wanted") -> "Wanted":
        """With the default's counts where none was given."""
        return Wanted(
            self.train or default.train, self.valid or default.valid, self.test or default.test
        )
