"""Checks the ONNX graphs of a bundle before they are used; only those of the format pass.

B rows, D hidden, K experts, V classes of one expert, N classes in all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from service.bundle.finite import check_finite
from service.bundle.graph_nodes import ExpertForm, Nodes, expert_nodes, gate_nodes
from service.bundle.graph_outline import check_outline
from service.bundle.graphs import (
    FLOAT,
    FLOAT16,
    INT64,
    OPSET,
    External,
    PreviewSize,
    fixed_constants,
    without_data,
)
from service.errors import DSSError, GraphDiffers, GraphForbidden, GraphMalformed, ShapeWrong

NUMPY_TYPES: Mapping[int, np.dtype[Any]] = {
    FLOAT: np.dtype("<f4"),
    INT64: np.dtype("<i8"),
    TensorProto.UINT8: np.dtype("u1"),
}


@dataclass(frozen=True)
class Signature:
    """What a graph must look like; None stands for a size chosen per call."""

    inputs: dict[str, tuple[int, tuple[int | None, ...]]]
    outputs: dict[str, tuple[int, int]]  # name -> type, rank
    weight: tuple[str, tuple[int, int]]  # rows and columns, if it is within the graph
    external: Mapping[str, External] = field(default_factory=dict)  # the arrays outside the graph
    n_classes: int | None = None  # in all; None for a gate
    by_row: bool = False  # how a plain expert's matrix outside the graph is stored
    # What the arrays within must hold, of an expert whose rows are the head's.
    shared: Mapping[str, NDArray[Any]] = field(default_factory=dict)


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
    *,
    by_row: bool = False,
    shared: Mapping[str, NDArray[Any]] | None = None,
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
        n_classes=n_classes,
        by_row=by_row,
        shared=shared or {},
    )


def check_graph(name: str, content: bytes, signature: Signature) -> PreviewSize | None:
    """Refuses anything but a graph of the format, with finite numbers, that holds or names its own
    arrays and no others.

    Returns the size of the graph's preview, if it has one.
    """
    check_outline(name, content)
    try:
        model = onnx.load_model_from_string(content)
        return _check_model(Graph(name, model.graph, signature), model)
    except (DSSError, MemoryError):
        raise
    except Exception as error:  # protobuf and checker failures share no base class
        raise GraphMalformed(f"{name} is not a valid ONNX model.") from error


def _check_model(graph: "Graph", model: onnx.ModelProto) -> PreviewSize | None:
    for opset in model.opset_import:
        if opset.domain not in ("", "ai.onnx"):
            raise GraphForbidden(f"{graph.name} uses operators of the domain {opset.domain!r}.")
        if opset.version < OPSET:
            raise GraphForbidden(
                f"{graph.name} uses opset {opset.version}; at least {OPSET} is needed."
            )
    graph.check_external()
    graph.check_ports()
    preview = graph.check_constants()
    onnx.checker.check_model(without_data(model))
    return preview


class Graph:
    """One graph and what it must look like."""

    def __init__(self, name: str, graph: onnx.GraphProto, signature: Signature) -> None:
        self.name = name
        self._graph = graph
        self._signature = signature
        self._initializers = {tensor.name: tensor for tensor in graph.initializer}
        if len(self._initializers) != len(graph.initializer):
            raise ShapeWrong(f"{name} holds two arrays of one name.")

    def check_external(self) -> None:
        for tensor in self._initializers.values():
            if tensor.data_location != TensorProto.EXTERNAL and not tensor.external_data:
                continue
            expected = self._signature.external.get(tensor.name)
            found = {fact.key: fact.value for fact in tensor.external_data}
            if expected is None or found != expected.facts:
                raise GraphForbidden(f"{self.name} keeps data outside itself, where none may be.")

    def check_ports(self) -> None:
        name, signature = self.name, self._signature
        inputs = {port.name: port.type.tensor_type for port in self._graph.input}
        outputs = {port.name: port.type.tensor_type for port in self._graph.output}
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

    def check_constants(self) -> PreviewSize | None:
        """Refuses other arrays and other nodes than the format has for such a graph."""
        if self._signature.shared:
            self._check_shared(self._signature.shared)
            return None
        weight, shape = self._signature.weight
        biased = "bias" in self._initializers
        previewed = bool({"P", "Q", "candidates"} & self._initializers.keys())
        if biased:
            self._check_floats("bias", shape[:1])
        if self._signature.n_classes is None:
            self._check_floats(weight, shape)
            self._check_names({weight}, biased)
            self._check_nodes(gate_nodes(biased))
            return None
        size, _ = shape
        self._check_matrices(previewed)
        form = self._form(self._signature.n_classes > size, biased, previewed)
        named = {weight, *self._signature.external}
        preview = None
        if form.kind == "int8":
            self._check_floats("scale", (size,))
            named |= {"scale"}
        elif form.kind == "svd":
            preview = self._check_preview(shape)
            named |= {"P", "Q", "candidates"}
        fixed = fixed_constants(form, size, self._signature.n_classes)
        for which, value in fixed.items():
            self._check_fixed(which, value)
        self._check_names(named | fixed.keys(), biased)
        self._check_nodes(expert_nodes(form))
        return preview

    def _form(self, absent: bool, biased: bool, previewed: bool) -> ExpertForm:
        outside = self._signature.external.get("W")
        if "W8" in self._signature.external:
            return ExpertForm("int8", biased, absent)
        if previewed:
            return ExpertForm("svd", biased, absent)
        halves = outside is not None and outside.dtype == FLOAT16
        by_column = outside is not None and not self._signature.by_row
        return ExpertForm("plain", biased, absent, by_column=by_column, halves=halves)

    def _check_shared(self, expected: Mapping[str, NDArray[Any]]) -> None:
        self._check_matrices(previewed=False)
        for which, value in expected.items():
            found = self._array(which, value.shape, _onnx_type(value))
            if not np.array_equal(found, value):
                raise GraphDiffers(f"{self.name} has another {which} than the index and the head.")
        form = ExpertForm("shared", "bias" in expected, absent=True)
        fixed = fixed_constants(form, 0, 0)
        for which, value in fixed.items():
            self._check_fixed(which, value)
        self._check_names({"W", *expected, *fixed}, biased=False)
        self._check_nodes(expert_nodes(form))

    def _check_matrices(self, previewed: bool) -> None:
        """Those that are outside the graph, or else the one within."""
        weight, shape = self._signature.weight
        if not self._signature.external:
            self._check_floats(weight, shape)
        for which, expected in self._signature.external.items():
            # What candidates' rows are gathered from is stored by row.
            by_row = previewed and which == weight
            self._check_array(which, shape if by_row else expected.shape, expected.dtype)
            if self._initializers[which].data_location != TensorProto.EXTERNAL:
                raise ShapeWrong(f"{self.name} holds {which}, which must be in {expected.file}.")

    def _check_preview(self, shape: tuple[int, int]) -> PreviewSize:
        """The preview's size from its arrays, which are those that the graph computes with."""
        size, hidden_size = shape
        directions = self._initializers.get("P")
        window = directions.dims[0] if directions is not None and directions.dims else 0
        if not 1 <= window <= hidden_size:
            raise ShapeWrong(
                f"{self.name} previews {window} directions; 1 to {hidden_size} are possible."
            )
        self._check_floats("P", (window, hidden_size))
        self._check_floats("Q", (size, window))
        candidates = int(self._array("candidates", (1,), INT64)[0])
        if not 1 <= candidates <= size:
            raise ShapeWrong(f"{self.name} has {candidates} candidates; 1 to {size} are possible.")
        return PreviewSize(window, candidates)

    def _check_fixed(self, which: str, value: NDArray[Any]) -> None:
        found = self._array(which, value.shape, _onnx_type(value))
        if which == "log_absent":  # may be rounded otherwise
            counted, absent = (
                float(np.exp(array[0].astype(np.float64))) for array in (found, value)
            )
            if counted >= 2**31 or round(counted) != round(absent):
                raise ShapeWrong(
                    f"{self.name} counts {counted:.0f} absent classes, not {absent:.0f}."
                )
        elif not np.array_equal(found, value):
            raise ShapeWrong(f"{self.name} has another {which} than {value.ravel()[0]}.")

    def _check_floats(self, which: str, shape: tuple[int, ...]) -> None:
        check_finite(f"{which} of {self.name}", self._array(which, shape, FLOAT))

    def _array(self, which: str, shape: tuple[int, ...], dtype: int) -> NDArray[Any]:
        """An array that the graph holds."""
        self._check_array(which, shape, dtype)
        content, numpy_type = self._initializers[which].raw_data, NUMPY_TYPES[dtype]
        if len(content) != numpy_type.itemsize * int(np.prod(shape)):
            raise ShapeWrong(f"{self.name} holds {which} with {len(content)} bytes.")
        return np.frombuffer(content, numpy_type).reshape(shape)

    def _check_array(self, which: str, shape: tuple[int, ...], dtype: int) -> None:
        tensor = self._initializers.get(which)
        found = None if tensor is None else tuple(tensor.dims)
        if tensor is None or found != shape:
            raise ShapeWrong(f"{self.name} holds {which} of shape {found}, not {shape}.")
        if tensor.data_type != dtype:
            raise ShapeWrong(f"{self.name} holds {which} of the wrong type.")

    def _check_names(self, named: set[str], biased: bool) -> None:
        others = self._initializers.keys() - named - ({"bias"} if biased else set())
        if others:
            raise GraphForbidden(
                f"{self.name} holds the array {min(others)!r}, which its kind of graph has not."
            )

    def _check_nodes(self, expected: Nodes) -> None:
        for place, (found, wanted) in enumerate(zip_longest(self._graph.node, expected)):
            if found is None or wanted is None or _computed(found) != _computed(wanted):
                operator = "missing" if found is None else repr(found.op_type[:40])
                raise GraphForbidden(
                    f"{self.name} computes something else than the format says, "
                    f"from node {place} ({operator}) on."
                )


def _onnx_type(array: NDArray[Any]) -> int:
    return next(onnx_type for onnx_type, of in NUMPY_TYPES.items() if of == array.dtype)


def _computed(node: onnx.NodeProto) -> tuple[object, ...]:
    """All of a node but its name and its comment."""
    attributes = sorted(
        (attribute.name, attribute.SerializeToString(deterministic=True))
        for attribute in node.attribute
    )
    return node.op_type, node.domain or "ai.onnx", [*node.input], [*node.output], attributes
