"""Graphs that are not plain and as expected are refused."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers.altered_bundle import replace_file
from helpers.tiny_bundle import N_CLASSES, SIZES, WIDTH, write_tiny
from onnx import TensorProto, helper, numpy_helper

from service import bundle, errors
from service.bundle import graphs


def expert_model() -> onnx.ModelProto:
    return onnx.load_model_from_string(
        graphs.expert_graph(np.ones((SIZES[0], WIDTH), np.float32), N_CLASSES)
    )


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
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="../../../etc/passwd")
    assert isinstance(refuse_expert(folder, model), errors.GraphForbidden)


def test_operators_that_are_not_needed(folder: Path) -> None:
    model = expert_model()
    model.graph.node.add(op_type="Loop", name="loop")
    assert isinstance(refuse_expert(folder, model), errors.GraphForbidden)
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
