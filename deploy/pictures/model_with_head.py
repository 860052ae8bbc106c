"""The demo model with all that live traffic can be compared with: its head, its recall and how sure
its gate is.

K experts, R classes of all experts, N classes, D hidden.
"""

from pathlib import Path

import numpy as np

from deploy.pictures.traffic import Rows
from service import bundle
from service.bundle import TrainingFacts, graphs
from service.bundle.manifest import RECALL_AT
from service.engine import Engine
from trainer.export.training_facts import gate_facts

TEST_ROWS = 2000


def write_headed(source: Path, path: Path, rows: Rows) -> None:
    """A bundle as `source`. No full softmax was kept beside it, so the experts' own rows, of which
    each class has one, make its head."""
    read = bundle.read(source)
    weight = np.concatenate([read.expert_weight(k) for k in range(rows.n_experts)])  # [R,D]
    head = np.zeros((read.manifest.n_classes, rows.width), np.float32)  # [N,D]
    head[read.classes] = weight
    gate = graphs.constants(read.gate_model)
    hidden = rows.draw(np.arange(rows.n_experts), TEST_ROWS)
    served = Engine(read).topk(hidden, max(RECALL_AT)).classes  # [B,k]
    full = np.argsort(-(hidden @ head.T), axis=1)[:, : max(RECALL_AT)]  # [B,k]
    recall = {
        str(at): float((served[:, :at, None] == full[:, None, :at]).sum() / (at * len(hidden)))
        for at in RECALL_AT
    }
    measured = {"gates": gate_facts(hidden, gate["U"], gate.get("bias")), "head_recall": recall}
    bundle.write(
        path,
        gate=gate["U"],
        gate_bias=gate.get("bias"),
        weight=weight,
        offsets=read.offsets,
        classes=read.classes,
        n_classes=read.manifest.n_classes,
        training=TrainingFacts(**read.manifest.training.model_dump() | measured),
        labels=read.labels,
        samples=read.samples,
        head=head,
    )
