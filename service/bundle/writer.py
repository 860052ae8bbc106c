"""Writes a bundle: the graphs, the matrices beside them, the index and the manifest.

D hidden, K experts, V classes of one expert, R classes of all experts, N classes, S samples.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version as distribution_version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service import errors, npy
from service.bundle import graphs
from service.bundle import labels as class_labels
from service.bundle.bundle import Bundle
from service.bundle.finite import check_finite
from service.bundle.format import (
    CLASSES,
    FORMAT_VERSION,
    GATE,
    HEAD_GRAPH,
    HEAD_VERSION,
    HEAD_WEIGHTS,
    LABELS,
    MANIFEST,
    OFFSETS,
    QUANTISED,
    SAMPLES,
    STORED,
    WEIGHTS,
    Precision,
    expert_file,
)
from service.bundle.graphs import External, Preview
from service.bundle.manifest import NO_CHECKSUM, FileEntry, Manifest, TrainingFacts, sha256
from service.bundle.quantisation import quantise
from service.bundle.reader import read


def write(
    path: Path,
    *,
    gate: NDArray[np.float32],  # [K,D]
    weight: NDArray[np.float32],  # [R,D] the rows of all experts, one expert after the other
    offsets: NDArray[np.int64],  # [K+1]
    classes: NDArray[np.int32],  # [R]
    n_classes: int,
    training: TrainingFacts,
    labels: Sequence[str] | None = None,
    samples: NDArray[np.float32] | None = None,  # [S,D]
    gate_bias: NDArray[np.float32] | None = None,  # [K]
    bias: NDArray[np.float32] | None = None,  # [R]
    previews: Mapping[int, Preview] | None = None,  # of the experts to approximate
    precision: Precision = "fp32",
    head: NDArray[np.float32] | None = None,  # [N,D] the full softmax, to compare answers with
    head_bias: NDArray[np.float32] | None = None,  # [N]
) -> Bundle:
    """Writes a bundle to a folder that must not exist yet, and reads it back verified.

    Files go to a temporary folder beside it that is renamed when complete, so `path` never holds
    half a bundle.
    """
    if path.exists():
        raise errors.BundleExists(f"{path} exists already; a bundle is never overwritten.")
    if previews and precision != "fp32":
        raise errors.PrecisionUnsuitable("Experts approximated by SVD are stored as fp32 only.")
    given = {"gate": gate, "gate_bias": gate_bias, "weight": weight, "bias": bias}
    for name, numbers in (given | {"head": head, "head_bias": head_bias}).items():
        if numbers is not None:
            check_finite(f"The array {name}", np.ascontiguousarray(numbers))
    n_experts, hidden_size = gate.shape
    offsets, classes = offsets.astype("<i8"), classes.astype("<i4")
    files: dict[str, bytes | memoryview] = {
        GATE: graphs.gate_graph(gate.astype(np.float32), _float32(gate_bias)),
        OFFSETS: npy.write(offsets),
        CLASSES: npy.write(classes),
    }
    files |= _expert_files(
        weight, offsets, n_classes, _float32(bias), dict(previews or {}), precision
    )
    if head is not None:
        files |= _head_files(head, _float32(head_bias), precision)
    if labels is not None:
        files[LABELS] = class_labels.encode(labels, n_classes)
    if samples is not None and len(samples):
        files[SAMPLES] = npy.write(samples.astype("<f4"))
    manifest = Manifest(
        format_version=FORMAT_VERSION if head is None else HEAD_VERSION,
        precision=precision,
        checksum=NO_CHECKSUM,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        producer=f"doubly-sparse-softmax {distribution_version('doubly-sparse-softmax')}",
        n_classes=n_classes,
        hidden_size=hidden_size,
        n_experts=n_experts,
        expert_sizes=np.diff(offsets).tolist(),
        labels=labels is not None,
        samples=0 if samples is None else len(samples),
        training=training,
        head=head is not None,
        files={
            name: FileEntry(sha256=sha256(content), bytes=memoryview(content).nbytes)
            for name, content in sorted(files.items())
        },
    )
    # The manifest goes last: a folder without one is not a bundle.
    _write_folder(path, files | {MANIFEST: _manifest_bytes(manifest)})
    return read(path, head=head is not None)


def _manifest_bytes(manifest: Manifest) -> bytes:
    # Earlier releases read version 2, and know no head.
    unknown = None if manifest.head else {"head"}
    content = manifest.model_dump_json(indent=2, exclude=unknown).encode() + b"\n"
    stated = f'"checksum": "{NO_CHECKSUM}"'.encode()
    return content.replace(stated, f'"checksum": "{sha256(content)}"'.encode())


def _float32(array: NDArray[np.floating[Any]] | None) -> NDArray[np.float32] | None:
    return None if array is None else array.astype(np.float32)


def _expert_files(
    weight: NDArray[np.float32],
    offsets: NDArray[np.int64],
    n_classes: int,
    bias: NDArray[np.float32] | None,
    previews: dict[int, Preview],
    precision: Precision,
) -> dict[str, bytes | memoryview]:
    """The graphs of all experts, and the files of their matrices."""
    dtype, stored = STORED[precision]
    n_rows, hidden_size = weight.shape
    numbers = np.empty(n_rows * hidden_size, stored)
    quantised = np.empty(n_rows * hidden_size if precision == "int8" else 0, np.int8)
    files: dict[str, bytes | memoryview] = {}
    for expert, (first, end) in enumerate(pairwise(offsets.tolist())):
        if first == end:
            continue
        held, size = slice(first * hidden_size, end * hidden_size), end - first
        rows = weight[first:end].astype(np.float32)  # [V,D]
        added = None if bias is None else bias[first:end]  # [V]
        preview = previews.get(expert)
        outside = External(WEIGHTS, held.start * stored.itemsize, dtype, (size, hidden_size))
        if preview is not None:
            numbers[held] = rows.ravel()
            graph = graphs.expert_svd_graph(outside, n_classes, preview, added)
        elif precision == "int8":
            numbers[held] = rows.ravel()
            steps, scale = quantise(rows)
            quantised[held] = steps.ravel()
            outside8 = External(QUANTISED, held.start, graphs.INT8, (size, hidden_size))
            graph = graphs.expert_int8_graph(outside, outside8, scale, n_classes, added)
        else:
            numbers[held] = _stored(rows.T, stored).ravel()
            by_column = replace(outside, shape=(hidden_size, size))
            graph = graphs.expert_graph(by_column, n_classes, added)
        files[expert_file(expert)] = graph
    files[f"experts/{WEIGHTS}"] = numbers.data.cast("B")
    if precision == "int8":
        files[f"experts/{QUANTISED}"] = quantised.data.cast("B")
    return files


def _head_files(
    weight: NDArray[np.float32],  # [N,D]
    bias: NDArray[np.float32] | None,  # [N]
    precision: Precision,
) -> dict[str, bytes | memoryview]:
    """The graph and the matrix of the full softmax, an expert that holds every class."""
    dtype, stored = STORED[precision]
    n_classes, hidden_size = weight.shape
    outside = External(WEIGHTS, 0, dtype, (hidden_size, n_classes))
    numbers = np.ascontiguousarray(_stored(weight.astype(np.float32).T, stored)).ravel()
    return {
        HEAD_GRAPH: graphs.expert_graph(outside, n_classes, bias),
        HEAD_WEIGHTS: numbers.data.cast("B"),
    }


def _stored(matrix: NDArray[np.float32], dtype: np.dtype[Any]) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        stored = matrix.astype(dtype)
    if not np.isfinite(stored).all():
        raise errors.PrecisionUnsuitable(f"A weight is too large for {dtype.name}.")
    return stored


def _write_folder(path: Path, files: Mapping[str, bytes | memoryview]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        for name, content in files.items():
            file = temporary / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
        for folder in {(temporary / name).parent for name in files}:
            _sync_folder(folder)
        temporary.rename(path)
        _sync_folder(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
