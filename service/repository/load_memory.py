"""How much memory loading a bundle takes at its peak, by what its manifest says.

The factors were measured, and a test measures them again. N classes, D hidden, K experts, R classes
of all experts, V classes of one expert.
"""

from dataclasses import dataclass

from service.bundle import Manifest
from service.bundle.format import (
    CLASSES,
    EXPERTS,
    GATE,
    HEAD,
    LABELS,
    OFFSETS,
    REST,
    SAMPLES,
    SCALES,
    expert_file,
)
from service.engine import BackendName

MIB = 2**20
FIXED_BYTES = 24 * MIB  # buffers, queues, series
MARGIN = 1.1

# A file's bytes are read and parsed, and arrays are made from them: so many times its size.
FACTORS = {
    GATE: 4,  # the transposed gate too
    CLASSES: 4,
    OFFSETS: 4,
    SAMPLES: 3,
    LABELS: 5,  # a character may take four bytes where the file has one
    REST: 4,
    f"{EXPERTS}/{SCALES}": 3,
    f"{HEAD}/{SCALES}": 3,
}
GRAPH_FACTOR = 2  # of all graphs together: biases and steps are collected from them
GRAPH_FACTOR_V1 = 1  # their matrices are counted apart
PARSED_FACTOR = 3  # of the largest one, while it is checked
# Of a head's rows: steps, bounds, biases and class ids, of each class in each list that has it.
ROW_BYTES = 24
ROW_COPIES = 3  # lists of all classes, with those for the shadow check
LABEL_BYTES = 100  # of the object that each label is
EXPERT_BYTES = 4096  # of each expert's counters and its entry in the manifest
SESSION_BYTES = 160 * 1024  # of ONNX Runtime, for each graph ...
PREVIEW_SESSION_BYTES = 256 * 1024  # ... that has more nodes
# ONNX Runtime widens, transposes and packs matrices of float32, and keeps copies meanwhile.
ONNX_COPIES = 2.5
PLAIN_GRAPH_BYTES = 1200  # besides its biases; one with a preview has more


@dataclass(frozen=True)
class LoadBytes:
    """Memory that loading takes at its peak."""

    shared: int  # once, however many workers load
    private: int  # in each worker

    def of(self, workers: int) -> int:
        return self.shared + self.private * workers


def load_bytes(manifest: Manifest, backend: BackendName, *, head: bool) -> LoadBytes:
    """What is read, and copied by the backend; of the head only if it is wanted."""
    sizes = {
        name: entry.bytes
        for name, entry in manifest.files.items()
        if head or not name.startswith(f"{HEAD}/")
    }
    shared = sum(size for name, size in sizes.items() if name.endswith(".bin"))
    held = sum(manifest.expert_sizes)
    numbers = held * manifest.hidden_size
    classes = manifest.n_classes
    private = FIXED_BYTES + EXPERT_BYTES * manifest.n_experts
    private += sum(size * FACTORS[name] for name, size in sizes.items() if name in FACTORS)
    graphs = [size for name, size in sizes.items() if name.endswith(".onnx") and name != GATE]
    factor = GRAPH_FACTOR_V1 if manifest.format_version == 1 else GRAPH_FACTOR
    private += factor * sum(graphs) + PARSED_FACTOR * max(graphs, default=0)
    if LABELS in sizes:
        private += LABEL_BYTES * classes
    if manifest.head and head:
        private += 16 * classes  # its class ids
        numbers += classes * manifest.hidden_size
    folder = manifest.rows_folder
    if folder is not None and (head or folder == EXPERTS):
        private += ROW_BYTES * (ROW_COPIES * classes + (held if folder == EXPERTS else 0))
    approximated = _may_be_approximated(manifest)
    if backend == "onnx" or (backend == "auto" and approximated):
        plain = manifest.precision != "int8" and not approximated
        private += manifest.n_experts * (SESSION_BYTES if plain else PREVIEW_SESSION_BYTES)
        private += round(ONNX_COPIES * 4 * numbers) + 8 * held
    elif manifest.format_version == 1:
        private += 4 * numbers  # the matrices are taken out of the graphs
    return LoadBytes(round(MARGIN * shared), round(MARGIN * private))


def _may_be_approximated(manifest: Manifest) -> bool:
    """Whether some expert's graph is larger than one without a preview."""
    return (
        manifest.precision == "fp32"
        and manifest.format_version > 1
        and any(
            size and manifest.files[expert_file(expert)].bytes > 4 * size + PLAIN_GRAPH_BYTES
            for expert, size in enumerate(manifest.expert_sizes)
        )
    )
