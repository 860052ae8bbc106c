"""Checks the ONNX graphs of a bundle before they are used; only the expected kind passes.

B rows, D hidden, K experts, V classes of one expert, N classes in all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from service.bundle.graphs import (
    FLOAT,
    INT64,
    OPSET,
    External,
    PreviewSize,
    without_external,
)
from service.bundle.quantisation import RESCORED_AT_LEAST, RESCORED_PER_ANSWER
from service.errors import GraphForbidden, GraphMalformed, ShapeWrong


@dataclass(frozen=True)
class Signature:
    """What a graph must look like; None stands for a size chosen per call."""

    inputs: dict[str, tuple[int, tuple[int | None, ...]]]
    outputs: dict[str, tuple[int, int]]  # name -> type, rank
    weight: tuple[str, tuple[int, int]]  # rows and columns, if it is within the graph
    external: Mapping[str, External] = field(default_factory=dict)  # the arrays outside the graph
    absent: int = 0  # classes outside the expert, which its normaliser must count
    preview: bool = False  # whether the graph may have one


def gate_signature(n_experts: int, hidden_size: int) -> Signature:
    return Signature(
        inputs={"hidden": (FLOAT, (None, hidden_size)), "g": (INT64, (1,))},
        outputs={"expert": (INT64, 2), "gate": (FLOAT, 2)},
        weight=("U", (n_experts, hidden_size)),
    )


def expert_signature(
    size: int,
    hidden_size: int,
    n_classes: int,
    external: Mapping[str, External] | None = None,
) -> Signature:
    return Signature(
        inputs={
            "hidden": (FLOAT, (None, hidden_size)),
            "gate": (FLOAT, (None, 1)),
            "k": (INT64, (1,)),
        },
        outputs={"score": (FLOAT, 2), "position": (INT64, 2), "logsumexp": (FLOAT, 2)},
        weight=("W", (size, hidden_size)),
        external=external or {},
        absent=n_classes - size,
        preview=True,
    )


ALLOWED_OPERATORS = {
    "Abs", "Add", "Cast", "Concat", "Div", "Gather", "GatherElements", "Gemm", "Identity", "MatMul",
    "MatMulInteger", "Max", "Min", "Mul", "ReduceLogSumExp", "ReduceMax", "Round",
    "ScatterElements", "Softmax", "Squeeze", "TopK", "Transpose", "Unsqueeze",
}  # fmt: skip

# The operators that may read the arrays from which an approximated expert's cost is computed: if W
# were multiplied as a whole, the preview would save nothing.
PREVIEW_READERS = {"P": "Gemm", "Q": "Gemm", "candidates": "Max", "W": "Gather"}
INT8_READERS = {"W8": "Transpose", "scale": "Mul", "per_answer": "Mul", "at_least": "Max"}


def check_graph(name: str, content: bytes, signature: Signature) -> PreviewSize | None:
    """Refuses anything but a plain graph of the expected shape that holds or names what it needs.

    Returns the size of the graph's preview, if it has one.
    """
    try:
        model = onnx.load_model_from_string(content)
        _forbid_escapes(name, model, signature)
        onnx.checker.check_model(without_external(model))
    except (GraphForbidden, MemoryError):
        raise
    except Exception as error:  # protobuf and checker failures share no base class
        raise GraphMalformed(f"{name} is not a valid ONNX model.") from error
    _check_ports(name, model.graph, signature)
    return _check_constants(name, model.graph, signature)


def _forbid_escapes(name: str, model: onnx.ModelProto, signature: Signature) -> None:
    """Refuses custom operators, functions, control flow and data in unexpected files."""
    for opset in model.opset_import:
        if opset.domain not in ("", "ai.onnx"):
            raise GraphForbidden(f"{name} uses operators of the domain {opset.domain!r}.")
        if opset.version < OPSET:
            raise GraphForbidden(f"{name} uses opset {opset.version}; at least {OPSET} is needed.")
    if model.functions:
        raise GraphForbidden(f"{name} defines functions of its own.")
    if model.graph.sparse_initializer:
        raise GraphForbidden(f"{name} stores sparse tensors.")
    for node in model.graph.node:
        if node.op_type not in ALLOWED_OPERATORS or node.domain not in ("", "ai.onnx"):
            raise GraphForbidden(f"{name} uses the operator {node.op_type!r}.")
    for tensor in model.graph.initializer:
        if tensor.data_location != TensorProto.EXTERNAL and not tensor.external_data:
            continue
        expected = signature.external.get(tensor.name)
        found = {fact.key: fact.value for fact in tensor.external_data}
        if expected is None or found != expected.facts:
            raise GraphForbidden(f"{name} keeps data outside itself, where none may be.")


def _check_ports(name: str, graph: onnx.GraphProto, signature: Signature) -> None:
    inputs = {port.name: port.type.tensor_type for port in graph.input}
    outputs = {port.name: port.type.tensor_type for port in graph.output}
    if inputs.keys() != signature.inputs.keys():
        raise ShapeWrong(f"{name} takes {sorted(inputs)}, not {sorted(signature.inputs)}.")
    if outputs.keys() != signature.outputs.keys():
        raise ShapeWrong(f"{name} gives {sorted(outputs)}, not {sorted(signature.outputs)}.")
    for port, (dtype, shape) in signature.inputs.items():
        dims = [dim.dim_value or None for dim in inputs[port].shape.dim]
        if inputs[port].elem_type != dtype or dims != list(shape):
            raise ShapeWrong(f"{name} takes {port} of the wrong type or shape.")
    for port, (dtype, rank) in signature.outputs.items():
        if outputs[port].elem_type != dtype or len(outputs[port].shape.dim) != rank:
            raise ShapeWrong(f"{name} gives {port} of the wrong type or shape.")


Initializers = dict[str, onnx.TensorProto]


def _check_constants(name: str, graph: onnx.GraphProto, signature: Signature) -> PreviewSize | None:
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    weight, shape = signature.weight
    previewed = signature.preview and bool({"P", "Q", "candidates"} & initializers.keys())
    for which, expected in signature.external.items():
        # What candidates' rows are gathered from is stored by row.
        by_row = previewed and which == weight
        _check_array(name, initializers, which, shape if by_row else expected.shape, expected.dtype)
        if initializers[which].data_location != TensorProto.EXTERNAL:
            raise ShapeWrong(f"{name} holds {which}, which must be in {expected.file}.")
    if not signature.external:
        _check_array(name, initializers, weight, shape)
    if "bias" in initializers:
        _check_array(name, initializers, "bias", shape[:1])
    if "W8" in signature.external:
        _check_int8(name, graph, initializers, shape)
    counted = _counted_absent(initializers.get("log_absent"))
    if counted != signature.absent:
        raise ShapeWrong(f"{name} counts {counted} absent classes, not {signature.absent}.")
    return _check_preview(name, graph, initializers, shape) if previewed else None


def _check_array(
    name: str,
    initializers: Initializers,
    which: str,
    shape: tuple[int, ...],
    dtype: int = FLOAT,
) -> None:
    found = tuple(initializers[which].dims) if which in initializers else None
    if found != shape:
        raise ShapeWrong(f"{name} holds {which} of shape {found}, not {shape}.")
    if initializers[which].data_type != dtype:
        raise ShapeWrong(f"{name} holds {which} of the wrong type.")


def _check_readers(name: str, graph: onnx.GraphProto, expected: Mapping[str, str]) -> None:
    for which, operator in expected.items():
        readers = {node.op_type for node in graph.node if which in node.input}
        if readers != {operator}:
            raise ShapeWrong(f"{name} has {which} read by {sorted(readers)}, not by {operator}.")


def _check_int8(
    name: str, graph: onnx.GraphProto, initializers: Initializers, shape: tuple[int, int]
) -> None:
    """Refuses another number of exactly scored classes than the format prescribes."""
    _check_array(name, initializers, "scale", shape[:1])
    for which, value in (("per_answer", RESCORED_PER_ANSWER), ("at_least", RESCORED_AT_LEAST)):
        _check_array(name, initializers, which, (1,), INT64)
        if _integer(initializers[which]) != value:
            raise ShapeWrong(f"{name} has another {which} than {value}.")
    _check_readers(name, graph, INT8_READERS | {"W": "Gather"})


def _check_preview(
    name: str, graph: onnx.GraphProto, initializers: Initializers, shape: tuple[int, int]
) -> PreviewSize:
    """The preview's size from its arrays, which must be those that the graph computes with."""
    size, hidden_size = shape
    window = initializers["P"].dims[0] if "P" in initializers and initializers["P"].dims else 0
    if not 1 <= window <= hidden_size:
        raise ShapeWrong(f"{name} previews {window} directions; 1 to {hidden_size} are possible.")
    _check_array(name, initializers, "P", (window, hidden_size))
    _check_array(name, initializers, "Q", (size, window))
    _check_array(name, initializers, "candidates", (1,), INT64)
    _check_readers(name, graph, PREVIEW_READERS)
    candidates = _integer(initializers["candidates"])
    if candidates is None or not 1 <= candidates <= size:
        raise ShapeWrong(f"{name} has {candidates} candidates; 1 to {size} are possible.")
    return PreviewSize(window, candidates)


def _integer(tensor: onnx.TensorProto) -> int | None:
    if tensor.data_type != INT64:
        return None
    try:
        return int(numpy_helper.to_array(tensor)[0])
    except ValueError:  # fewer bytes than its shape says
        return None


def _counted_absent(log_absent: onnx.TensorProto | None) -> int:
    if log_absent is None:
        return 0
    counted = np.exp(numpy_helper.to_array(log_absent).astype(np.float64))
    return round(float(counted[0])) if counted.shape == (1,) and counted[0] < 2**31 else -1
