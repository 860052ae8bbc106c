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

from service.bundle.graph_nodes import ExpertForm, Nodes, expert_nodes, gate_nodes
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
    return _serialize(
        "gate",
        gate_nodes(bias is not None),
        inputs=[("hidden", FLOAT, ["B", gate.shape[1]]), ("g", INT64, [1])],
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
    form = ExpertForm(
        "plain",
        biased=bias is not None,
        absent=n_classes > size,
        by_column=outside,
        halves=outside and weight.dtype == FLOAT16,
    )
    return _serialize_expert(form, (size, hidden_size), n_classes, {"W": weight} | _bias(bias))


def head_graph(weight: External, bias: NDArray[np.float32] | None = None) -> bytes:
    """As `expert_graph` of all classes, but its matrix outside is stored by row, [N,D]."""
    form = ExpertForm("plain", biased=bias is not None, absent=False)
    constants: Constants = {"W": weight, **_bias(bias)}
    return _serialize_expert(form, weight.shape, weight.shape[0], constants)


def shared_graph(
    weight: External,  # [N,D]
    classes: NDArray[np.int64],  # [V]
    rest: NDArray[np.float32],  # [D+1]
    bias: NDArray[np.float32] | None = None,  # [V]
) -> bytes:
    """An expert that has the head's own rows: hidden, gate and k as in `expert_graph`.

    Scores are W h, whatever the gate. The normaliser is that of the expert's classes and of the
    others together, for which `rest` is an estimate: the log of their sum is rest . (h, 1).
    """
    n_classes, hidden_size = weight.shape
    constants: Constants = {"W": weight, **shared_constants(classes, rest, bias)}
    form = ExpertForm("shared", biased=bias is not None, absent=True)
    return _serialize_expert(form, (len(classes), hidden_size), n_classes, constants)


def shared_constants(
    classes: NDArray[np.int64], rest: NDArray[np.float32], bias: NDArray[np.float32] | None
) -> "dict[str, NDArray[Any]]":
    """The arrays within such an expert's graph that follow from its index and the head."""
    found: dict[str, NDArray[Any]] = {
        "classes": classes,
        "rest": rest[:-1],
        "rest_bias": rest[-1:],
    }
    return found if bias is None else found | {"bias": bias}


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
        **_bias(bias),
    }
    form = ExpertForm("svd", biased=bias is not None, absent=n_classes > weight.shape[0])
    return _serialize_expert(form, weight.shape, n_classes, constants)


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
    constants: Constants = {"W": weight, "W8": quantised, "scale": scale, **_bias(bias)}
    form = ExpertForm("int8", biased=bias is not None, absent=n_classes > weight.shape[0])
    return _serialize_expert(form, weight.shape, n_classes, constants)


def fixed_constants(form: ExpertForm, size: int, n_classes: int) -> dict[str, NDArray[Any]]:
    """The small arrays of an expert's graph that follow from its form and its sizes."""
    if form.kind == "shared":
        return {"row_axis": np.array([1], np.int64)}
    found: dict[str, NDArray[Any]] = {}
    if form.kind == "int8":
        found |= {
            "steps": np.array([ACTIVATION_STEPS], np.float32),
            "smallest": np.array([np.finfo(np.float32).tiny]),
            "middle": np.array([128], np.float32),
            "zero_point": np.array(128, np.uint8),
            "per_answer": np.array([RESCORED_PER_ANSWER], np.int64),
            "at_least": np.array([RESCORED_AT_LEAST], np.int64),
            "size": np.array([size], np.int64),
        }
    if form.kind != "plain":
        found["last_axis"] = np.array([2], np.int64)
    if form.absent:
        found["zero"] = np.array([0], np.float32)
        found["log_absent"] = np.log(np.array([n_classes - size], np.float32))
    return found


def _bias(bias: NDArray[np.float32] | None) -> "Constants":
    return {} if bias is None else {"bias": bias}


def _serialize_expert(
    form: ExpertForm, shape: tuple[int, ...], n_classes: int, constants: "Constants"
) -> bytes:
    size, hidden_size = shape
    return _serialize(
        "expert",
        expert_nodes(form),
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
        initializers={**constants, **fixed_constants(form, size, n_classes)},
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
    nodes: Nodes,
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
    onnx.checker.check_model(without_data(model), full_check=True)
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


def without_data(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph with its arrays as inputs: ONNX's checker would look for external files, and
    needs no copy of the others."""
    graph = model.graph
    arrays = [
        helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in graph.initializer
    ]
    bare = helper.make_graph(graph.node, graph.name, [*graph.input, *arrays], graph.output)
    return helper.make_model(bare, opset_imports=model.opset_import, ir_version=model.ir_version)
