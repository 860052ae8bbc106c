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
from service.bundle import graphs, head_rows
from service.bundle import labels as class_labels
from service.bundle.bundle import Bundle
from service.bundle.contract import Contract
from service.bundle.finite import check_finite
from service.bundle.format import (
    CLASSES,
    EXPERTS,
    FORMAT_VERSION,
    GATE,
    HEAD,
    HEAD_FILE,
    LABELS,
    MANIFEST,
    OFFSETS,
    QUANTISED,
    REST,
    ROW_TYPE,
    ROWS_VERSION,
    SAMPLES,
    SCALES,
    STORED,
    WEIGHTS,
    Objective,
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
    weight: NDArray[np.float32] | None = None,  # [R,D] of all experts, one after the other
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
    head: NDArray[np.float32] | None = None,  # [N,D] the full softmax, for exact answers
    head_bias: NDArray[np.float32] | None = None,  # [N]
    objective: Objective = "accuracy",
    rest: NDArray[np.float32] | None = None,  # [K,D+1]
    contract: Contract | None = None,
) -> Bundle:
    """Writes a bundle to a folder that must not exist yet, and reads it back verified.

    The experts of a fidelity bundle have the head's own rows: it needs `head` and `rest`, and has
    no `weight`, `bias`, `previews` or choice of a precision.
    Files go to a temporary folder beside it that is renamed when complete, so `path` never holds
    half a bundle.
    """
    if path.exists():
        raise errors.BundleExists(f"{path} exists already; a bundle is never overwritten.")
    faithful = objective == "fidelity"
    if (
        faithful != (weight is None)
        or faithful != (rest is not None)
        or (faithful and head is None)
    ):
        raise ValueError("A fidelity bundle has head and rest, an accuracy bundle has weight.")
    if faithful and (previews or bias is not None):
        raise ValueError("The experts of a fidelity bundle have the head's rows and its bias.")
    if previews and precision != "fp32":
        raise errors.PrecisionUnsuitable("Experts approximated by SVD are stored as fp32 only.")
    given = {"gate": gate, "gate_bias": gate_bias, "weight": weight, "bias": bias}
    given |= {"head": head, "head_bias": head_bias, "rest": rest}
    for name, numbers in given.items():
        if numbers is not None:
            check_finite(f"The array {name}", np.ascontiguousarray(numbers))
    n_experts, hidden_size = gate.shape
    offsets, classes = offsets.astype("<i8"), classes.astype("<i4")
    files: dict[str, bytes | memoryview] = {
        GATE: graphs.gate_graph(gate.astype(np.float32), _float32(gate_bias)),
        OFFSETS: npy.write(offsets),
        CLASSES: npy.write(classes),
    }
    if head is not None:
        files |= _head_files(EXPERTS if faithful else HEAD, head, _float32(head_bias))
    if weight is not None:
        files |= _expert_files(
            weight, offsets, n_classes, _float32(bias), dict(previews or {}), precision
        )
    elif head is not None and rest is not None:
        rest = rest.astype("<f4")
        files |= _shared_files(offsets, classes, head.shape, _float32(head_bias), rest)
        precision = "int8"
    if labels is not None:
        files[LABELS] = class_labels.encode(labels, n_classes)
    if samples is not None and len(samples):
        files[SAMPLES] = npy.write(samples.astype("<f4"))
    manifest = Manifest(
        format_version=FORMAT_VERSION if head is None else ROWS_VERSION,
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
        objective=objective,
        contract=contract,
        files={
            name: FileEntry(sha256=sha256(content), bytes=memoryview(content).nbytes)
            for name, content in sorted(files.items())
        },
    )
    # The manifest goes last: a folder without one is not a bundle.
    _write_folder(path, files | {MANIFEST: _manifest_bytes(manifest)})
    return read(path, head=head is not None)


def _manifest_bytes(manifest: Manifest) -> bytes:
    # Earlier releases read version 2, and know none of these.
    unknown = set() if manifest.head else {"head", "objective"}
    unknown |= {"contract"} if manifest.contract is None else set()
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
    folder: str,
    weight: NDArray[np.float32],  # [N,D]
    bias: NDArray[np.float32] | None,  # [N]
) -> dict[str, bytes | memoryview]:
    """The full softmax: its graph, and its rows as they are and in whole steps."""
    rows = np.ascontiguousarray(weight, ROW_TYPE)
    quantised, scales = head_rows.quantise(rows)
    return {
        f"{folder}/{HEAD_FILE}": graphs.head_graph(_head_matrix(rows.shape), bias),
        f"{folder}/{WEIGHTS}": rows.ravel().data.cast("B"),
        f"{folder}/{QUANTISED}": quantised.ravel().data.cast("B"),
        f"{folder}/{SCALES}": npy.write(scales.astype("<f4")),
    }


def _shared_files(
    offsets: NDArray[np.int64],
    classes: NDArray[np.int32],
    shape: tuple[int, ...],  # N, D
    bias: NDArray[np.float32] | None,  # [N]
    rest: NDArray[np.float32],  # [K,D+1]
) -> dict[str, bytes | memoryview]:
    """The graphs of experts that gather the head's rows, and their estimates of other classes."""
    files: dict[str, bytes | memoryview] = {REST: npy.write(rest)}
    for expert, (first, end) in enumerate(pairwise(offsets.tolist())):
        if first < end:
            held = classes[first:end].astype(np.int64)
            added = None if bias is None else bias[held]
            graph = graphs.shared_graph(_head_matrix(shape), held, rest[expert], added)
            files[expert_file(expert)] = graph
    return files


def _head_matrix(shape: tuple[int, ...]) -> External:
    n_classes, hidden_size = shape
    return External(WEIGHTS, 0, graphs.FLOAT, (n_classes, hidden_size))


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
