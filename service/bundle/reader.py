"""Reads and verifies a bundle.

No code from the bundle is run: arrays are read without pickle, and graphs are checked against
a list of operators before ONNX Runtime loads them.
"""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service import errors
from service.bundle import graph_checks, graphs, head_rows, snapshots
from service.bundle import labels as class_labels
from service.bundle.bundle import Bundle
from service.bundle.finite import check_finite, first_not_finite
from service.bundle.format import (
    CLASSES,
    EXPERTS,
    GATE,
    HEAD,
    HEAD_FILE,
    HEAD_WEIGHTS,
    LABELS,
    MANIFEST,
    OFFSETS,
    QUANTISED,
    QUANTISED_TYPE,
    REST,
    ROW_TYPE,
    SAMPLES,
    SCALES,
    STORED,
    WEIGHTS,
    expert_file,
)
from service.bundle.graphs import External
from service.bundle.head_rows import HeadRows
from service.bundle.manifest import FileEntry, Manifest, check_within, read_manifest, sha256
from service.bundle.snapshots import Snapshot

# Files that are read as a whole: protobuf has this limit, and labels for every class fit in.
LARGEST_FILE = 2**31 - 1


def read(
    path: Path,
    snapshot: Snapshot = snapshots.private_copy,
    *,
    head: bool = False,
    manifest: Manifest | None = None,
) -> Bundle:
    """Reads and verifies a bundle; every way it can be wrong is a BundleError of its own.

    No file stays open: changing or deleting the files afterwards changes no answer. A head is as
    large as all experts or larger, so it is only read with `head=True`, or if the experts share its
    rows. The manifest is given if it was read already.
    """
    if manifest is None:
        manifest = read_manifest(path)
    wanted = {
        name: entry
        for name, entry in manifest.files.items()
        if head or not name.startswith(f"{HEAD}/")
    }
    files = {
        name: _read_file(path, name, entry)
        for name, entry in wanted.items()
        if not name.endswith(".bin")
    }
    offsets, classes = _read_index(files, manifest)
    gate = graph_checks.gate_signature(manifest.n_experts, manifest.hidden_size)
    graph_checks.check_graph(GATE, files[GATE], gate)
    head_file = f"{manifest.rows_folder or HEAD}/{HEAD_FILE}"
    head_model = files.get(head_file)
    bias = None
    if head_model is not None:
        _check_head(head_file, head_model, manifest)
        bias = graphs.constants(head_model).get("bias")
    rest = _read_rest(files[REST], manifest) if REST in files else None
    expert_models: list[bytes | None] = []
    previews: list[graphs.PreviewSize | None] = []
    for expert, size in enumerate(manifest.expert_sizes):
        model = files[expert_file(expert)] if size else None
        preview = None
        if model is not None:
            held = classes[offsets[expert] : offsets[expert + 1]]
            if rest is None:
                signature = _own_signature(manifest, int(offsets[expert]), size)
            else:
                signature = _shared_signature(manifest, held, rest[expert], bias)
            preview = graph_checks.check_graph(expert_file(expert), model, signature)
        expert_models.append(model)
        previews.append(preview)
    # Last, because they are large: nothing is copied of a bundle whose small files are wrong.
    copied = {
        name: _copied_file(path, name, entry, snapshot)
        for name, entry in wanted.items()
        if name.endswith(".bin")
    }
    made = Bundle(
        path=path,
        manifest=manifest,
        gate_model=files[GATE],
        expert_models=tuple(expert_models),
        offsets=offsets,
        classes=classes,
        labels=class_labels.decode(files[LABELS], manifest.n_classes) if manifest.labels else None,
        samples=_read_samples(files[SAMPLES], manifest) if manifest.samples else None,
        previews=tuple(previews),
        rest=rest,
    )
    if rest is None:
        made = replace(
            made,
            weights=_numbers(copied, f"{EXPERTS}/{WEIGHTS}", STORED[manifest.precision][1]),
            quantised=_numbers(copied, f"{EXPERTS}/{QUANTISED}", QUANTISED_TYPE),
        )
        _check_weights(made)
    if head_model is None:
        return made
    if manifest.rows_folder is not None:
        made = replace(made, rows=_read_rows(manifest.rows_folder, files, copied, manifest, bias))
        return replace(made, head=_head_layer(made, head_model))
    weights = _numbers(copied, HEAD_WEIGHTS, STORED[manifest.precision][1])
    if weights is not None:
        check_finite(HEAD_WEIGHTS, weights)
    return replace(made, head=_head_layer_by_column(made, head_model, weights))


def _check_weights(made: Bundle) -> None:
    """Those outside the graphs; the others are checked with their graphs."""
    found = None if made.weights is None else first_not_finite(made.weights)
    if found is not None:
        row = found // made.manifest.hidden_size
        expert = int(np.searchsorted(made.offsets, row, side="right")) - 1
        raise errors.WeightsNotFinite(f"W of expert {expert} holds a NaN or an infinity.")


def _read_rows(
    folder: str,
    files: dict[str, bytes],
    copied: dict[str, memoryview],
    manifest: Manifest,
    bias: NDArray[np.float32] | None,
) -> HeadRows:
    shape = (manifest.n_classes, manifest.hidden_size)
    weights = np.frombuffer(copied[f"{folder}/{WEIGHTS}"], ROW_TYPE).reshape(shape)
    quantised = np.frombuffer(copied[f"{folder}/{QUANTISED}"], QUANTISED_TYPE).reshape(shape)
    name = f"{folder}/{SCALES}"
    scales = _read_array(name, files[name], np.dtype("<f4"), shape[:1])
    check_finite(f"{folder}/{WEIGHTS}", weights)
    return head_rows.measured(folder, weights, quantised, scales, bias)


def _read_rest(content: bytes, manifest: Manifest) -> NDArray[np.float32]:
    shape = (manifest.n_experts, manifest.hidden_size + 1)
    rest = _read_array(REST, content, np.dtype("<f4"), shape)
    check_finite(REST, np.ascontiguousarray(rest))
    return rest


# --- signatures --------------------------------------------------------------------------------


def _check_head(file: str, graph: bytes, manifest: Manifest) -> None:
    n_classes, hidden_size = manifest.n_classes, manifest.hidden_size
    by_row = manifest.rows_folder is not None
    if by_row:
        outside = _head_matrix(manifest)
    else:
        dtype, _ = STORED[manifest.precision]
        outside = {"W": External(WEIGHTS, 0, dtype, (hidden_size, n_classes))}
    signature = graph_checks.expert_signature(
        n_classes, hidden_size, n_classes, outside, by_row=by_row
    )
    if graph_checks.check_graph(file, graph, signature) is not None:
        raise errors.GraphForbidden(f"{file} is approximated; a head must not be.")


def _own_signature(manifest: Manifest, first: int, size: int) -> graph_checks.Signature:
    """Of an expert with rows of its own, whose classes begin at `first`."""
    outside = _external(manifest, first, size)
    return graph_checks.expert_signature(size, manifest.hidden_size, manifest.n_classes, outside)


def _shared_signature(
    manifest: Manifest,
    held: NDArray[np.int32],  # [V]
    rest: NDArray[np.float32],  # [D+1]
    bias: NDArray[np.float32] | None,  # [N]
) -> graph_checks.Signature:
    """Of an expert that gathers its rows from the head's."""
    added = None if bias is None else bias[held]
    return graph_checks.expert_signature(
        manifest.n_classes,
        manifest.hidden_size,
        manifest.n_classes,
        _head_matrix(manifest),
        shared=graphs.shared_constants(held.astype("<i8"), rest, added),
    )


def _head_matrix(manifest: Manifest) -> dict[str, External]:
    shape = (manifest.n_classes, manifest.hidden_size)
    return {"W": External(WEIGHTS, 0, graphs.FLOAT, shape)}


def _external(manifest: Manifest, first: int, size: int) -> dict[str, External]:
    """The arrays that an expert's graph must keep outside itself; its classes begin at `first`."""
    if manifest.format_version == 1:
        return {}
    hidden_size = manifest.hidden_size
    dtype, stored = STORED[manifest.precision]
    at = first * hidden_size
    if manifest.precision != "int8":
        return {"W": External(WEIGHTS, at * stored.itemsize, dtype, (hidden_size, size))}
    shape = (size, hidden_size)
    return {
        "W": External(WEIGHTS, at * stored.itemsize, dtype, shape),
        "W8": External(QUANTISED, at, graphs.INT8, shape),
    }


# --- the head as a layer -----------------------------------------------------------------------


def _head_layer(made: Bundle, graph: bytes) -> Bundle:
    """The full softmax as a fidelity bundle of one expert, which holds all classes."""
    hidden_size = made.manifest.hidden_size
    one = _one_expert(made, graph, {"objective": "fidelity", "precision": "int8"})
    return replace(one, rest=np.zeros((1, hidden_size + 1), np.float32))


def _head_layer_by_column(made: Bundle, graph: bytes, weights: NDArray[Any] | None) -> Bundle:
    """The full softmax, of version 3, as a bundle of one expert, whose gate value is always 1."""
    precision = "fp16" if made.manifest.precision == "fp16" else "fp32"
    return replace(_one_expert(made, graph, {"precision": precision}), weights=weights)


def _one_expert(made: Bundle, graph: bytes, facts: dict[str, Any]) -> Bundle:
    manifest = made.manifest
    facts |= {"n_experts": 1, "expert_sizes": [manifest.n_classes], "contract": None}
    return replace(
        made,
        manifest=manifest.model_copy(update=facts),
        gate_model=graphs.gate_graph(np.zeros((1, manifest.hidden_size), np.float32)),
        expert_models=(graph,),
        offsets=np.array([0, manifest.n_classes]),
        classes=np.arange(manifest.n_classes, dtype=np.int32),
        previews=(None,),
        weights=None,
        quantised=None,
    )


# --- files -------------------------------------------------------------------------------------


def _copied_file(folder: Path, name: str, entry: FileEntry, snapshot: Snapshot) -> memoryview:
    """A large file's bytes in sealed memory that processes may share."""
    return snapshot(_checked_file(folder, name, entry), entry.bytes, entry.sha256)


def _numbers(copied: dict[str, memoryview], name: str, dtype: np.dtype[Any]) -> NDArray[Any] | None:
    content = copied.get(name)
    return None if content is None else np.frombuffer(content, dtype)


def _read_file(folder: Path, name: str, entry: FileEntry) -> bytes:
    if entry.bytes > LARGEST_FILE:
        raise errors.FileSizeWrong(f"{name} has more than {LARGEST_FILE} bytes.")
    content = _checked_file(folder, name, entry).read_bytes()
    if sha256(content) != entry.sha256:
        raise errors.ChecksumWrong(f"{name} does not match its checksum.")
    return content


def _checked_file(folder: Path, name: str, entry: FileEntry) -> Path:
    file = folder / name
    if not file.is_file():
        raise errors.FileMissing(f"{name} is missing from the bundle.")
    check_within(folder, name)
    size = file.stat().st_size
    if size != entry.bytes:
        raise errors.FileSizeWrong(f"{name} has {size} bytes where {entry.bytes} are expected.")
    return file


def _read_index(
    files: dict[str, bytes], manifest: Manifest
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    offsets = _read_array(OFFSETS, files[OFFSETS], np.dtype("<i8"), (manifest.n_experts + 1,))
    classes = _read_array(CLASSES, files[CLASSES], np.dtype("<i4"), (sum(manifest.expert_sizes),))
    if offsets[0] != 0 or np.diff(offsets).tolist() != manifest.expert_sizes:
        raise errors.ShapeWrong(f"{OFFSETS} disagrees with the expert sizes of {MANIFEST}.")
    if classes.size and not 0 <= classes.min() <= classes.max() < manifest.n_classes:
        raise errors.IndexOutOfRange(
            f"{CLASSES} has a class id outside 0..{manifest.n_classes - 1}."
        )
    for expert in range(manifest.n_experts):
        steps = np.diff(classes[offsets[expert] : offsets[expert + 1]])
        if (steps == 0).any():
            raise errors.DuplicateClass(f"Expert {expert} holds a class twice.")
        if (steps < 0).any():
            raise errors.ShapeWrong(f"The classes of expert {expert} are not in ascending order.")
    return offsets, classes


def _read_array(
    name: str, content: bytes, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> NDArray[Any]:
    try:
        array = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError, OSError, MemoryError, RecursionError) as error:
        raise errors.ArrayMalformed(f"{name} is not a plain .npy array.") from error
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        raise errors.ArrayMalformed(f"{name} is not a {dtype.name} .npy array.")
    if array.shape != shape:
        raise errors.ShapeWrong(f"{name} has shape {array.shape}, not {shape}.")
    return array


def _read_samples(content: bytes, manifest: Manifest) -> NDArray[np.float32]:
    shape = (manifest.samples, manifest.hidden_size)
    return _read_array(SAMPLES, content, np.dtype("<f4"), shape)
