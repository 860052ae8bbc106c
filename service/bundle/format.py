"""The files of a bundle and how their numbers are stored. models/FORMAT.md is the specification."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from service.bundle import graphs

FORMAT_VERSION = 2
HEAD_VERSION = 3  # the first that may hold a head
READABLE_VERSIONS = (1, 2, 3)

MANIFEST = "manifest.json"
GATE = "gate.onnx"
OFFSETS = "index/offsets.npy"
CLASSES = "index/classes.npy"
LABELS = "labels.txt"
SAMPLES = "samples.npy"
WEIGHTS, QUANTISED = "weights.bin", "quantised.bin"  # in experts/, beside the graphs
HEAD_GRAPH, HEAD_WEIGHTS = "head/head.onnx", f"head/{WEIGHTS}"

Precision = Literal["fp32", "fp16", "int8"]
# ONNX and numpy types of the matrices in weights.bin.
STORED: Mapping[Precision, tuple[int, np.dtype[Any]]] = {
    "fp32": (graphs.FLOAT, np.dtype("<f4")),
    "fp16": (graphs.FLOAT16, np.dtype("<f2")),
    "int8": (graphs.FLOAT, np.dtype("<f4")),
}
QUANTISED_TYPE = np.dtype(np.int8)  # of the matrices in quantised.bin


def expert_file(expert: int) -> str:
    return f"experts/{expert:03d}.onnx"
