"""What the head answers to query rows: its first classes, their scores, and its normaliser.

S query rows, D hidden, N classes, T answers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.training.head_answers import all_scores, destructive_logsumexp, largest


@dataclass(frozen=True)
class Answers:
    classes: Tensor  # [S,T] int32, best first
    scores: Tensor  # [S,T]
    logsumexp: Tensor  # [S] over all classes

    def __len__(self) -> int:
        return len(self.classes)

    def first(self, count: int) -> "Answers":
        """Only the first so many answers of each row."""
        return Answers(self.classes[:, :count], self.scores[:, :count], self.logsumexp)


@torch.no_grad()
def taught_answers(head: Tensor, hidden: Tensor, n_answers: int) -> Answers:
    """Of a head [N,D], or [N,D+1] with biases, to query rows [S,D] in memory."""
    n_rows, n_answers = len(hidden), min(n_answers, len(head))
    found = Answers(
        torch.empty(n_rows, n_answers, dtype=torch.int32),
        torch.empty(n_rows, n_answers),
        torch.empty(n_rows),
    )
    for part, scores in all_scores(head, hidden, n_rows, "the head's answers"):
        found.scores[part], found.classes[part] = largest(scores, n_answers)
        found.logsumexp[part] = destructive_logsumexp(scores)
    return found
