"""Builds the ONNX graphs of a bundle: the gate and its experts.

B rows, D hidden, K experts, V classes of one expert, N classes in all, g experts asked for,
k answers asked for, w directions of a preview, c candidates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from service.bundle.quantisation import ACTIVATION_STEPS, RESCORED_AT_LEAST, RESCORED_PER_ANSWER

OPSET = 17
IR_VERSION = 8
FLOAT, FLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16
INT8, UINT8, INT64 = TensorProto.INT8, TensorProto.UINT8, TensorProto.INT64


@dataclass(frozen=True)
class External:
    """An array that a graph keeps in a file beside its own."""

    file: str
    first: int  # byte
    dtype: int  # of ONNX
    shape: tuple[int, int]

    @property
    def bytes(self) -> int:
        return self.shape[0] * self.shape[1] * ITEM_BYTES[self.dtype]

    @property
    def facts(self) -> dict[str, str]:
        return {"location": self.file, "offset": str(self.first), "length": str(self.bytes)}


ITEM_BYTES: Mapping[int, int] = {FLOAT: 4, FLOAT16: 2, INT8: 1}
Matrix = NDArray[np.float32] | External


@dataclass(frozen=True)
class PreviewSize:
    """What the cost of an approximated expert depends on."""

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
        initializers={"U": gate, **_bias(bias)},
    )


def expert_graph(weight: Matrix, n_classes: int, bias: NDArray[np.float32] | None = None) -> bytes:
    """hidden[B,D], gate[B,1], k[1] -> score[B,k], position[B,k], logsumexp[B,1].

    A matrix within the graph is [V,D] in float32. Outside it is stored by column, [D,V], in float32
    or float16. A class the expert does not hold has logit 0, so each of the N - V absent ones adds
    e^0 to the normaliser.
    """
    outside = isinstance(weight, External)
    size, hidden_size = reversed(weight.shape) if outside else weight.shape
    nodes, matrix = [], "W"
    if outside and weight.dtype == FLOAT16:
        nodes, matrix = [helper.make_node("Cast", ["W"], ["wide"], to=FLOAT)], "wide"
    nodes += [
        _product("hidden", matrix, "logits", bias, by_column=outside),
        helper.make_node("Mul", ["logits", "gate"], ["scores"]),
        helper.make_node("TopK", ["scores", "k"], ["score", "position"], axis=1),
    ]
    constants: Constants = {"W": weight} | _bias(bias)
    return _serialize_expert(nodes, size, hidden_size, n_classes, constants)


def expert_svd_graph(
    weight: Matrix,
    n_classes: int,
    preview: Preview,
    bias: NDArray[np.float32] | None = None,
) -> bytes:
    """As `expert_graph`, but only the c best classes by the preview are scored exactly.

    The matrix is stored by row, [V,D]. SVD-softmax (Shim et al. 2017) rotates h by all D
    directions, previews with the first w and scores candidates in rotated coordinates. A rotation
    changes no product, so the first w directions are enough and candidates are scored with their
    own rows: the same logits for D*w multiply-adds in place of D*D.
    """
    constants: Constants = {
        "W": weight,
        "P": preview.directions,
        "Q": preview.weight,
        "candidates": np.array([preview.candidates], np.int64),
    }
    nodes = [
        _product("hidden", "P", "projected", None),
        _product("projected", "Q", "preview_logits", bias),
        helper.make_node("Max", ["k", "candidates"], ["c"]),
    ]
    return _serialize_previewed(nodes, weight, n_classes, constants, bias)


def expert_int8_graph(
    weight: External,
    quantised: External,
    scale: NDArray[np.float32],  # [V]
    n_classes: int,
    bias: NDArray[np.float32] | None = None,
) -> bytes:
    """As `expert_graph`, but scored in whole numbers; only the c best are then scored exactly.

    Both matrices are stored by row, [V,D]. Each row of hidden has its own step, so that its answer
    does not depend on the other rows.
    """
    size = weight.shape[0]
    constants: Constants = {
        "W": weight,
        "W8": quantised,
        "scale": scale,
        "steps": np.array([ACTIVATION_STEPS], np.float32),
        "smallest": np.array([np.finfo(np.float32).tiny]),
        "middle": np.array([128], np.float32),
        "zero_point": np.array(128, np.uint8),
        "per_answer": np.array([RESCORED_PER_ANSWER], np.int64),
        "at_least": np.array([RESCORED_AT_LEAST], np.int64),
        "size": np.array([size], np.int64),
    }
    nodes = [
        helper.make_node("Abs", ["hidden"], ["sizes"]),
        helper.make_node("ReduceMax", ["sizes"], ["found_largest"], axes=[1]),  # [B,1]
        helper.make_node("Max", ["found_largest", "smallest"], ["largest"]),
        helper.make_node("Div", ["steps", "largest"], ["steps_per_one"]),
        helper.make_node("Mul", ["hidden", "steps_per_one"], ["in_steps"]),
        helper.make_node("Round", ["in_steps"], ["whole"]),
        helper.make_node("Add", ["whole", "middle"], ["positive"]),
        helper.make_node("Cast", ["positive"], ["activations"], to=UINT8),
        helper.make_node("Transpose", ["W8"], ["columns"], perm=[1, 0]),
        helper.make_node("MatMulInteger", ["activations", "columns", "zero_point"], ["counts"]),
        helper.make_node("Cast", ["counts"], ["sums"], to=FLOAT),  # [B,V]
        helper.make_node("Div", ["largest", "steps"], ["step"]),
        # In this order, because ONNX Runtime fuses sums * (step * scale) + bias wrongly when step
        # is not one number for all rows.
        helper.make_node("Mul", ["sums", "scale"], ["scaled"]),
        helper.make_node("Mul", ["scaled", "step"], ["products8"]),
        helper.make_node("Add", ["products8", "bias"], ["preview_logits"])
        if bias is not None
        else helper.make_node("Identity", ["products8"], ["preview_logits"]),
        helper.make_node("Mul", ["k", "per_answer"], ["wanted"]),
        helper.make_node("Max", ["wanted", "at_least"], ["wanted_or_more"]),
        helper.make_node("Min", ["wanted_or_more", "size"], ["c"]),
    ]
    return _serialize_previewed(nodes, weight, n_classes, constants, bias)


def _serialize_previewed(
    nodes: list[onnx.NodeProto],
    weight: Matrix,
    n_classes: int,
    constants: "Constants",
    bias: NDArray[np.float32] | None,
) -> bytes:
    """Given the nodes that make `preview_logits` [B,V] and `c` [1], scores the c best exactly."""
    nodes += [
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
    constants = constants | {"last_axis": np.array([2], np.int64)} | _bias(bias)
    size, hidden_size = weight.shape
    return _serialize_expert(nodes, size, hidden_size, n_classes, constants)


def _product(
    rows: str,
    matrix: str,
    output: str,
    bias: NDArray[np.float32] | None,
    by_column: bool = False,
) -> onnx.NodeProto:
    inputs = [rows, matrix] if bias is None else [rows, matrix, "bias"]
    if by_column:
        return helper.make_node("Gemm", inputs, [output])
    return helper.make_node("Gemm", inputs, [output], transB=1)


def _bias(bias: NDArray[np.float32] | None) -> "Constants":
    return {} if bias is None else {"bias": bias}


def _serialize_expert(
    nodes: list[onnx.NodeProto],
    size: int,
    hidden_size: int,
    n_classes: int,
    constants: "Constants",
) -> bytes:
    """An expert's graph, given the nodes that make `score`, `position` and all `scores` [B,V]."""
    absent = n_classes - size
    # Row-wise reductions only: ONNX Runtime's Log rounds the last rows of a batch differently.
    if absent:
        constants = constants | {
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
    """The arrays that a graph holds, by name; not those it keeps outside itself."""
    graph = onnx.load_model_from_string(model).graph
    return {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in graph.initializer
        if tensor.data_location != TensorProto.EXTERNAL
    }


Port = tuple[str, int, Sequence[str | int]]
Constants = dict[str, NDArray[Any] | External]


def _serialize(
    name: str,
    nodes: list[onnx.NodeProto],
    inputs: list[Port],
    outputs: list[Port],
    initializers: Constants,
) -> bytes:
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info(*port) for port in inputs],
        [helper.make_tensor_value_info(*port) for port in outputs],
        [_tensor(name, value) for name, value in initializers.items()],
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="doubly-sparse-softmax",
    )
    onnx.checker.check_model(without_external(model), full_check=True)
    content: bytes = model.SerializeToString()
    return content


def _tensor(name: str, value: NDArray[Any] | External) -> TensorProto:
    if not isinstance(value, External):
        return numpy_helper.from_array(np.asarray(value, order="C"), name)
    tensor = TensorProto(
        name=name, data_type=value.dtype, dims=value.shape, data_location=TensorProto.EXTERNAL
    )
    for key, fact in value.facts.items():
        tensor.external_data.add(key=key, value=fact)
    return tensor


def without_external(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph with arrays outside itself as inputs: ONNX's checker would look for files."""
    inside = onnx.ModelProto()
    inside.CopyFrom(model)
    del inside.graph.initializer[:]
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            port = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            inside.graph.input.append(port)
        else:
            inside.graph.initializer.append(tensor)
    return inside
