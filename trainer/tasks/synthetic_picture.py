"""Pictures of a trained layer."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from trainer.layer import DSSoftmax


def draw_experts(layer: DSSoftmax, path: Path, *, order: NDArray[np.int64], groups: int) -> None:
    """Expert x class, black where the expert holds the class; experts in the given order.

    Classes stand in `groups` equal blocks: their true super-clusters.
    """
    held = np.zeros((layer.n_experts, layer.n_classes), bool)
    held[layer.expert_of_row.numpy(), layer.class_of_row.numpy()] = True
    figure = Figure(figsize=(5, 5), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.imshow(
        held[order], cmap="Greys", aspect="auto", interpolation="antialiased", vmin=0, vmax=1
    )
    block = layer.n_classes // groups
    axes.set_xlabel(f"sub-cluster (class), {block} to a super-cluster")
    axes.set_ylabel("expert")
    axes.set_xlim(-0.5, layer.n_classes - 0.5)
    figure.savefig(path)
