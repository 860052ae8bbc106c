"""Graphs of experts approximated by SVD: by hand, against plain ones, and what is refused."""

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from serving.engine.test_svd_experts import BIASES, HAND, HAND_PREVIEW, D, N, low_rank, rows

from service import errors
from service.bundle import graph_checks, graphs
from service.bundle.graphs import Preview, PreviewSize
from trainer.export.svd_softmax import preview


def session(graph: bytes) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])


def test_a_case_by_hand() -> None:
    graph = graphs.expert_svd_graph(HAND, 6, HAND_PREVIEW)
    feeds = {"hidden": np.array([[1, 5]], np.float32), "gate": np.array([[0.5]], np.float32)}
    run = session(graph).run
    # Exact logits are 4, 5, 3 and -5, cheap ones 4, 0, 3 and 0. Two candidates: classes 0 and 2.
    score, position, logsumexp = run(None, feeds | {"k": np.array([2])})
    assert position.tolist() == [[0, 2]]
    assert score.tolist() == [[2.0, 1.5]]
    assert logsumexp[0, 0] == pytest.approx(np.log(np.exp(2) + 1 + np.exp(1.5) + 1 + 2))
    # Three answers need three candidates. Classes 1 and 3 look alike: the lower one is taken.
    score, position, logsumexp = run(None, feeds | {"k": np.array([3])})
    assert position.tolist() == [[1, 0, 2]]
    assert score.tolist() == [[2.5, 2.0, 1.5]]
    expected = np.log(np.exp(2) + np.exp(2.5) + np.exp(1.5) + 1 + 2)
    assert logsumexp[0, 0] == pytest.approx(expected)


def test_a_case_by_hand_with_a_bias() -> None:
    """The bias alone makes class 3 look good, and it is added to its exact score too."""
    bias = np.array([0, 0, 0, 10], np.float32)
    run = session(graphs.expert_svd_graph(HAND, 4, HAND_PREVIEW, bias)).run
    feeds = {"hidden": np.array([[1, 5]], np.float32), "gate": np.ones((1, 1), np.float32)}
    score, position, logsumexp = run(None, feeds | {"k": np.array([2])})
    assert position.tolist() == [[3, 0]]
    assert score.tolist() == [[5.0, 4.0]]
    expected = np.log(np.exp(4) + 1 + np.exp(3) + np.exp(5))
    assert logsumexp[0, 0] == pytest.approx(expected)


def test_the_preview_is_the_strongest_directions() -> None:
    found = preview(HAND, window=1, share=0.3)
    np.testing.assert_allclose(np.abs(found.directions), [[1, 0]], atol=1e-7)
    np.testing.assert_allclose(
        found.weight @ found.directions, HAND * np.array([1, 0], np.float32), atol=1e-6
    )
    assert found.candidates == 2  # 1.2 of 4 classes
    assert found.size.cost(4, 2) == 1 + 4 / 2 + 2
    assert found.size.cost(4, 2, k=3) == 1 + 4 / 2 + 3
    assert found.size.cost(4, 2, k=9) == 1 + 4 / 2 + 4  # there are only four
    assert preview(np.ones((100, 2), np.float32), 1, 0.07).candidates == 7


@BIASES
@pytest.mark.parametrize("n_classes", [90, 100])
def test_a_full_window_and_all_candidates_are_the_plain_expert(
    biased: bool, n_classes: int
) -> None:
    rng = np.random.default_rng(2)
    weight = low_rank(rng, 90, D)
    bias = rng.normal(size=90).astype(np.float32) if biased else None
    plain = session(graphs.expert_graph(weight, n_classes, bias))
    close = session(graphs.expert_svd_graph(weight, n_classes, preview(weight, D, 1.0), bias))
    gate = rng.uniform(0.2, 1, size=(50, 1)).astype(np.float32)
    for k in (1, 10, 90):
        feeds = {"hidden": rows(50), "gate": gate, "k": np.array([k])}
        expected, found = plain.run(None, feeds), close.run(None, feeds)
        np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
        np.testing.assert_array_equal(found[1], expected[1])
        np.testing.assert_allclose(found[2], expected[2], atol=1e-5)


def test_ties_go_by_position() -> None:
    """Equal rows: the first ones are the candidates, and answered in their order."""
    weight = np.ones((50, D), np.float32)
    shown = Preview(np.ones((1, D), np.float32) / 4, np.full((50, 1), 4, np.float32), 25)
    run = session(graphs.expert_svd_graph(weight, 60, shown)).run
    hidden = np.round(rows(9))  # nothing is rounded, so that equal rows have equal scores
    for k in (1, 20, 50):
        feeds = {"hidden": hidden, "gate": np.ones((9, 1), np.float32), "k": np.array([k])}
        assert run(["position"], feeds)[0].tolist() == [list(range(k))] * 9


@BIASES
@pytest.mark.parametrize("k", [1, 10, 200])
def test_an_answer_does_not_depend_on_its_batch(biased: bool, k: int) -> None:
    rng = np.random.default_rng(3)
    weight = low_rank(rng, 200, D)
    bias = rng.normal(size=200).astype(np.float32) if biased else None
    run = session(graphs.expert_svd_graph(weight, N, preview(weight, 5, 0.17), bias)).run
    hidden, gate = rows(257), rng.uniform(0.2, 1, size=(257, 1)).astype(np.float32)
    together = run(None, {"hidden": hidden, "gate": gate, "k": np.array([k])})
    for size in (1, 7, 64):
        for first in range(0, 257, size):
            part = slice(first, first + size)
            feeds = {"hidden": hidden[part], "gate": gate[part], "k": np.array([k])}
            for alone, all_rows in zip(run(None, feeds), together, strict=True):
                assert np.array_equal(alone, all_rows[part])


# --- what is refused -------------------------------------------------------------------------


def changed(
    replaced: dict[str, NDArray[np.generic] | None], graph: bytes | None = None
) -> onnx.ModelProto:
    """The graph of the case by hand with other arrays, or without them."""
    model = onnx.load_model_from_string(graph or graphs.expert_svd_graph(HAND, 6, HAND_PREVIEW))
    kept = [tensor for tensor in model.graph.initializer if tensor.name not in replaced]
    new = [numpy_helper.from_array(v, name) for name, v in replaced.items() if v is not None]
    model.graph.ClearField("initializer")
    model.graph.initializer.extend([*kept, *new])
    return model


def check(model: onnx.ModelProto) -> PreviewSize | None:
    signature = graph_checks.expert_signature(4, 2, 6)
    return graph_checks.check_graph("experts/000.onnx", model.SerializeToString(), signature)


def integers(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def zeros(*shape: int) -> NDArray[np.float32]:
    return np.zeros(shape, np.float32)


def test_a_good_one_tells_its_size() -> None:
    assert check(changed({})) == PreviewSize(window=1, candidates=2)
    assert check(onnx.load_model_from_string(graphs.expert_graph(HAND, 6))) is None


@pytest.mark.parametrize(
    "replaced",
    [
        {"P": zeros(1, 3)},
        {"P": zeros(2, 2)},
        {"P": zeros(0, 2)},
        {"P": zeros(2)},
        {"P": zeros(3, 2), "Q": zeros(4, 3)},  # more directions than there are
        {"Q": zeros(4, 2)},
        {"Q": zeros(3, 1)},
        {"W": zeros(3, 2)},
        {"candidates": integers(0)},
        {"candidates": integers(5)},
        {"candidates": integers(-1)},
        {"candidates": integers(1, 2)},
        {"candidates": np.array(2, np.int64)},
        {"candidates": np.array([2], np.int32)},
        {"candidates": np.array([2], np.float32)},
        {"log_absent": np.log(np.array([5], np.float32))},
        {"bias": zeros(3)},
        {"bias": zeros(4, 1)},
    ],
)
def test_arrays_of_another_shape_are_refused(replaced: dict[str, NDArray[np.generic]]) -> None:
    with pytest.raises(errors.ShapeWrong) as refusal:
        check(changed(replaced))
    assert str(refusal.value).endswith(".")


@pytest.mark.parametrize("name", ["P", "Q", "candidates", "W"])
def test_a_missing_array_is_refused(name: str) -> None:
    with pytest.raises(errors.BundleError):
        check(changed({name: None}))
    # Even if nothing misses it.
    model = changed({name: None})
    for node in model.graph.node:
        for place, given in enumerate(node.input):
            if given == name:
                node.input[place] = "hidden" if name != "candidates" else "k"
    with pytest.raises(errors.ShapeWrong):
        check(model)


def test_candidates_with_too_few_bytes_are_refused() -> None:
    model = changed({})
    tensor = next(t for t in model.graph.initializer if t.name == "candidates")
    tensor.raw_data = tensor.raw_data[:3]
    with pytest.raises(errors.BundleError):
        check(model)


def test_a_preview_that_saves_nothing_is_refused() -> None:
    """All of W is multiplied, or the number of candidates is another: the cost would be a lie."""
    model = changed({})
    model.graph.node.append(helper.make_node("Gemm", ["hidden", "W"], ["all"], transB=1))
    with pytest.raises(errors.GraphForbidden, match="from node 19 \\('Gemm'\\) on"):
        check(model)
    model = changed({"size": integers(4)})
    maximum = next(node for node in model.graph.node if node.op_type == "Max")
    maximum.input[1] = "size"
    with pytest.raises(errors.GraphForbidden, match="holds the array 'size'"):
        check(model)


def test_biases_of_another_length_are_refused() -> None:
    for bias in (zeros(3), zeros(5), zeros(1, 4)):
        graph = graphs.expert_graph(HAND, 6, zeros(4))
        with pytest.raises(errors.ShapeWrong, match="bias"):
            check(changed({"bias": bias}, graph))
    gate = graphs.gate_graph(HAND, zeros(4))
    graph_checks.check_graph("gate.onnx", gate, graph_checks.gate_signature(4, 2))
    wrong = changed({"bias": zeros(3)}, gate).SerializeToString()
    with pytest.raises(errors.ShapeWrong, match="bias"):
        graph_checks.check_graph("gate.onnx", wrong, graph_checks.gate_signature(4, 2))
