"""Vectors, labels and a head of any size, to try how long training takes: random but clustered.

Classes lie around centres, some of them far more frequent than others, and a query row lies near
its class: as of a real model, whose first answers are few of all classes.

    python -m benchmarks.training.clustered_vectors made-up --classes 200000 --rows 400000
    dss train --hidden made-up/hidden.npy --labels made-up/labels.npy --head made-up/head.npy \
        --objective accuracy --speedup 20 --out runs/made-up
"""

from pathlib import Path

import click
import numpy as np
from numpy.lib.format import open_memmap

PER_CENTRE = 200  # classes
SPREAD, NOISE = 1.0, 3.0  # of classes around their centre, of query rows around their class
AT_ONCE = 20_000
LOGITS = 12.0  # the largest, about: neither sure of every answer nor of none


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--classes", type=click.IntRange(min=PER_CENTRE), default=200_000, show_default=True)
@click.option("--width", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--rows", type=click.IntRange(min=1), default=400_000, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def main(out: Path, classes: int, width: int, rows: int, seed: int) -> None:
    """Write hidden.npy, labels.npy and head.npy to the folder OUT."""
    write(out, classes, width, rows, seed)


def write(out: Path, n_classes: int, width: int, n_rows: int, seed: int = 0) -> None:
    out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((n_classes // PER_CENTRE + 1, width), np.float32)
    around = np.arange(n_classes) // PER_CENTRE
    head = centres[around] + SPREAD * rng.standard_normal((n_classes, width), np.float32)
    head *= np.sqrt(LOGITS / width)
    np.save(out / "head.npy", head)
    frequency = 1 / (1 + rng.permutation(n_classes))
    labels = rng.choice(n_classes, size=n_rows, p=frequency / frequency.sum())
    np.save(out / "labels.npy", labels.astype(np.int32))
    hidden = open_memmap(out / "hidden.npy", "w+", np.float32, (n_rows, width))
    scale = NOISE * np.sqrt(LOGITS / width)
    for start in range(0, n_rows, AT_ONCE):
        part = labels[start : start + AT_ONCE]
        noise = rng.standard_normal((len(part), width), np.float32)
        hidden[start : start + len(part)] = head[part] + scale * noise
    hidden.flush()


if __name__ == "__main__":
    main()
