"""The bundle: a gate and pruned experts on disk. models/FORMAT.md is the specification.

Reading never runs code from the bundle: arrays are read without pickle, and graphs are checked
against a list of operators before anything loads them.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service import errors
from service.bundle import graph_checks, graphs, snapshots
from service.bundle.format import (
    HEAD_GRAPH,
    HEAD_WEIGHTS,
    QUANTISED,
    STORED,
    WEIGHTS,
    Precision,
    expert_file,
    expert_files,
    head_files,
    write_folder,
)
from service.bundle.graphs import External, Preview
from service.bundle.manifest import (
    CLASSES,
    GATE,
    HEAD_VERSION,
    LABELS,
    MANIFEST,
    NO_CHECKSUM,
    OFFSETS,
    QUANTISED_TYPE,
    SAMPLES,
    FileEntry,
    check_within,
    read_manifest,
    sha256,
)
from service.bundle.manifest import Manifest as Manifest
from service.bundle.manifest import TrainingFacts as TrainingFacts
from service.bundle.snapshots import Snapshot

FORMAT_VERSION = 2
# Files that are read as a whole: protobuf has this limit, and labels for every class fit in.
LARGEST_FILE = 2**31 - 1


@dataclass(frozen=True)
class Bundle:
    """A verified bundle in memory."""

    path: Path
    manifest: Manifest
    gate_model: bytes
    expert_models: tuple[bytes | None, ...]  # None: the expert holds no class
    offsets: NDArray[np.int64]  # [K+1]
    classes: NDArray[np.int32]  # [R] expert e holds classes[offsets[e]:offsets[e+1]], ascending
    labels: tuple[str, ...] | None
    samples: NDArray[np.float32] | None  # [S,D]
    previews: tuple[graphs.PreviewSize | None, ...]  # None: the expert scores all its classes
    # Version 1 keeps its matrices in the graphs. Since then they are files, one matrix after the
    # other: [D,V], or [V,D] if candidates' rows are gathered from it.
    weights: NDArray[np.floating[Any]] | None = None  # [R D] float32, or float16
    quantised: NDArray[np.int8] | None = None  # [R D] always [V,D] by [V,D]
    head: "Bundle | None" = None  # the full softmax as a layer of one expert, if it was asked for

    @property
    def expert_costs(self) -> tuple[float, ...]:
        """Of all experts, for no more answers than an approximated one has candidates."""
        return tuple(self.expert_cost(expert) for expert in range(self.manifest.n_experts))

    def cost_of(self, expert_rows: NDArray[np.int64], k: int) -> float:
        """What rows [K] of each expert cost together, as `expert_cost` counts."""
        searched = np.flatnonzero(expert_rows).tolist()
        return sum(int(expert_rows[e]) * self.expert_cost(e, k) for e in searched)

    def expert_cost(self, expert: int, k: int = 1) -> float:
        """What a row's k answers cost, in classes scored exactly: D multiply-adds each."""
        size, preview = self.manifest.expert_sizes[expert], self.previews[expert]
        return float(size) if preview is None else preview.cost(size, self.manifest.hidden_size, k)

    def expert_classes(self, expert: int) -> NDArray[np.int32]:
        return self.classes[self.offsets[expert] : self.offsets[expert + 1]]

    def expert_weight(self, expert: int) -> NDArray[np.float32]:
        """An expert's matrix [V,D], whatever way it is stored."""
        model = self.expert_models[expert]
        if model is None:
            return np.empty((0, self.manifest.hidden_size), np.float32)
        if self.weights is None:
            return graphs.constants(model)["W"].astype(np.float32)
        matrix = self.external(expert)["W"].astype(np.float32)
        return matrix if self.by_row(expert) else matrix.T

    def by_row(self, expert: int) -> bool:
        return self.quantised is not None or self.previews[expert] is not None

    def gathered(self, expert: int) -> int:
        """At least so many candidates' rows are gathered for each row; 0 if all are scored."""
        preview = self.previews[expert]
        if preview is not None:
            return preview.candidates
        return graphs.RESCORED_AT_LEAST if self.quantised is not None else 0

    def external(self, expert: int) -> dict[str, NDArray[Any]]:
        """The arrays that an expert's graph keeps outside itself, by name."""
        hidden_size = self.manifest.hidden_size
        size = self.manifest.expert_sizes[expert]
        held = slice(self.offsets[expert] * hidden_size, self.offsets[expert + 1] * hidden_size)
        found: dict[str, NDArray[Any]] = {}
        if self.weights is not None:
            rows = (size, hidden_size) if self.by_row(expert) else (hidden_size, size)
            found["W"] = self.weights[held].reshape(rows)
        if self.quantised is not None:
            found["W8"] = self.quantised[held].reshape(size, hidden_size)
        return found


def flops_speedup(n_classes: int, costs: Sequence[float], utilization: Sequence[float]) -> float:
    """The paper's |V| / (sum_k |v_k| u_k + K); what an approximated expert costs is its |v_k|."""
    searched = sum(cost * share for cost, share in zip(costs, utilization, strict=True))
    return n_classes / (searched + len(costs))


# --- reading ---------------------------------------------------------------------------------


def read(path: Path, snapshot: Snapshot = snapshots.private_copy, *, head: bool = False) -> Bundle:
    """Read and verify a bundle; every way it can be wrong is a BundleError of its own.

    Nothing of it stays open: what becomes of the files afterwards changes no answer. A head that
    is shipped is as large as all experts or larger, so it is left alone unless it is asked for.
    """
    manifest = read_manifest(path)
    wanted = {
        name: entry
        for name, entry in manifest.files.items()
        if head or name not in (HEAD_GRAPH, HEAD_WEIGHTS)
    }
    files = {
        name: _read_file(path, name, entry)
        for name, entry in wanted.items()
        if not name.endswith(".bin")
    }
    offsets, classes = _read_index(files, manifest)
    gate = graph_checks.gate_signature(manifest.n_experts, manifest.hidden_size)
    graph_checks.check_graph(GATE, files[GATE], gate)
    expert_models: list[bytes | None] = []
    previews: list[graphs.PreviewSize | None] = []
    for expert, size in enumerate(manifest.expert_sizes):
        model = files[expert_file(expert)] if size else None
        preview = None
        if model is not None:
            signature = graph_checks.expert_signature(
                size,
                manifest.hidden_size,
                manifest.n_classes,
                _external(manifest, int(offsets[expert]), size),
            )
            preview = graph_checks.check_graph(expert_file(expert), model, signature)
        expert_models.append(model)
        previews.append(preview)
    if HEAD_GRAPH in files:
        _check_head(files[HEAD_GRAPH], manifest)
    # Last, because they are large: nothing is copied for a bundle that is wrong in small things.
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
        labels=_read_labels(files[LABELS], manifest.n_classes) if manifest.labels else None,
        samples=_read_samples(files[SAMPLES], manifest) if manifest.samples else None,
        previews=tuple(previews),
        weights=_numbers(copied, f"experts/{WEIGHTS}", STORED[manifest.precision][1]),
        quantised=_numbers(copied, f"experts/{QUANTISED}", QUANTISED_TYPE),
    )
    if HEAD_GRAPH not in files:
        return made
    weights = _numbers(copied, HEAD_WEIGHTS, STORED[manifest.precision][1])
    return replace(made, head=_head_layer(made, files[HEAD_GRAPH], weights))


def _check_head(graph: bytes, manifest: Manifest) -> None:
    n_classes, hidden_size = manifest.n_classes, manifest.hidden_size
    dtype, _ = STORED[manifest.precision]
    outside = {"W": External(WEIGHTS, 0, dtype, (hidden_size, n_classes))}
    signature = graph_checks.expert_signature(n_classes, hidden_size, n_classes, outside)
    if graph_checks.check_graph(HEAD_GRAPH, graph, signature) is not None:
        raise errors.GraphForbidden(f"{HEAD_GRAPH} is approximated; a head must not be.")


def _head_layer(made: Bundle, graph: bytes, weights: NDArray[Any] | None) -> Bundle:
    """One expert with all classes, which every row goes to with a gate value of 1."""
    manifest = made.manifest
    one = manifest.model_copy(
        update={
            "n_experts": 1,
            "expert_sizes": [manifest.n_classes],
            "precision": "fp16" if manifest.precision == "fp16" else "fp32",
        }
    )
    return replace(
        made,
        manifest=one,
        gate_model=graphs.gate_graph(np.zeros((1, manifest.hidden_size), np.float32)),
        expert_models=(graph,),
        offsets=np.array([0, manifest.n_classes]),
        classes=np.arange(manifest.n_classes, dtype=np.int32),
        previews=(None,),
        weights=weights,
        quantised=None,
    )


def _external(manifest: Manifest, first: int, size: int) -> dict[str, External]:
    """What an expert's graph keeps outside itself, given where its classes begin."""
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


def _copied_file(folder: Path, name: str, entry: FileEntry, snapshot: Snapshot) -> memoryview:
    """A large file's bytes in memory that processes may share, and that nobody can change."""
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


def _read_labels(content: bytes, n_classes: int) -> tuple[str, ...]:
    try:
        labels = tuple(content.decode().removesuffix("\n").split("\n"))
    except UnicodeDecodeError as error:
        raise errors.LabelsWrong(f"{LABELS} is not UTF-8 text.") from error
    if len(labels) != n_classes:
        raise errors.LabelsWrong(f"{LABELS} has {len(labels)} lines for {n_classes} classes.")
    return labels


def _read_samples(content: bytes, manifest: Manifest) -> NDArray[np.float32]:
    shape = (manifest.samples, manifest.hidden_size)
    return _read_array(SAMPLES, content, np.dtype("<f4"), shape)


# --- writing ---------------------------------------------------------------------------------


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
    """Write a bundle to a folder that must not exist yet, and read it back verified.

    Files go to a temporary sibling that is renamed when complete, so `path` never holds a part.
    """
    if path.exists():
        raise errors.BundleExists(f"{path} exists already; a bundle is never overwritten.")
    if previews and precision != "fp32":
        raise errors.PrecisionUnsuitable("Experts approximated by SVD are stored as fp32 only.")
    n_experts, hidden_size = gate.shape
    offsets, classes = offsets.astype("<i8"), classes.astype("<i4")
    files: dict[str, bytes | memoryview] = {
        GATE: graphs.gate_graph(gate.astype(np.float32), _float32(gate_bias)),
        OFFSETS: _npy_bytes(offsets),
        CLASSES: _npy_bytes(classes),
    }
    files |= expert_files(
        weight, offsets, n_classes, _float32(bias), dict(previews or {}), precision
    )
    if head is not None:
        files |= head_files(head, _float32(head_bias), precision)
    if labels is not None:
        files[LABELS] = _label_bytes(labels, n_classes)
    if samples is not None and len(samples):
        files[SAMPLES] = _npy_bytes(samples.astype("<f4"))
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
    write_folder(path, files | {MANIFEST: _manifest_bytes(manifest)})
    return read(path, head=head is not None)


def _manifest_bytes(manifest: Manifest) -> bytes:
    # Earlier releases read version 2, and know no head.
    unknown = None if manifest.head else {"head"}
    content = manifest.model_dump_json(indent=2, exclude=unknown).encode() + b"\n"
    stated = f'"checksum": "{NO_CHECKSUM}"'.encode()
    return content.replace(stated, f'"checksum": "{sha256(content)}"'.encode())


def _label_bytes(labels: Sequence[str], n_classes: int) -> bytes:
    if len(labels) != n_classes:
        raise errors.LabelsWrong(f"{len(labels)} labels were given for {n_classes} classes.")
    if any("\n" in label for label in labels):
        raise errors.LabelsWrong("A label contains a line break.")
    return ("\n".join(labels) + "\n").encode()


def _float32(array: NDArray[np.floating[Any]] | None) -> NDArray[np.float32] | None:
    return None if array is None else array.astype(np.float32)


def _npy_bytes(array: NDArray[np.generic]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()
