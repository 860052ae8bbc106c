"""What is served: a sparse layer, a full softmax over the same classes, and rows to ask about.

N classes, D hidden, K experts, R rows of all experts.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from benchmarks.http.body_formats import Classes, Rows
from benchmarks.peers import answers
from service import bundle
from service.engine import Engine

# WikiText-2's size, and about the classes per expert of a layer that was trained on it.
N_CLASSES, HIDDEN_SIZE, N_EXPERTS, EXPERT_SIZE = 33_278, 200, 64, 650
ROWS = 4096
OPSET, IR_VERSION = 17, 8


@dataclass(frozen=True)
class Models:
    folder: Path  # a models folder that holds the sparse bundle as `topk`
    paths: dict[str, Path]  # sparse: the bundle; full: a graph
    hidden: Rows  # rows to ask about
    facts: dict[str, object]

    def bodies(self, rows: int, count: int) -> list[Rows]:
        """As many requests of as many rows, none twice while there are enough."""
        picked = np.arange(rows * count) % len(self.hidden)
        return [np.ascontiguousarray(part) for part in np.split(self.hidden[picked], count)]

    def expected(self, model: str, bodies: list[Rows]) -> list[Classes]:
        answer = answers.load(model, self.paths[model])
        return [answer(body)[0] for body in bodies]


def prepare(folder: Path, source: Path | None, hidden: Path | None, seed: int = 0) -> Models:
    """From a bundle and its rows, or else random ones."""
    path = folder / "models" / "topk" / "1"
    if source is None:
        made = write_random(path, N_CLASSES, EXPERT_SIZE, seed)
    else:
        shutil.copytree(source, path)
        made = bundle.read(path)
    if hidden is not None:
        rows = np.load(hidden, mmap_mode="r", allow_pickle=False)[:ROWS].astype(np.float32)
    else:
        rng = np.random.default_rng(seed)
        rows = rng.normal(size=(ROWS, made.manifest.hidden_size)).astype(np.float32)
    full = folder / "full.onnx"
    manifest = made.manifest
    rng = np.random.default_rng(seed + 1)
    # What a full softmax costs is in the size of its matrix alone.
    write_full(full, rng.normal(size=(manifest.n_classes, manifest.hidden_size)))
    sizes = np.array(manifest.expert_sizes)
    return Models(
        folder=folder / "models",
        paths={"sparse": path, "full": full},
        hidden=rows,
        facts={
            "bundle": "random" if source is None else source.resolve().parent.name,
            "n_classes": manifest.n_classes,
            "hidden_size": manifest.hidden_size,
            "n_experts": manifest.n_experts,
            "classes_scored_per_row": float(sizes[Engine(made).topk(rows, 1).experts].mean()),
            "bundle_bytes": size(made),
            "k": answers.K,
        },
    )


def write_random(path: Path, n_classes: int, expert_size: int, seed: int) -> bundle.Bundle:
    """Every class is in an expert, and experts are filled up with classes of others."""
    rng = np.random.default_rng(seed)
    held = []
    for own in np.array_split(rng.permutation(n_classes), N_EXPERTS):
        others = np.setdiff1d(np.arange(n_classes), own)
        more = rng.choice(others, max(0, expert_size - len(own)), replace=False)
        held.append(np.sort(np.concatenate([own, more])))
    sizes = [len(classes) for classes in held]
    total = sum(sizes)
    even = [1 / N_EXPERTS] * N_EXPERTS
    return bundle.write(
        path,
        gate=rng.normal(size=(N_EXPERTS, HIDDEN_SIZE)).astype(np.float32),
        weight=(rng.normal(size=(total, HIDDEN_SIZE)) / HIDDEN_SIZE**0.5).astype(np.float32),
        offsets=np.cumsum([0, *sizes]),
        classes=np.concatenate(held).astype(np.int32),
        n_classes=n_classes,
        training=bundle.TrainingFacts(
            utilization=even, flops_speedup=bundle.flops_speedup(n_classes, sizes, even)
        ),
    )


def size(made: bundle.Bundle) -> int:
    return sum(entry.bytes for entry in made.manifest.files.values())


def write_full(path: Path, weight: NDArray[np.float64]) -> None:
    """hidden [B,D] -> score, position [B,k]: a product and a top-k."""
    hidden = helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["B", weight.shape[1]])
    score = helper.make_tensor_value_info("score", TensorProto.FLOAT, ["B", answers.K])
    position = helper.make_tensor_value_info("position", TensorProto.INT64, ["B", answers.K])
    nodes = [
        helper.make_node("MatMul", ["hidden", "W"], ["logits"]),
        helper.make_node("TopK", ["logits", "k"], ["score", "position"], axis=1),
    ]
    constants = [
        numpy_helper.from_array(np.ascontiguousarray(weight.T, np.float32), "W"),  # [D,N]
        numpy_helper.from_array(np.array([answers.K]), "k"),
    ]
    graph = helper.make_graph(nodes, "full", [hidden], [score, position], constants)
    opsets = [helper.make_opsetid("", OPSET)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION), path)
