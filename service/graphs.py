"""The two ONNX graphs of a bundle: the gate and an expert. Built here, and checked here on reading.

B rows, D hidden, K experts, V classes of one expert, N classes in all, g experts asked for,
k answers asked for.
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


def gate_graph(gate: NDArray[np.float32]) -> bytes:
    """hidden[B,D], g[1] -> expert[B,g], gate[B,g]: the g largest of softmax(U h), best first."""
    hidden_size = gate.shape[1]
    nodes = [
        helper.make_node("Gemm", ["hidden", "U"], ["logits"], transB=1),
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
        initializers={"U": gate},
    )


def expert_graph(weight: NDArray[np.float32], n_classes: int) -> bytes:
    """hidden[B,D], gate[B,1], k[1] -> score[B,k], position[B,k], logsumexp[B,1].

    A class the expert does not hold has logit 0, so each of the N - V absent ones adds e^0 to the
    normaliser.
    """
    size, hidden_size = weight.shape
    absent = n_classes - size
    constants: dict[str, NDArray[Any]] = {"W": weight}
    nodes = [
        helper.make_node("Gemm", ["hidden", "W"], ["logits"], transB=1),
        helper.make_node("Mul", ["logits", "gate"], ["scores"]),
        helper.make_node("TopK", ["scores", "k"], ["score", "position"], axis=1),
    ]
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
    )


ALLOWED_OPERATORS = {
    "Add", "Concat", "GatherElements", "Gemm", "Mul", "ReduceLogSumExp", "Softmax", "TopK",
}  # fmt: skip


def check_graph(name: str, content: bytes, signature: Signature) -> None:
    """Refuse anything but a plain, self-contained graph of the expected shape."""
    try:
        model = onnx.load_model_from_string(content)
        _forbid_escapes(name, model)
        onnx.checker.check_model(model)
    except (GraphForbidden, MemoryError):
        raise
    except Exception as error:  # protobuf and checker failures share no base class
        raise GraphMalformed(f"{name} is not a valid ONNX model.") from error
    _check_ports(name, model.graph, signature)


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
    initializers = {tensor.name: tensor for tensor in graph.initializer}
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
    weight, shape = signature.weight
    found = tuple(initializers[weight].dims) if weight in initializers else None
    if found != shape:
        raise ShapeWrong(f"{name} holds {weight} of shape {found}, not {shape}.")
    counted = _counted_absent(initializers.get("log_absent"))
    if counted != signature.absent:
        raise ShapeWrong(f"{name} counts {counted} absent classes, not {signature.absent}.")


def _counted_absent(log_absent: onnx.TensorProto | None) -> int:
    if log_absent is None:
        return 0
    counted = np.exp(numpy_helper.to_array(log_absent).astype(np.float64))
    return round(float(counted[0])) if counted.shape == (1,) and counted[0] < 2**31 else -1
