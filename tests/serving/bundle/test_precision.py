"""Experts in float32, float16 and int8: what is stored, what is answered, what is refused."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from helpers.altered_bundle import replace_file, rewrite_manifest, set_field
from helpers.paths import DEMO, GOLDEN
from numpy.typing import NDArray
from serving.engine.test_engine import D, K, N, make_bundle

from service import bundle, errors
from service.bundle import graphs
from service.bundle.format import Precision
from service.engine import BackendName, Engine
from service.engine.kernels.scores import rescored

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int8")
ITEM_BYTES = {"fp32": 4, "fp16": 2, "int8": 4}


def write(path: Path, precision: Precision, biased: bool = False) -> bundle.Bundle:
    """Experts of more classes than are rescored, and of fewer."""
    return make_bundle(path, 3, [60, 40, 0, 3, 55, 60, 30, 50], precision, biased)


@pytest.fixture(scope="module", params=PRECISIONS)
def precision(request: pytest.FixtureRequest) -> Precision:
    return request.param


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "biased"])
def made(
    request: pytest.FixtureRequest, precision: Precision, tmp_path_factory: pytest.TempPathFactory
) -> bundle.Bundle:
    return write(tmp_path_factory.mktemp("precision") / "1", precision, request.param)


@pytest.fixture(scope="module")
def hidden() -> NDArray[np.float32]:
    return np.random.default_rng(1).normal(size=(400, D)).astype(np.float32)


def test_matrices_are_mapped_and_not_copied(made: bundle.Bundle, precision: Precision) -> None:
    weights = made.path / "experts" / "weights.bin"
    assert weights.stat().st_size == len(made.classes) * D * ITEM_BYTES[precision]
    assert (made.quantised is not None) == (precision == "int8")
    engine = Engine(made)
    layer = engine._backend._layer  # type: ignore[attr-defined]
    used, quantised = layer.weights, layer.quantised
    assert made.weights is not None and np.shares_memory(used, made.weights)
    assert not used.flags.owndata and not used.flags.writeable
    if made.quantised is not None:
        assert np.shares_memory(quantised, made.quantised)
    # The graphs hold none of them.
    assert sum(len(model) for model in made.expert_models if model) < 2500 * K


@pytest.mark.parametrize(("k", "experts"), [(1, 1), (5, 1), (10, 3), (50, 2), (N, 1)])
def test_both_backends_answer_the_same(
    made: bundle.Bundle, hidden: NDArray[np.float32], k: int, experts: int
) -> None:
    compiled = Engine(made, backend="compiled").topk(hidden, k, experts)
    onnx_runtime = Engine(made, backend="onnx").topk(hidden, k, experts)
    np.testing.assert_allclose(compiled.log_probs, onnx_runtime.log_probs, rtol=1e-4, atol=1e-4)
    same = (compiled.classes == onnx_runtime.classes).all(axis=1)
    assert same.mean() > 0.99  # but for ties by rounding
    assert compiled.expert_rows.tolist() == onnx_runtime.expert_rows.tolist()


def test_a_row_does_not_depend_on_its_batch(
    made: bundle.Bundle, hidden: NDArray[np.float32]
) -> None:
    engine = Engine(made, backend="compiled")
    for k, experts in ((4, 1), (20, 2)):
        together = engine.topk(hidden, k, experts)
        for row in range(0, 400, 7):
            alone = engine.topk(hidden[row : row + 1], k, experts)
            assert alone.classes.tobytes() == together.classes[row : row + 1].tobytes()
            assert alone.log_probs.tobytes() == together.log_probs[row : row + 1].tobytes()


def test_int8_answers_what_float32_does(tmp_path: Path, hidden: NDArray[np.float32]) -> None:
    exact = Engine(write(tmp_path / "fp32", "fp32")).topk(hidden, 5)
    rough = Engine(write(tmp_path / "int8", "int8")).topk(hidden, 5)
    assert (rough.classes == exact.classes).all(axis=1).mean() >= 0.995
    np.testing.assert_allclose(rough.log_probs, exact.log_probs, atol=0.05)


def test_the_best_are_scored_anew_with_the_rows_themselves(
    tmp_path: Path, hidden: NDArray[np.float32]
) -> None:
    """Differences between log-probabilities are those of exact scores: the normaliser cancels."""
    exact = Engine(write(tmp_path / "fp32", "fp32")).topk(hidden, 3)
    rough = Engine(write(tmp_path / "int8", "int8")).topk(hidden, 3)
    same = (rough.classes == exact.classes).all(axis=1)
    wanted, found = np.diff(exact.log_probs[same]), np.diff(rough.log_probs[same])
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_a_row_of_zeros_and_a_class_of_zeros(tmp_path: Path, precision: Precision) -> None:
    made = bundle.write(
        tmp_path / "1",
        gate=np.ones((1, 4), np.float32),
        weight=np.zeros((30, 4), np.float32),
        offsets=np.array([0, 30]),
        classes=np.arange(30, dtype=np.int32),
        n_classes=30,
        training=bundle.TrainingFacts(utilization=[1.0], flops_speedup=1.0),
        precision=precision,
    )
    rows = np.array([[0, 0, 0, 0], [1, -1, 2, 0]], np.float32)
    for backend in ("compiled", "onnx"):
        answer = Engine(made, backend=backend).topk(rows, 4)  # type: ignore[arg-type]
        assert answer.classes.tolist() == [[0, 1, 2, 3]] * 2
        np.testing.assert_allclose(answer.log_probs, -np.log(30), rtol=1e-5)


def test_a_graph_runs_from_its_file_alone(made: bundle.Bundle, hidden: NDArray[np.float32]) -> None:
    """As any other program would: ONNX Runtime finds the matrices beside the graph."""
    session = onnxruntime.InferenceSession(made.path / "experts" / "000.onnx")
    gate = np.ones((3, 1), np.float32)
    score, position, _ = session.run(None, {"hidden": hidden[:3], "gate": gate, "k": np.array([2])})
    bias = graphs.constants(made.expert_models[0] or b"").get("bias", np.zeros(60, np.float32))
    exact = hidden[:3] @ made.expert_weight(0).T + bias
    assert position.tolist() == np.argsort(-exact, axis=1)[:, :2].tolist()
    np.testing.assert_allclose(score, -np.sort(-exact, axis=1)[:, :2], rtol=1e-4, atol=1e-5)


def test_float16_keeps_what_it_can(tmp_path: Path) -> None:
    made = write(tmp_path / "1", "fp16")
    exact = write(tmp_path / "2", "fp32")
    rounded = exact.expert_weight(4).astype(np.float16).astype(np.float32)
    assert np.array_equal(made.expert_weight(4), rounded)


def test_version_1_is_read_as_ever(tmp_path: Path) -> None:
    old = bundle.read(DEMO)
    assert old.manifest.format_version == 1 and old.weights is None
    weight = np.concatenate([old.expert_weight(e) for e in range(old.manifest.n_experts)])
    new = bundle.write(
        tmp_path / "1",
        gate=graphs.constants(old.gate_model)["U"],
        weight=weight,
        offsets=old.offsets,
        classes=old.classes,
        n_classes=old.manifest.n_classes,
        training=old.manifest.training,
    )
    rows = np.random.default_rng(0).normal(size=(50, old.manifest.hidden_size)).astype(np.float32)
    before, after = Engine(old).topk(rows, 10, 2), Engine(new).topk(rows, 10, 2)
    assert before.classes.tobytes() == after.classes.tobytes()
    assert before.log_probs.tobytes() == after.log_probs.tobytes()


@pytest.mark.parametrize("backend", ["compiled", "onnx"])
def test_bundles_written_long_ago_answer_as_they_did(
    precision: Precision, backend: BackendName
) -> None:
    """The golden files were written when version 2 was new, and are never written again."""
    made = bundle.read(GOLDEN / precision)
    said = json.loads((GOLDEN / f"{precision}.json").read_text())
    assert made.samples is not None
    answer = Engine(made, backend=backend).topk(made.samples, said["k"], said["experts"])
    assert answer.classes.tolist() == said["classes"]
    assert answer.experts.tolist() == said["chosen"]
    np.testing.assert_allclose(answer.log_probs, said["log_probs"], atol=1e-4)


# --- what is refused --------------------------------------------------------------------------


def test_weights_too_large_for_float16(tmp_path: Path) -> None:
    with pytest.raises(errors.PrecisionUnsuitable, match="too large"):
        bundle.write(
            tmp_path / "1",
            gate=np.ones((1, 2), np.float32),
            weight=np.full((3, 2), 1e6, np.float32),
            offsets=np.array([0, 3]),
            classes=np.arange(3, dtype=np.int32),
            n_classes=3,
            training=bundle.TrainingFacts(utilization=[1.0], flops_speedup=1.0),
            precision="fp16",
        )
    assert not (tmp_path / "1").exists()


def external(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("location", "../../../etc/passwd"),
        ("location", "quantised.bin"),
        ("offset", "4"),
        ("length", "4"),
        ("checksum", "0"),
    ],
)
def test_matrices_elsewhere_than_they_must_be(tmp_path: Path, fact: str, value: str) -> None:
    made = write(tmp_path / "1", "int8")
    model = onnx.load_model_from_string(made.expert_models[1] or b"")
    tensor = external(model, "W")
    facts = {entry.key: entry.value for entry in tensor.external_data} | {fact: value}
    del tensor.external_data[:]
    for key, stated in facts.items():
        tensor.external_data.add(key=key, value=stated)
    replace_file(made.path, "experts/001.onnx", model.SerializeToString())
    with pytest.raises(errors.GraphForbidden, match="outside"):
        bundle.read(made.path)


def test_other_arrays_stay_in_the_graph(tmp_path: Path) -> None:
    made = write(tmp_path / "1", "int8")
    model = onnx.load_model_from_string(made.expert_models[1] or b"")
    tensor = external(model, "scale")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.bin")
    replace_file(made.path, "experts/001.onnx", model.SerializeToString())
    with pytest.raises(errors.GraphForbidden):
        bundle.read(made.path)


def test_a_matrix_within_the_graph_is_not_version_2(tmp_path: Path) -> None:
    made = write(tmp_path / "1", "fp32")
    inside = graphs.expert_graph(made.expert_weight(1), N)
    replace_file(made.path, "experts/001.onnx", inside)
    with pytest.raises(errors.ShapeWrong):
        bundle.read(made.path)


@pytest.mark.parametrize("which", ["per_answer", "at_least"])
def test_as_many_are_rescored_as_the_format_says(tmp_path: Path, which: str) -> None:
    made = write(tmp_path / "1", "int8")
    model = onnx.load_model_from_string(made.expert_models[1] or b"")
    external(model, which).raw_data = np.array([1], np.int64).tobytes()
    replace_file(made.path, "experts/001.onnx", model.SerializeToString())
    with pytest.raises(errors.ShapeWrong, match=which):
        bundle.read(made.path)


def test_a_precision_that_the_files_do_not_have(tmp_path: Path) -> None:
    made = write(tmp_path / "1", "fp32")
    rewrite_manifest(made.path, set_field("precision", "int8"))
    with pytest.raises(errors.FileSetWrong, match=r"quantised\.bin"):
        bundle.read(made.path)
    rewrite_manifest(made.path, set_field("precision", "fp16"))
    with pytest.raises(errors.BundleError):
        bundle.read(made.path)
    rewrite_manifest(made.path, set_field("precision", "int4"))
    with pytest.raises(errors.ManifestMalformed):
        bundle.read(made.path)


def test_a_file_of_matrices_that_is_too_short(tmp_path: Path) -> None:
    made = write(tmp_path / "1", "fp32")
    content = (made.path / "experts/weights.bin").read_bytes()
    replace_file(made.path, "experts/weights.bin", content[:-4])
    with pytest.raises(errors.ShapeWrong, match=r"weights\.bin"):
        bundle.read(made.path)


def test_rescored_are_twice_the_answers_but_some() -> None:
    assert [rescored(k, 60) for k in (1, 8, 9, 40)] == [16, 16, 18, 60]
