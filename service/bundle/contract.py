"""What a bundle knows about promises of recall: which rows must be answered exactly to keep one.

K experts, F features of a row.
"""

from bisect import bisect_left
from itertools import pairwise
from typing import Annotated, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

FEATURES = 8  # F; models/FORMAT.md says which
MOST_LEVELS, MOST_KS = 64, 64

Number = Annotated[float, Field(allow_inf_nan=False)]
Level = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
Answers = Annotated[int, Field(ge=1, le=2**31 - 1)]


class Rule(NamedTuple):
    """How difficult a row is: weights . features + its expert's number, and how difficult it may
    be to be answered from one expert."""

    weights: list[float]  # [F]
    experts: list[float]  # [K]
    threshold: float


class Contract(BaseModel):
    """The calibration, made on rows that training did not see."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rows: int = Field(ge=1)  # it was made with
    levels: list[Level] = Field(min_length=1, max_length=MOST_LEVELS)  # ascending recalls
    ks: list[Answers] = Field(min_length=1, max_length=MOST_KS)  # ascending
    weights: list[list[Number]]  # [len(ks)][F]
    experts: list[list[Number]]  # [len(ks)][K]
    thresholds: list[list[Number | None]]  # [len(ks)][len(levels)]; None: only a scan keeps it

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name, numbers in (("levels", self.levels), ("ks", self.ks)):
            if any(later <= earlier for earlier, later in pairwise(numbers)):
                raise ValueError(f"{name} must ascend")
        lengths = {"weights": FEATURES, "thresholds": len(self.levels)}
        for name, length in lengths.items():
            lists = getattr(self, name)
            if len(lists) != len(self.ks) or any(len(numbers) != length for numbers in lists):
                raise ValueError(f"{name} must be {len(self.ks)} lists of {length} numbers")
        if len(self.experts) != len(self.ks):
            raise ValueError(f"experts must be {len(self.ks)} lists")
        return self

    @property
    def exact_only(self) -> list[float]:
        """The levels that only exact answers keep, mostly because they take more rows than the
        contract was made with."""
        return [
            level
            for place, level in enumerate(self.levels)
            if all(thresholds[place] is None for thresholds in self.thresholds)
        ]

    def rule(self, k: int, recall: float) -> Rule | None:
        """That of the smallest calibrated k and recall which are not below those asked for; None if
        only exact answers keep the promise."""
        of_k, of_level = bisect_left(self.ks, k), bisect_left(self.levels, recall)
        if of_k == len(self.ks) or of_level == len(self.levels):
            return None
        threshold = self.thresholds[of_k][of_level]
        if threshold is None:
            return None
        return Rule(self.weights[of_k], self.experts[of_k], threshold)
