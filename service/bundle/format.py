"""How a bundle is laid down on disk: the files of its experts, and a folder that is whole or not.

D hidden, V classes of one expert, R classes of all.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from service import errors
from service.bundle import graphs
from service.bundle.graphs import External, Preview

WEIGHTS, QUANTISED = "weights.bin", "quantised.bin"  # in experts/, beside the graphs
HEAD_GRAPH, HEAD_WEIGHTS = "head/head.onnx", f"head/{WEIGHTS}"

Precision = Literal["fp32", "fp16", "int8"]
STORED: Mapping[Precision, tuple[int, np.dtype[Any]]] = {  # of the matrices in weights.bin
    "fp32": (graphs.FLOAT, np.dtype("<f4")),
    "fp16": (graphs.FLOAT16, np.dtype("<f2")),
    "int8": (graphs.FLOAT, np.dtype("<f4")),
}


def expert_file(expert: int) -> str:
    return f"experts/{expert:03d}.onnx"


def expert_files(
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
            steps, scale = graphs.quantise(rows)
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


def head_files(
    weight: NDArray[np.float32],  # [N,D]
    bias: NDArray[np.float32] | None,  # [N]
    precision: Precision,
) -> dict[str, bytes | memoryview]:
    """A full softmax, as an expert that holds every class."""
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
    if not np.isfinite(stored).all() and np.isfinite(matrix).all():
        raise errors.PrecisionUnsuitable(f"A weight is too large for {dtype.name}.")
    return stored


def write_folder(path: Path, files: Mapping[str, bytes | memoryview]) -> None:
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
