"""The files of a bundle and how their numbers are stored. models/FORMAT.md is the specification."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from service.bundle import graphs
from service.topk import Objective as Objective

FORMAT_VERSION = 2
HEAD_VERSION = 3  # the first that may hold a head
ROWS_VERSION = 4  # the first whose head is stored by row, as it is and in whole steps
READABLE_VERSIONS = (1, 2, 3, 4)

MANIFEST = "manifest.json"
GATE = "gate.onnx"
OFFSETS = "index/offsets.npy"
CLASSES = "index/classes.npy"
LABELS = "labels.txt"
SAMPLES = "samples.npy"
WEIGHTS, QUANTISED = "weights.bin", "quantised.bin"  # in experts/, beside the graphs
EXPERTS, HEAD = "experts", "head"  # folders
HEAD_FILE, SCALES = "head.onnx", "scales.npy"
HEAD_GRAPH, HEAD_WEIGHTS = f"{HEAD}/{HEAD_FILE}", f"{HEAD}/{WEIGHTS}"
# Of a head of version 4: in the folder head, or in experts if they share its rows.
ROW_FILES = (HEAD_FILE, WEIGHTS, QUANTISED, SCALES)
REST = "index/rest.npy"  # of a fidelity bundle

Precision = Literal["fp32", "fp16", "int8"]
# ONNX and numpy types of the matrices in weights.bin.
STORED: Mapping[Precision, tuple[int, np.dtype[Any]]] = {
    "fp32": (graphs.FLOAT, np.dtype("<f4")),
    "fp16": (graphs.FLOAT16, np.dtype("<f2")),
    "int8": (graphs.FLOAT, np.dtype("<f4")),
}
ROW_TYPE = np.dtype("<f4")  # of the rows of a head of version 4
QUANTISED_TYPE = np.dtype(np.int8)  # of the matrices in quantised.bin


def expert_file(expert: int) -> str:
    return f"experts/{expert:03d}.onnx"
