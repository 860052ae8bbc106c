"""Graphs that are not plain and as expected are refused."""

from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers.altered_bundle import replace_file
from helpers.tiny_bundle import N_CLASSES, SIZES, WIDTH, write_tiny
from onnx import TensorProto, helper, numpy_helper

from service import bundle, errors
from service.bundle import graph_outline, graphs


def expert_model() -> onnx.ModelProto:
    """As the tiny bundle has it."""
    outside = graphs.External("weights.bin", 0, graphs.FLOAT, (WIDTH, SIZES[0]))
    return onnx.load_model_from_string(graphs.expert_graph(outside, N_CLASSES))


def gate_model(n_experts: int = 3) -> onnx.ModelProto:
    return onnx.load_model_from_string(graphs.gate_graph(np.ones((n_experts, WIDTH), np.float32)))


def refuse_expert(folder: Path, model: onnx.ModelProto) -> errors.BundleError:
    replace_file(folder, "experts/000.onnx", model.SerializeToString())
    with pytest.raises(errors.BundleError) as refusal:
        bundle.read(folder)
    return refusal.value


def test_truncated_onnx_with_a_right_checksum(folder: Path) -> None:
    content = (folder / "experts/000.onnx").read_bytes()
    replace_file(folder, "experts/000.onnx", content[: len(content) // 2])
    with pytest.raises((errors.GraphMalformed, errors.ShapeWrong)):
        bundle.read(folder)
    replace_file(folder, "experts/000.onnx", b"not a model")
    with pytest.raises(errors.GraphMalformed):
        bundle.read(folder)


def test_weights_of_another_shape(folder: Path) -> None:
    wrong = graphs.expert_graph(np.ones((SIZES[0] + 1, WIDTH), np.float32), N_CLASSES)
    replace_file(folder, "experts/000.onnx", wrong)
    with pytest.raises(errors.ShapeWrong, match=r"W of shape \(6, 4\)"):
        bundle.read(folder)
    replace_file(folder, "gate.onnx", graphs.gate_graph(np.ones((3, WIDTH + 1), np.float32)))
    with pytest.raises(errors.ShapeWrong):
        bundle.read(folder)


def test_a_gate_in_place_of_an_expert(folder: Path) -> None:
    replace_file(folder, "experts/000.onnx", graphs.gate_graph(np.ones((3, WIDTH), np.float32)))
    with pytest.raises(errors.ShapeWrong, match="takes"):
        bundle.read(folder)


def test_external_data(folder: Path) -> None:
    model = expert_model()
    weight = next(t for t in model.graph.initializer if t.name == "W")
    weight.external_data[0].value = "../../../etc/passwd"
    assert isinstance(refuse_expert(folder, model), errors.GraphForbidden)


def test_operators_that_are_not_needed(folder: Path) -> None:
    model = expert_model()
    model.graph.node.add(op_type="Loop", name="loop")
    refusal = refuse_expert(folder, model)
    assert isinstance(refusal, errors.GraphForbidden) and "('Loop')" in str(refusal)
    model = expert_model()
    model.opset_import.add(domain="com.example", version=1)
    assert isinstance(refuse_expert(folder, model), errors.GraphForbidden)
    model = expert_model()
    model.opset_import[0].version = 12
    assert isinstance(refuse_expert(folder, model), errors.GraphForbidden)


def test_functions_and_sparse_tensors(folder: Path) -> None:
    model = expert_model()
    model.functions.add(name="f", domain="com.example")
    assert isinstance(refuse_expert(folder, model), errors.GraphForbidden)
    model = expert_model()
    values = numpy_helper.from_array(np.ones(1, np.float32), "values")
    indices = numpy_helper.from_array(np.zeros(1, np.int64), "indices")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [2]))
    assert isinstance(refuse_expert(folder, model), errors.GraphForbidden)


def test_outputs_of_another_kind(folder: Path) -> None:
    model = expert_model()
    model.graph.output[1].type.tensor_type.elem_type = TensorProto.INT32
    assert isinstance(refuse_expert(folder, model), errors.BundleError)


def test_a_head_is_not_approximated_and_its_graph_is_checked(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "headed", head=np.ones((N_CLASSES, WIDTH), np.float32)).path
    outside = graphs.External("weights.bin", 0, graphs.FLOAT, (N_CLASSES, WIDTH))
    preview = graphs.Preview(
        np.eye(2, WIDTH, dtype=np.float32), np.ones((N_CLASSES, 2), np.float32), 3
    )
    replace_file(folder, "head/head.onnx", graphs.expert_svd_graph(outside, N_CLASSES, preview))
    with pytest.raises(errors.GraphForbidden, match="approximated"):
        bundle.read(folder, head=True)
    replace_file(folder, "head/head.onnx", b"no graph")
    with pytest.raises(errors.GraphMalformed):
        bundle.read(folder, head=True)
    assert bundle.read(folder).head is None


# --- graphs that unfold, and graphs that compute something else -------------------------------


def doubling(model: onnx.ModelProto, first: str) -> onnx.ModelProto:
    """With nodes that make an array twice as long, again and again."""
    names = [first, *(f"doubled{time}" for time in range(35))]
    for short, long in pairwise(names):
        model.graph.node.append(helper.make_node("Concat", [short, short], [long], axis=0))
    return model


@pytest.mark.parametrize("first", ["zero", "W", "hidden"])
def test_a_graph_that_unfolds_is_refused_before_anything_computes_with_it(
    folder: Path, first: str
) -> None:
    refusal = refuse_expert(folder, doubling(expert_model(), first))
    assert isinstance(refusal, errors.GraphForbidden) and "('Concat')" in str(refusal)
    replace_file(folder, "gate.onnx", doubling(gate_model(), "U").SerializeToString())
    with pytest.raises(errors.GraphForbidden):
        bundle.read(folder)


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("ConstantOfShape", ["k"], ["more"]),
        helper.make_node("Expand", ["zero", "k"], ["more"]),
        helper.make_node("Tile", ["zero", "k"], ["more"]),
        helper.make_node("MatMul", ["W", "W"], ["more"]),
    ],
)
def test_no_node_is_added(folder: Path, node: onnx.NodeProto) -> None:
    model = expert_model()
    model.graph.node.append(node)
    assert isinstance(refuse_expert(folder, model), errors.GraphForbidden)


def test_a_graph_computes_what_the_format_says(folder: Path) -> None:
    """Scores that are not multiplied by the gate, another axis, one node fewer."""
    model = expert_model()
    multiplied = next(node for node in model.graph.node if node.op_type == "Mul")
    multiplied.input[1] = "zero"
    assert isinstance(refuse_expert(folder, model), errors.GraphForbidden)
    model = expert_model()
    best = next(node for node in model.graph.node if node.op_type == "TopK")
    best.attribute.append(helper.make_attribute("largest", 0))
    assert isinstance(refuse_expert(folder, model), errors.GraphForbidden)
    model = expert_model()
    del model.graph.node[-1]
    refusal = refuse_expert(folder, model)
    assert "(missing)" in str(refusal)


def test_names_and_comments_of_nodes_do_not_matter(folder: Path) -> None:
    model = expert_model()
    for node in model.graph.node:
        node.name, node.doc_string = f"{node.op_type}_1", "as written by another tool"
    model.metadata_props.add(key="author", value="somebody")
    replace_file(folder, "experts/000.onnx", model.SerializeToString())
    bundle.read(folder)


@pytest.mark.parametrize("field", ["node", "initializer", "input", "output"])
def test_a_file_of_empty_parts_is_refused_before_it_is_parsed(folder: Path, field: str) -> None:
    """Each takes two bytes in the file and a hundred in memory."""
    model = expert_model()
    graph_outline.check_outline("experts/000.onnx", model.SerializeToString())
    for _ in range(graph_outline.MOST_PARTS + 1):
        getattr(model.graph, field).add()
    with pytest.raises(errors.GraphForbidden, match=f"more {field} parts"):
        graph_outline.check_outline("experts/000.onnx", model.SerializeToString())
    assert isinstance(refuse_expert(folder, model), errors.GraphForbidden)


def test_parts_within_parts_are_bounded_too(folder: Path) -> None:
    model = expert_model()
    model.graph.node[0].input.extend([""] * 3000)
    refusal = refuse_expert(folder, model)
    assert isinstance(refusal, errors.GraphForbidden) and "4096 are possible" in str(refusal)
    model = expert_model()
    for _ in range(100):
        model.graph.initializer[0].external_data.add()
    assert isinstance(refuse_expert(folder, model), errors.GraphForbidden)
    model = gate_model()
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.float_data.extend([1.0] * 3 * WIDTH)
    replace_file(folder, "gate.onnx", model.SerializeToString())
    with pytest.raises(errors.GraphForbidden):
        bundle.read(folder)


def test_any_bytes_are_refused_by_name(folder: Path) -> None:
    """Bytes changed, cut off and made up: a BundleError, or a graph as good as before."""
    rng = np.random.default_rng(0)
    good = (folder / "experts/000.onnx").read_bytes()
    for _ in range(300):
        content = bytearray(good)
        for place in rng.integers(len(good), size=3):
            content[place] = rng.integers(256)
        replace_file(folder, "experts/000.onnx", bytes(content[: rng.integers(1, len(good) + 1)]))
        with suppress(errors.BundleError):
            bundle.read(folder)
