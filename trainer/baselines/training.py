"""Training of baselines on fixed hidden vectors, as the doubly sparse layer is trained.

The same optimizer, batches, learning rates and mix of labels and the full softmax's distribution.

B rows, D hidden, N classes, J drawn classes.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from service.terminal import progress
from trainer.baselines.method import Inputs
from trainer.data import run_folder
from trainer.data.rows import MappedRows, sample
from trainer.training.config import SAMPLE_ABOVE, SAMPLES, VectorsConfig
from trainer.training.loop import epoch_batches
from trainer.training.optimizer import make_optimizer, set_learning_rate

PART = 128  # rows whose logits are computed together
MASKED = -1e9  # in place of minus infinity: 0 times it is 0

Loss = Callable[[Tensor, Tensor, torch.Generator], Tensor]  # of hidden [B,D] and labels [B]


def fit(
    student: nn.Module,
    loss: Loss,
    inputs: Inputs,
    folder: Path,
    *,
    rounds: int,
    epochs: int,
    n_rows: int | None,
    keep_epochs: bool = False,
) -> float:
    """Train in place, each round with a fresh optimizer and a falling learning rate.

    A checkpoint after every epoch: a stopped training goes on from the last one. Returns the
    seconds of training. With `keep_epochs` the weights after each epoch stay in the folder.
    """
    config = VectorsConfig(epochs=epochs, seed=inputs.options.seed)
    folder.mkdir(parents=True, exist_ok=True)
    labels = torch.from_numpy(inputs.training.labels.astype(np.int64))
    hidden = MappedRows(inputs.training.hidden)
    used = sample(len(labels), len(labels) if n_rows is None else n_rows, config.seed)
    optimizer = make_optimizer(config, student)
    done, seconds = _load(folder, student, optimizer)
    student.train()
    for number in range(done, rounds * epochs):
        started, epoch = time.monotonic(), number % epochs
        if epoch == 0:
            optimizer = make_optimizer(config, student)
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + number)
        batches = epoch_batches(len(used), config.batch_size, config.seed, epoch)
        description = f"{folder.name}, epoch {number + 1}/{rounds * epochs}"
        for step, batch in enumerate(progress.each(batches, description)):
            set_learning_rate(config, optimizer, epoch + step / len(batches))
            rows = used[batch]
            value = loss(hidden[rows], labels[rows], generator)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        seconds += time.monotonic() - started
        if keep_epochs:
            _save(epoch_file(folder, number + 1), student, optimizer, number + 1, seconds)
        _save(folder / run_folder.CHECKPOINT, student, optimizer, number + 1, seconds)
    student.eval()
    return seconds


def epoch_file(folder: Path, epochs: int) -> Path:
    return folder / f"epoch-{epochs}.pt"


def read_epoch(path: Path, student: nn.Module) -> float:
    """Weights as they were after an epoch, and the seconds of training until then."""
    saved = torch.load(path, weights_only=True)
    student.load_state_dict(saved["student"])
    return float(saved["seconds"])


def _save(
    path: Path, student: nn.Module, optimizer: torch.optim.Optimizer, epochs: int, seconds: float
) -> None:
    temporary = path.with_suffix(".tmp")
    state = {"student": student.state_dict(), "epochs": epochs, "seconds": seconds}
    if path.name == run_folder.CHECKPOINT:
        state["optimizer"] = optimizer.state_dict()
    torch.save(state, temporary)
    temporary.replace(path)


def _load(folder: Path, student: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
    path = folder / run_folder.CHECKPOINT
    if not path.exists():
        return 0, 0.0
    saved = torch.load(path, weights_only=True)
    student.load_state_dict(saved["student"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["epochs"]), float(saved["seconds"])


# --- the loss ----------------------------------------------------------------------------------


def softmax_loss(student_rows: Callable[[], Tensor], inputs: Inputs) -> Loss:
    """Cross-entropy of a layer with rows [N,D] against labels mixed with the head's distribution.

    Over all classes, or for large N over each row's label and J classes drawn for the batch; the
    estimate then differs by a term that has no gradient.
    """
    head = torch.from_numpy(inputs.head.weight)
    distil = VectorsConfig().distil
    proposal = torch.from_numpy(inputs.frequencies()).double() ** 0.75
    share = proposal / proposal.sum()

    def full(hidden: Tensor, labels: Tensor, _: torch.Generator) -> Tensor:
        loss: Tensor = _LossInParts.apply(student_rows(), hidden, head, labels, distil)
        return loss

    def sampled(hidden: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        drawn = torch.multinomial(proposal, SAMPLES, replacement=True, generator=generator)  # [J]
        # A drawn class stands for 1 / (J q) classes.
        correction = -(SAMPLES * share[drawn]).log().float()
        with torch.no_grad():
            teacher = candidate_logits(head, hidden, labels, drawn, correction)
        student = candidate_logits(student_rows(), hidden, labels, drawn, correction)
        return mixed_loss(student, teacher, torch.zeros_like(labels), distil)

    return sampled if samples_softmax(inputs.n_classes) else full


def samples_softmax(n_classes: int) -> bool:
    return n_classes > SAMPLE_ABOVE


def drawn(n_classes: int) -> dict[str, int]:
    """For the record: how many classes the loss was estimated from, if it was."""
    return {"sampled_classes": SAMPLES} if samples_softmax(n_classes) else {}


def mixed_loss(student: Tensor, teacher: Tensor, target: Tensor, distil: float) -> Tensor:
    """Mean cross-entropy of logits [B,C] against a target column [B] and a teacher [B,C]."""
    loss: Tensor = _MixedLoss.apply(student, teacher, target, distil)
    return loss


class _MixedLoss(torch.autograd.Function):
    """With its gradient written out: passes over [B,C] are what an epoch consists of."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        student: Tensor,
        teacher: Tensor,
        target: Tensor,
        distil: float,
    ) -> Tensor:
        wanted = torch.softmax(teacher, dim=1).mul_(distil)
        wanted[torch.arange(len(target)), target] += 1 - distil
        normaliser = student.logsumexp(dim=1)  # [B]
        loss = (normaliser - torch.einsum("bc,bc->b", wanted, student)).mean()
        gradient = (student - normaliser[:, None]).exp_().sub_(wanted).div_(len(target))
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        upstream: Tensor,
    ) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None, None, None


class _LossInParts(torch.autograd.Function):
    """`mixed_loss` of rows [N,D] that are all scored, for few of [B,D] at a time.

    Logits of a part stay in the cache; [B,N] of all would go through memory many times.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        rows: Tensor,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        distil: float,
    ) -> Tensor:
        loss, gradient = rows.new_zeros(()), torch.zeros_like(rows)
        for part, label in zip(hidden.split(PART), labels.split(PART), strict=True):
            wanted = torch.softmax(part @ head.T, dim=1).mul_(distil)  # [b,N]
            wanted[torch.arange(len(label)), label] += 1 - distil
            scores = part @ rows.T  # [b,N]
            normaliser = scores.logsumexp(dim=1)  # [b]
            loss += (normaliser - torch.einsum("bc,bc->b", wanted, scores)).sum()
            gradient.addmm_(scores.sub_(normaliser[:, None]).exp_().sub_(wanted).T, part)
        ctx.save_for_backward(gradient.div_(len(hidden)))
        return loss / len(hidden)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        upstream: Tensor,
    ) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None, None, None, None


def candidate_logits(
    rows: Tensor, hidden: Tensor, labels: Tensor, drawn: Tensor, correction: Tensor
) -> Tensor:
    """Logits of each row's label, first, and of the drawn classes: [B,1+J]."""
    own = (hidden * rows[labels]).sum(dim=1, keepdim=True)
    others = hidden @ rows[drawn].T + correction
    return torch.cat([own, others.masked_fill(drawn == labels[:, None], MASKED)], dim=1)
