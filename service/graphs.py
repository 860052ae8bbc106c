"""The ONNX graphs of a bundle: the gate and an expert. Built here, and checked here on reading.

B rows, D hidden, K experts, V classes of one expert, N classes in all, g experts asked for,
k answers asked for, w directions of a preview, c candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from service.errors import GraphForbidden, GraphMalformed, ShapeWrong

OPSET = 17
IR_VERSION = 8
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


@dataclass(frozen=True)
class PreviewSize:
    """How much an approximated expert computes."""

    window: int  # w
    candidates: int  # c for few answers; more answers than that need as many candidates

    def cost(self, size: int, hidden_size: int, k: int = 1) -> float:
        """Of k answers, in classes scored exactly: D multiply-adds each."""
        previewed = self.window + size * self.window / hidden_size
        return previewed + max(self.candidates, min(k, size))


@dataclass(frozen=True)
class Preview:
    """Cheap scores of an expert's classes, by which it is chosen which to score exactly."""

    directions: NDArray[np.float32]  # [w,D] orthonormal
    weight: NDArray[np.float32]  # [V,w] the expert's matrix along them
    candidates: int

    @property
    def size(self) -> PreviewSize:
        return PreviewSize(len(self.directions), self.candidates)


def gate_graph(gate: NDArray[np.float32], bias: NDArray[np.float32] | None = None) -> bytes:
    """hidden[B,D], g[1] -> expert[B,g], gate[B,g]: the g largest of softmax(U h), best first."""
    hidden_size = gate.shape[1]
    nodes = [
        _product("hidden", "U", "logits", bias),
        helper.make_node("Softmax", ["logits"], ["all_gates"], axis=1),
        # Ranked by logit: softmax values far behind the best underflow to equal zeros.
        helper.make_node("TopK", ["logits", "g"], ["top_logits", "expert"], axis=1),
        helper.make_node("GatherElements", ["all_gates", "expert"], ["gate"], axis=1),
    ]
    return _serialize(
        "gate",
        nodes,
        inputs=[("hidden", FLOAT, ["B", hidden_size]), ("g", INT64, [1])],
        outputs=[("expert", INT64, ["B", "g"]), ("gate", FLOAT, ["B", "g"])],
        initializers={"U": gate} | _bias(bias),
    )


def expert_graph(
    weight: NDArray[np.float32], n_classes: int, bias: NDArray[np.float32] | None = None
) -> bytes:
    """hidden[B,D], gate[B,1], k[1] -> score[B,k], position[B,k], logsumexp[B,1].

    A class the expert does not hold has logit 0, so each of the N - V absent ones adds e^0 to the
    normaliser.
    """
    nodes = [
        _product("hidden", "W", "logits", bias),
        helper.make_node("Mul", ["logits", "gate"], ["scores"]),
        helper.make_node("TopK", ["scores", "k"], ["score", "position"], axis=1),
    ]
    return _serialize_expert(nodes, weight, n_classes, _bias(bias))


def expert_svd_graph(
    weight: NDArray[np.float32],
    n_classes: int,
    preview: Preview,
    bias: NDArray[np.float32] | None = None,
) -> bytes:
    """As `expert_graph`, but only the c best classes by the preview are scored exactly.

    SVD-softmax (Shim et al. 2017) rotates h by all D directions, previews with the first w and
    scores candidates in rotated coordinates. A rotation changes no product, so the first w
    directions are enough and candidates are scored with their own rows: the same logits for D*w
    multiply-adds in place of D*D.
    """
    constants: dict[str, NDArray[Any]] = {
        "P": preview.directions,
        "Q": preview.weight,
        "candidates": np.array([preview.candidates], np.int64),
        "last_axis": np.array([2], np.int64),
    }
    nodes = [
        _product("hidden", "P", "projected", None),
        _product("projected", "Q", "preview_logits", bias),
        helper.make_node("Max", ["k", "candidates"], ["c"]),
        helper.make_node(
            "TopK", ["preview_logits", "c"], ["best_previews", "unordered"], axis=1, sorted=0
        ),
        # In the order of their positions, so that equal scores are answered in that order.
        helper.make_node("TopK", ["unordered", "c"], ["candidate", "where"], axis=1, largest=0),
        helper.make_node("Gather", ["W", "candidate"], ["rows"], axis=0),  # [B,c,D]
        helper.make_node("Unsqueeze", ["hidden", "last_axis"], ["column"]),  # [B,D,1]
        helper.make_node("MatMul", ["rows", "column"], ["products"]),  # [B,c,1]
        helper.make_node("Squeeze", ["products", "last_axis"], ["exact_products"]),
    ]
    logits = "exact_products"
    if bias is not None:
        logits = "exact_logits"
        nodes += [
            helper.make_node("Gather", ["bias", "candidate"], ["candidate_bias"], axis=0),
            helper.make_node("Add", ["exact_products", "candidate_bias"], ["exact_logits"]),
        ]
    nodes += [
        helper.make_node("Mul", [logits, "gate"], ["exact_scores"]),
        helper.make_node("TopK", ["exact_scores", "k"], ["score", "place"], axis=1),
        helper.make_node("GatherElements", ["candidate", "place"], ["position"], axis=1),
        helper.make_node("Mul", ["preview_logits", "gate"], ["preview_scores"]),
        helper.make_node(
            "ScatterElements", ["preview_scores", "candidate", "exact_scores"], ["scores"], axis=1
        ),
    ]
    return _serialize_expert(nodes, weight, n_classes, constants | _bias(bias))


def _product(
    rows: str, matrix: str, output: str, bias: NDArray[np.float32] | None
) -> onnx.NodeProto:
    inputs = [rows, matrix] if bias is None else [rows, matrix, "bias"]
    return helper.make_node("Gemm", inputs, [output], transB=1)


def _bias(bias: NDArray[np.float32] | None) -> dict[str, NDArray[Any]]:
    return {} if bias is None else {"bias": bias}


def _serialize_expert(
    nodes: list[onnx.NodeProto],
    weight: NDArray[np.float32],
    n_classes: int,
    more: dict[str, NDArray[Any]],
) -> bytes:
    """An expert's graph, given the nodes that make `score`, `position` and all `scores` [B,V]."""
    size, hidden_size = weight.shape
    absent = n_classes - size
    constants: dict[str, NDArray[Any]] = {"W": weight} | more
    # Row-wise reductions only: ONNX Runtime's Log rounds the last rows of a batch differently.
    if absent:
        constants |= {
            "zero": np.array([0], np.float32),
            "log_absent": np.log(np.array([absent], np.float32)),
        }
        nodes += [
            helper.make_node("ReduceLogSumExp", ["scores"], ["present"], axes=[1]),
            helper.make_node("Mul", ["gate", "zero"], ["column_of_zeros"]),
            helper.make_node("Add", ["column_of_zeros", "log_absent"], ["absent"]),
            helper.make_node("Concat", ["present", "absent"], ["both"], axis=1),
            helper.make_node("ReduceLogSumExp", ["both"], ["logsumexp"], axes=[1]),
        ]
    else:
        nodes.append(helper.make_node("ReduceLogSumExp", ["scores"], ["logsumexp"], axes=[1]))
    return _serialize(
        "expert",
        nodes,
        inputs=[
            ("hidden", FLOAT, ["B", hidden_size]),
            ("gate", FLOAT, ["B", 1]),
            ("k", INT64, [1]),
        ],
        outputs=[
            ("score", FLOAT, ["B", "k"]),
            ("position", INT64, ["B", "k"]),
            ("logsumexp", FLOAT, ["B", 1]),
        ],
        initializers=constants,
    )


def constants(model: bytes) -> dict[str, NDArray[Any]]:
    """The arrays that a graph holds, by name."""
    graph = onnx.load_model_from_string(model).graph
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


Port = tuple[str, int, Sequence[str | int]]


def _serialize(
    name: str,
    nodes: list[onnx.NodeProto],
    inputs: list[Port],
    outputs: list[Port],
    initializers: dict[str, NDArray[Any]],
) -> bytes:
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info(*port) for port in inputs],
        [helper.make_tensor_value_info(*port) for port in outputs],
        [numpy_helper.from_array(np.ascontiguousarray(v), k) for k, v in initializers.items()],
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="doubly-sparse-softmax",
    )
    onnx.checker.check_model(model, full_check=True)
    content: bytes = model.SerializeToString()
    return content


@dataclass(frozen=True)
class Signature:
    """What a reader insists on; None stands for a size chosen per call."""

    inputs: dict[str, tuple[int, tuple[int | None, ...]]]
    outputs: dict[str, tuple[int, int]]  # name -> type, rank
    weight: tuple[str, tuple[int, int]]
    absent: int = 0  # classes outside the expert, which its normaliser must count
    preview: bool = False  # whether the graph may have one


def gate_signature(n_experts: int, hidden_size: int) -> Signature:
    return Signature(
        inputs={"hidden": (FLOAT, (None, hidden_size)), "g": (INT64, (1,))},
        outputs={"expert": (INT64, 2), "gate": (FLOAT, 2)},
        weight=("U", (n_experts, hidden_size)),
    )


def expert_signature(size: int, hidden_size: int, n_classes: int) -> Signature:
    return Signature(
        inputs={
            "hidden": (FLOAT, (None, hidden_size)),
            "gate": (FLOAT, (None, 1)),
            "k": (INT64, (1,)),
        },
        outputs={"score": (FLOAT, 2), "position": (INT64, 2), "logsumexp": (FLOAT, 2)},
        weight=("W", (size, hidden_size)),
        absent=n_classes - size,
        preview=True,
    )


ALLOWED_OPERATORS = {
    "Add", "Concat", "Gather", "GatherElements", "Gemm", "MatMul", "Max", "Mul", "ReduceLogSumExp",
    "ScatterElements", "Softmax", "Squeeze", "TopK", "Unsqueeze",
}  # fmt: skip

# Who may read the arrays that an approximated expert's cost is worked out from: were W multiplied
# as a whole, the preview would save nothing.
PREVIEW_READERS = {"P": "Gemm", "Q": "Gemm", "candidates": "Max", "W": "Gather"}


def check_graph(name: str, content: bytes, signature: Signature) -> PreviewSize | None:
    """Refuse anything but a plain, self-contained graph of the expected shape.

    Returns the size of the graph's preview, if it has one.
    """
    try:
        model = onnx.load_model_from_string(content)
        _forbid_escapes(name, model)
        onnx.checker.check_model(model)
    except (GraphForbidden, MemoryError):
        raise
    except Exception as error:  # protobuf and checker failures share no base class
        raise GraphMalformed(f"{name} is not a valid ONNX model.") from error
    _check_ports(name, model.graph, signature)
    return _check_constants(name, model.graph, signature)


def _forbid_escapes(name: str, model: onnx.ModelProto) -> None:
    """No code from elsewhere, no bytes from elsewhere, no control flow."""
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
        if tensor.data_location == TensorProto.EXTERNAL or tensor.external_data:
            raise GraphForbidden(f"{name} keeps data outside itself.")


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
    _check_shape(name, initializers, weight, shape)
    if "bias" in initializers:
        _check_shape(name, initializers, "bias", shape[:1])
    counted = _counted_absent(initializers.get("log_absent"))
    if counted != signature.absent:
        raise ShapeWrong(f"{name} counts {counted} absent classes, not {signature.absent}.")
    if not signature.preview or not {"P", "Q", "candidates"} & initializers.keys():
        return None
    return _check_preview(name, graph, initializers, shape)


def _check_shape(name: str, initializers: Initializers, which: str, shape: tuple[int, ...]) -> None:
    found = tuple(initializers[which].dims) if which in initializers else None
    if found != shape:
        raise ShapeWrong(f"{name} holds {which} of shape {found}, not {shape}.")


def _check_preview(
    name: str, graph: onnx.GraphProto, initializers: Initializers, shape: tuple[int, int]
) -> PreviewSize:
    """What an approximated expert computes is told by its arrays, so they must be what it uses."""
    size, hidden_size = shape
    window = initializers["P"].dims[0] if "P" in initializers and initializers["P"].dims else 0
    if not 1 <= window <= hidden_size:
        raise ShapeWrong(f"{name} previews {window} directions; 1 to {hidden_size} are possible.")
    _check_shape(name, initializers, "P", (window, hidden_size))
    _check_shape(name, initializers, "Q", (size, window))
    _check_shape(name, initializers, "candidates", (1,))
    for which, operator in PREVIEW_READERS.items():
        readers = {node.op_type for node in graph.node if which in node.input}
        if readers != {operator}:
            raise ShapeWrong(f"{name} has {which} read by {sorted(readers)}, not by {operator}.")
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
