"""Training of the word model: truncated back-propagation through time, resumable at any step.

T steps, S parallel streams of text, B = T * S rows, D hidden, N classes, J sampled classes.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from dataclasses import dataclass as plain_dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import LinearCrossEntropyOptions
from torch.nn.functional import linear_cross_entropy
from torch.nn.utils import clip_grad_norm_

from service.terminal import progress as bars
from trainer.data import run_folder
from trainer.layer.losses import sampled_loss
from trainer.tasks.language_model.corpus import Corpus
from trainer.tasks.language_model.encoder import Encoder, State
from trainer.tasks.language_model.hidden_states import mean_loss
from trainer.training.config import SAMPLE_ABOVE, SAMPLES
from trainer.training.loop import Interrupted, MetricsLog, smoothed

# Logits of so many rows at a time: [B,N] of all of them would go through memory several times.
IN_PARTS = LinearCrossEntropyOptions(batch_chunk_size=128, acc_policy="compact")


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class EncoderConfig:
    seed: int = 0

    # the model
    units: int = Field(200, ge=1)
    layers: int = Field(2, ge=1)
    dropout: float = Field(0.3, ge=0, lt=1)

    # the optimizer (Adam)
    epochs: int = Field(20, ge=1)
    streams: int = Field(20, ge=1)  # of text, side by side
    steps: int = Field(35, ge=1)  # through which gradients flow
    learning_rate: float = Field(0.003, gt=0)
    clip_norm: float = Field(0.5, gt=0)
    learning_rate_end: float = Field(0.02, ge=0, le=1)  # share of it left; falls linearly

    # with more classes than this, all but the last epochs estimate the softmax from a sample
    sample_above: int = Field(SAMPLE_ABOVE, ge=1)
    samples: int = Field(SAMPLES, ge=1)
    full_epochs: int = Field(1, ge=1)

    # the run
    valid_words: int = Field(50_000, ge=1)  # the first of that text: epochs are compared on them
    checkpoint_seconds: float = Field(60.0, ge=0)
    threads: int | None = Field(None, ge=1)  # None: as many as PyTorch finds


@plain_dataclass
class Progress:
    epoch: int = 0
    step: int = 0  # of this epoch
    loss: float = math.inf  # smoothed
    best: float = math.inf  # validation loss of the weights that are kept
    seconds: float = 0.0


@plain_dataclass
class Training:
    """All that a checkpoint holds, beside the random state."""

    encoder: Encoder
    optimizer: torch.optim.Optimizer
    progress: Progress
    state: State | None  # of the streams
    kept: dict[str, Tensor]  # the best weights so far


def train_encoder(
    config: EncoderConfig,
    corpus: Corpus,
    folder: Path,
    stopped: Callable[[], bool],
    *,
    resume: bool = False,
) -> Encoder:
    """The encoder with the weights that did best on the validation text."""
    folder.mkdir(parents=True, exist_ok=True)
    now = start_training(config, len(corpus.vocabulary))
    if resume and (folder / run_folder.CHECKPOINT).exists():
        load_checkpoint(folder, now)
    encoder, progress = now.encoder, now.progress
    inputs, labels = training_streams(corpus, config.streams)  # [L,S]
    n_steps = math.ceil(len(inputs) / config.steps)
    frequency = torch.from_numpy(np.bincount(corpus.splits["train"], minlength=encoder.n_classes))
    proposal = frequency.double() ** 0.75
    before, started = progress.seconds, time.monotonic()
    saved = started

    def save() -> None:
        nonlocal saved
        progress.seconds = before + time.monotonic() - started
        save_checkpoint(folder, now)
        saved = time.monotonic()

    finished = progress.epoch * n_steps + progress.step
    shown = bars.bar("encoder", config.epochs * n_steps, done=finished)
    encoder.train()
    with MetricsLog(folder, progress.epoch) as log, shown as bar:
        while progress.epoch < config.epochs:
            bar.describe(f"encoder, epoch {progress.epoch + 1}/{config.epochs}")
            sampled = samples_softmax(config, encoder.n_classes, progress.epoch)
            while progress.step < n_steps:
                piece = slice(progress.step * config.steps, (progress.step + 1) * config.steps)
                set_learning_rate(config, now, n_steps)
                loss = training_step(
                    config, now, inputs[piece], labels[piece], proposal if sampled else None
                )
                progress.step += 1
                progress.loss = smoothed(progress.loss, loss)
                bar.advance(loss=f"{progress.loss:.3f}")
                if stopped():
                    save()
                    raise Interrupted(f"Stopped; the encoder so far is in {folder}: resume it.")
                if time.monotonic() - saved > config.checkpoint_seconds:
                    save()
            finish_epoch(config, now, corpus, log, sampled=sampled)
        save()
    encoder.load_state_dict(now.kept)
    return encoder.eval()


def start_training(config: EncoderConfig, n_classes: int) -> Training:
    torch.manual_seed(config.seed)
    encoder = Encoder(n_classes, config.units, layers=config.layers, dropout=config.dropout)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=config.learning_rate, fused=True)
    return Training(encoder, optimizer, Progress(), None, weights(encoder))


def training_streams(corpus: Corpus, n_streams: int) -> tuple[Tensor, Tensor]:
    """Words and the words after them, both [L,S]; a rest shorter than the streams is left out."""
    tokens = torch.from_numpy(corpus.splits["train"]).long()
    length = len(tokens) // n_streams
    words = torch.cat([torch.tensor([corpus.start]), tokens[:-1]])

    def cut(row: Tensor) -> Tensor:
        return row[: n_streams * length].view(n_streams, length).T.contiguous()

    return cut(words), cut(tokens)


def set_learning_rate(config: EncoderConfig, now: Training, n_steps: int) -> None:
    """From the full rate at the first step down to its end at the last."""
    done = (now.progress.epoch + now.progress.step / n_steps) / config.epochs
    for group in now.optimizer.param_groups:
        group["lr"] = config.learning_rate * (1 - done * (1 - config.learning_rate_end))


def training_step(
    config: EncoderConfig, now: Training, words: Tensor, labels: Tensor, proposal: Tensor | None
) -> float:
    hidden, state = now.encoder(words, now.state)  # [T,S,D]
    now.state = (state[0].detach(), state[1].detach())
    rows, labels = hidden.flatten(0, 1), labels.flatten()  # [B,D], [B]
    head = now.encoder.head.weight  # [N,D]
    if proposal is None:
        loss = linear_cross_entropy(rows, head, labels, options=IN_PARTS)
    else:
        loss = sampled_loss(rows, labels, head, proposal, config.samples)
    now.optimizer.zero_grad()
    loss.backward()
    clip_grad_norm_(now.encoder.parameters(), config.clip_norm)
    now.optimizer.step()
    return loss.item()


def samples_softmax(config: EncoderConfig, n_classes: int, epoch: int) -> bool:
    return n_classes > config.sample_above and epoch < config.epochs - config.full_epochs


def finish_epoch(
    config: EncoderConfig, now: Training, corpus: Corpus, log: MetricsLog, *, sampled: bool
) -> None:
    """Keep the weights if they are the best so far."""
    encoder, progress = now.encoder, now.progress
    encoder.eval()
    valid = corpus.splits["valid"][: config.valid_words]
    loss = mean_loss(encoder, valid, corpus.start, config.streams)
    encoder.train()
    (group,) = now.optimizer.param_groups
    progress.epoch, progress.step, now.state = progress.epoch + 1, 0, None
    log.write(
        {
            "epoch": progress.epoch,
            "loss": progress.loss,
            "valid_perplexity": math.exp(loss),
            "learning_rate": group["lr"],
            "sampled": sampled,
        }
    )
    if loss < progress.best:
        progress.best, now.kept = loss, weights(encoder)


def weights(encoder: Encoder) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in encoder.state_dict().items()}


def save_checkpoint(folder: Path, now: Training) -> None:
    path = folder / run_folder.CHECKPOINT
    temporary = path.with_suffix(".tmp")
    torch.save(
        {
            "encoder": now.encoder.state_dict(),
            "optimizer": now.optimizer.state_dict(),
            "progress": asdict(now.progress),
            "state": now.state,
            "kept": now.kept,
            "random": torch.get_rng_state(),
        },
        temporary,
    )
    temporary.replace(path)


def load_checkpoint(folder: Path, now: Training) -> None:
    saved = torch.load(folder / run_folder.CHECKPOINT, weights_only=True)
    now.encoder.load_state_dict(saved["encoder"])
    now.optimizer.load_state_dict(saved["optimizer"])
    now.progress = Progress(**saved["progress"])
    now.state, now.kept = saved["state"], saved["kept"]
    torch.set_rng_state(saved["random"])
