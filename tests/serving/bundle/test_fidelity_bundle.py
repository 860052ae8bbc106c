"""Version 4: bundles whose experts share the head's rows, and heads stored by row.

Each clause of the format has a bundle that breaks it.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from helpers.altered_bundle import Change, replace_file, rewrite_manifest, set_field
from helpers.fidelity_layer import a_contract, write_fidelity
from helpers.tiny_bundle import N_CLASSES, WIDTH, write_tiny
from onnx import numpy_helper

from service import bundle, errors, npy
from service.bundle import graphs
from service.bundle.format import MANIFEST, ROW_FILES
from service.engine import Engine
from service.engine.graph_comparison import compare_graphs
from service.engine.verification import verify_answers

FILES = [
    MANIFEST,
    "gate.onnx",
    *(f"experts/00{expert}.onnx" for expert in range(3)),
    "experts/head.onnx",
    "experts/weights.bin",
    "experts/quantised.bin",
    "experts/scales.npy",
    "index/offsets.npy",
    "index/classes.npy",
    "index/rest.npy",
    "samples.npy",
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bundle.Bundle:
    path = tmp_path_factory.mktemp("fidelity") / "1"
    return write_fidelity(path, biased=True, contract=a_contract(4))


@pytest.fixture
def folder(written: bundle.Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written.path, tmp_path / "copy"))


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> bundle.Bundle:
    head = np.random.default_rng(0).normal(size=(N_CLASSES, WIDTH)).astype(np.float32)
    return write_tiny(tmp_path_factory.mktemp("accuracy") / "1", head=head, precision="fp16")


def test_what_is_written_is_read(written: bundle.Bundle) -> None:
    found = bundle.read(written.path)
    assert found.manifest == written.manifest
    assert found.manifest.format_version == 4 and found.manifest.objective == "fidelity"
    assert found.manifest.contract == a_contract(4)
    assert found.rows is not None and found.rest is not None and found.weights is None
    assert found.rows.bias is not None and found.rows.weights.shape == (60, 20)
    assert found.rest.shape == (4, 21)
    held = found.expert_classes(1)
    assert (found.expert_weight(1) == found.rows.weights[held]).all()
    assert found.expert_models[3] is None and found.expert_weight(3).shape == (0, 20)
    assert not found.rows.weights.flags.writeable  # it is shared, not copied
    engine = Engine(found)
    assert engine.objective == "fidelity" and engine.can_exact
    assert engine.contract == a_contract(4) and engine.n_reachable == 60
    verify_answers(found, engine)


def test_the_list_of_files_is_complete(written: bundle.Bundle) -> None:
    present = {str(p.relative_to(written.path)) for p in written.path.rglob("*") if p.is_file()}
    assert present == set(FILES)


def test_an_accuracy_bundle_with_its_head(headed: bundle.Bundle) -> None:
    manifest = headed.manifest
    assert manifest.format_version == 4 and manifest.objective == "accuracy"
    assert "contract" not in json.loads((headed.path / MANIFEST).read_text())
    names = {name for name in manifest.files if name.startswith("head/")}
    assert names == {f"head/{name}" for name in ROW_FILES}
    assert headed.rows is not None and headed.rows.weights.dtype == np.float32
    assert bundle.read(headed.path).rows is None  # only if it is wanted
    full = bundle.read(headed.path, head=True)
    assert full.head is not None
    hidden = np.random.default_rng(1).normal(size=(5, WIDTH)).astype(np.float32)
    scores = hidden.astype(np.float64) @ headed.rows.weights.T.astype(np.float64)
    answer = Engine(full.head).topk(hidden, 3)
    assert answer.classes.tolist() == np.argsort(-scores, axis=1)[:, :3].tolist()
    verify_answers(full, Engine(full))


def test_bundles_without_a_head_stay_version_2(tmp_path: Path) -> None:
    fields = json.loads((write_tiny(tmp_path / "1").path / MANIFEST).read_text())
    assert fields["format_version"] == 2
    assert not {"head", "objective", "contract"} & fields.keys()


def test_graphs_run_in_onnx_runtime_by_themselves(written: bundle.Bundle) -> None:
    """As other programs would, from the files."""
    assert written.rows is not None and written.rest is not None and written.samples is not None
    hidden, bias = written.samples, written.rows.bias
    for expert in range(3):
        graph = onnxruntime.InferenceSession(written.path / f"experts/00{expert}.onnx")
        held = written.expert_classes(expert)
        for gate in (1.0, 0.25):  # it makes no difference
            feeds = {
                "hidden": hidden,
                "gate": np.full((len(hidden), 1), gate, np.float32),
                "k": np.array([1]),
            }
            score, position, logsumexp = graph.run(None, feeds)
            assert bias is not None
            scores = hidden @ written.rows.weights[held].T + bias[held]
            assert position[:, 0].tolist() == scores.argmax(axis=1).tolist()
            np.testing.assert_allclose(score[:, 0], scores.max(axis=1), rtol=1e-4)
            rest = hidden @ written.rest[expert, :-1] + written.rest[expert, -1]
            total = np.logaddexp(np.logaddexp.reduce(scores, axis=1), rest)
            np.testing.assert_allclose(logsumexp[:, 0], total, rtol=1e-4, atol=1e-4)


# --- damage ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_byte_is_refused(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    step = max(1, len(content) // 40)
    for position in range(0, len(content), step):
        flipped = bytearray(content)
        flipped[position] ^= 1 << (position % 8)
        (folder / name).write_bytes(flipped)
        with pytest.raises(errors.BundleError) as refusal:
            bundle.read(folder)
        assert name == MANIFEST or refusal.type is errors.ChecksumWrong


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(errors.BundleMissing if name == MANIFEST else errors.FileMissing):
        bundle.read(folder)


def drop(name: str) -> Change:
    return lambda fields: fields["files"].pop(name)


def contract(**changes: object) -> Change:
    return lambda fields: fields["contract"].update(changes)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (set_field("format_version", 3), errors.ManifestMalformed),
        (set_field("format_version", 5), errors.UnknownFormatVersion),
        (set_field("objective", "speed"), errors.ManifestMalformed),
        (set_field("objective", "accuracy"), errors.ManifestMalformed),  # with a contract
        (set_field("head", False), errors.ManifestMalformed),
        (set_field("precision", "fp32"), errors.ManifestMalformed),
        (set_field("hidden_size", 21), errors.ShapeWrong),
        (set_field("n_classes", 61), errors.ShapeWrong),
        (drop("index/rest.npy"), errors.FileSetWrong),
        (drop("experts/head.onnx"), errors.FileSetWrong),
        (drop("experts/quantised.bin"), errors.FileSetWrong),
        (drop("experts/scales.npy"), errors.FileSetWrong),
        (drop("experts/weights.bin"), errors.FileSetWrong),
        (lambda f: f["files"]["experts/weights.bin"].update(bytes=8), errors.ShapeWrong),
        (lambda f: f["files"]["experts/quantised.bin"].update(bytes=8), errors.ShapeWrong),
        (contract(rows=0), errors.ManifestMalformed),
        (contract(surprise=1), errors.ManifestMalformed),
        (contract(levels=[]), errors.ManifestMalformed),
        (contract(levels=[0.5, 0.9]), errors.ManifestMalformed),
        (contract(levels=[0.5, 0.9, 0.9]), errors.ManifestMalformed),
        (contract(levels=[0.5, 0.9, 1.0]), errors.ManifestMalformed),
        (contract(levels=[0.0, 0.9, 0.99]), errors.ManifestMalformed),
        (contract(ks=[1]), errors.ManifestMalformed),
        (contract(ks=[5, 1]), errors.ManifestMalformed),
        (contract(ks=[0, 5]), errors.ManifestMalformed),
        (contract(weights=[[0.0] * 8, [0.0] * 7]), errors.ManifestMalformed),
        (contract(weights=[[0.0] * 8]), errors.ManifestMalformed),
        (contract(weights=[[0.0] * 8, [1e400] * 8]), errors.ManifestMalformed),
        (contract(weights=[[0.0] * 8, ["1"] + [None] * 7]), errors.ManifestMalformed),
        (contract(experts=[[0.0] * 4]), errors.ManifestMalformed),
        (contract(experts=[[0.0] * 4, [0.0] * 3]), errors.ShapeWrong),
        (contract(thresholds=[[0.0] * 3, [0.0] * 2]), errors.ManifestMalformed),
        (contract(thresholds=[[0.0] * 3, [0.0, float("nan"), 0.0]]), errors.ManifestMalformed),
    ],
)
def test_a_lying_manifest(folder: Path, change: Change, expected: type[errors.BundleError]) -> None:
    rewrite_manifest(folder, change)
    with pytest.raises(expected) as refusal:
        bundle.read(folder)
    assert refusal.type is expected


def array(dtype: str, *shape: int) -> bytes:
    return npy.write(np.ones(shape, dtype))


def not_finite(name: str, shape: tuple[int, ...], value: float) -> bytes:
    del name
    numbers = np.ones(shape, np.float32)
    numbers.flat[-1] = value
    return npy.write(numbers)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("index/rest.npy", array("<f4", 4, 20), errors.ShapeWrong),
        ("index/rest.npy", array("<f4", 3, 21), errors.ShapeWrong),
        ("index/rest.npy", array("<f8", 4, 21), errors.ArrayMalformed),
        ("index/rest.npy", b"nothing", errors.ArrayMalformed),
        ("index/rest.npy", not_finite("rest", (4, 21), np.nan), errors.WeightsNotFinite),
        ("index/rest.npy", array("<f4", 4, 21), errors.GraphDiffers),  # the graphs say otherwise
        ("experts/scales.npy", array("<f4", 59), errors.ShapeWrong),
        ("experts/scales.npy", array("<f8", 60), errors.ArrayMalformed),
        ("experts/scales.npy", not_finite("scales", (60,), np.inf), errors.WeightsNotFinite),
        ("experts/scales.npy", not_finite("scales", (60,), 0.0), errors.ShapeWrong),
        ("experts/scales.npy", not_finite("scales", (60,), -1.0), errors.ShapeWrong),
        ("experts/scales.npy", array("<f4", 60), errors.ShapeWrong),  # not the steps of the rows
        ("experts/quantised.bin", b"\x80" * 1200, errors.ShapeWrong),
        ("experts/quantised.bin", b"\x00" * 1200, errors.ShapeWrong),
        ("experts/weights.bin", b"\x00\x00\xc0\x7f" * 1200, errors.WeightsNotFinite),
        ("experts/weights.bin", b"\x00\x00\x80\x3f" * 1200, errors.ShapeWrong),
    ],
)
def test_a_wrong_array(
    folder: Path, name: str, content: bytes, expected: type[errors.BundleError]
) -> None:
    replace_file(folder, name, content)
    with pytest.raises(expected) as refusal:
        bundle.read(folder)
    assert refusal.type is expected


def alter(folder: Path, name: str, change: Callable[[onnx.GraphProto], Any]) -> None:
    model = onnx.load_model(folder / name, load_external_data=False)
    change(model.graph)
    replace_file(folder, name, model.SerializeToString())


def initializer(graph: onnx.GraphProto, name: str) -> onnx.TensorProto:
    return next(tensor for tensor in graph.initializer if tensor.name == name)


def put(name: str, change: Callable[[Any], Any]) -> Callable[[onnx.GraphProto], None]:
    def changed(graph: onnx.GraphProto) -> None:
        tensor = initializer(graph, name)
        value = change(numpy_helper.to_array(tensor).copy())
        tensor.CopyFrom(numpy_helper.from_array(value, name))

    return changed


def next_class(classes: Any) -> Any:  # noqa: ANN401
    classes[-1] += 1
    return classes


def rename_port(graph: onnx.GraphProto) -> None:
    graph.node[0].op_type = "GatherND"


def at_another_place(graph: onnx.GraphProto) -> None:
    for fact in initializer(graph, "W").external_data:
        if fact.key == "offset":
            fact.value = "4"


def in_another_file(graph: onnx.GraphProto) -> None:
    for fact in initializer(graph, "W").external_data:
        if fact.key == "location":
            fact.value = "quantised.bin"


@pytest.mark.parametrize("name", ["experts/000.onnx", "experts/001.onnx"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (put("classes", next_class), errors.GraphDiffers),
        (put("classes", lambda classes: classes[:-1]), errors.ShapeWrong),
        (put("classes", lambda classes: classes.astype(np.int32)), errors.ShapeWrong),
        (put("rest", lambda rest: rest + 1), errors.GraphDiffers),
        (put("rest", lambda rest: rest[:-1]), errors.ShapeWrong),
        (put("rest_bias", lambda bias: bias + 1), errors.GraphDiffers),
        (put("bias", lambda bias: bias + 1), errors.GraphDiffers),
        (put("row_axis", lambda axis: axis + 1), errors.ShapeWrong),
        (lambda graph: graph.initializer.remove(initializer(graph, "bias")), errors.ShapeWrong),
        (
            lambda graph: graph.initializer.append(numpy_helper.from_array(np.ones(1), "more")),
            errors.GraphForbidden,
        ),
        (rename_port, errors.GraphForbidden),
        (lambda graph: graph.node.pop(), errors.GraphForbidden),
        (at_another_place, errors.GraphForbidden),
        (in_another_file, errors.GraphForbidden),
    ],
)
def test_an_expert_that_is_not_the_heads(
    folder: Path,
    name: str,
    change: Callable[[onnx.GraphProto], Any],
    expected: type[errors.BundleError],
) -> None:
    alter(folder, name, change)
    with pytest.raises(expected) as refusal:
        bundle.read(folder)
    assert refusal.type is expected


def test_a_head_whose_bias_is_another(folder: Path) -> None:
    """The experts' biases are then not its own."""
    alter(folder, "experts/head.onnx", put("bias", lambda bias: bias + 1))
    with pytest.raises(errors.GraphDiffers, match="bias"):
        bundle.read(folder)


@pytest.mark.parametrize("change", [at_another_place, in_another_file])
def test_a_head_that_names_other_rows(
    folder: Path, change: Callable[[onnx.GraphProto], Any]
) -> None:
    alter(folder, "experts/head.onnx", change)
    with pytest.raises(errors.GraphForbidden):
        bundle.read(folder)


def test_a_head_by_column_is_not_of_this_version(headed: bundle.Bundle, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(headed.path, tmp_path / "copy"))
    outside = graphs.External("weights.bin", 0, graphs.FLOAT, (WIDTH, N_CLASSES))
    replace_file(folder, "head/head.onnx", graphs.expert_graph(outside, N_CLASSES))
    with pytest.raises(errors.ShapeWrong):
        bundle.read(folder, head=True)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (drop("head/scales.npy"), errors.FileSetWrong),
        (set_field("contract", a_contract(3).model_dump()), errors.ManifestMalformed),
        (set_field("objective", "fidelity"), errors.ManifestMalformed),
        (set_field("format_version", 3), errors.ManifestMalformed),
    ],
)
def test_a_manifest_that_lies_about_its_head(
    headed: bundle.Bundle, tmp_path: Path, change: Change, expected: type[errors.BundleError]
) -> None:
    folder = Path(shutil.copytree(headed.path, tmp_path / "copy"))
    rewrite_manifest(folder, change)
    with pytest.raises(expected):
        bundle.read(folder, head=True)


def test_a_graph_that_computes_something_else_is_found(written: bundle.Bundle) -> None:
    """By `dss verify`, were it to pass the checks of its arrays."""
    assert written.rest is not None and written.samples is not None
    compare_graphs(written, written.samples)
    with pytest.raises(errors.GraphDiffers, match=r"experts/000\.onnx does not compute"):
        compare_graphs(replace(written, rest=written.rest + 30), written.samples)
    models = (None, None, None, None)
    changed = replace(written, expert_models=models, rows=written.rows)
    assert changed.head is not None and changed.rows is not None
    rows = replace(changed.rows, bias=None)
    with pytest.raises(errors.GraphDiffers, match=r"experts/head\.onnx does not compute"):
        compare_graphs(replace(changed, rows=rows), written.samples)


def test_what_cannot_be_written(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "gate": np.ones((2, 3), np.float32),
        "offsets": np.array([0, 2, 4]),
        "classes": np.array([0, 1, 2, 3], np.int32),
        "n_classes": 4,
        "training": bundle.TrainingFacts(utilization=[0.5, 0.5], flops_speedup=1.0),
    }
    head, rest = np.ones((4, 3), np.float32), np.zeros((2, 4), np.float32)
    for more in (
        {},
        {"weight": head, "rest": rest},
        {"objective": "fidelity", "head": head},
        {"objective": "fidelity", "rest": rest},
        {"objective": "fidelity", "head": head, "rest": rest, "weight": head},
        {"objective": "fidelity", "head": head, "rest": rest, "bias": head[:, 0]},
    ):
        with pytest.raises(ValueError, match="fidelity bundle"):
            bundle.write(tmp_path / "1", **given, **more)
    with pytest.raises(errors.WeightsNotFinite, match="rest"):
        bundle.write(tmp_path / "1", **given, objective="fidelity", head=head, rest=rest + np.nan)
    assert not (tmp_path / "1").exists()
