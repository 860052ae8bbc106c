"""Every way a bundle can be wrong is refused, by its own name."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers.paths import DEMO
from helpers.tiny_bundle import N_CLASSES, SIZES, WIDTH, write_tiny
from onnx import TensorProto, helper, numpy_helper

from service import bundle, errors
from service.bundle import graphs
from service.bundle.bundle import _label_bytes, _npy_bytes
from service.bundle.manifest import MANIFEST, NO_CHECKSUM, sha256


@pytest.fixture
def folder(tiny: bundle.Bundle, tmp_path: Path) -> Path:
    """A copy of the tiny bundle to damage."""
    return Path(shutil.copytree(tiny.path, tmp_path / "copy"))


def rewrite(folder: Path, change: Callable[[dict], None]) -> None:  # type: ignore[type-arg]
    """Change the manifest and state its checksum anew, as a careful forger would."""
    fields = json.loads((folder / MANIFEST).read_text())
    change(fields)
    fields["checksum"] = NO_CHECKSUM
    content = json.dumps(fields, indent=2)
    checksum = sha256(content.encode())
    (folder / MANIFEST).write_text(content.replace(NO_CHECKSUM, checksum))


def replace(folder: Path, name: str, content: bytes) -> None:
    """Change a file and its entry in the manifest."""
    (folder / name).write_bytes(content)

    def change(fields: dict) -> None:  # type: ignore[type-arg]
        fields["files"][name] = {"sha256": sha256(content), "bytes": len(content)}

    rewrite(folder, change)


def set_field(name: str, value: object) -> Callable[[dict], None]:  # type: ignore[type-arg]
    def change(fields: dict) -> None:  # type: ignore[type-arg]
        fields[name] = value

    return change


def npy(array: np.ndarray) -> bytes:  # type: ignore[type-arg]
    return _npy_bytes(array)


def with_head(path: Path) -> Path:
    return write_tiny(path / "headed", head=np.ones((N_CLASSES, WIDTH), np.float32)).path


# --- a good one -------------------------------------------------------------------------------


def test_what_is_written_is_read(tiny: bundle.Bundle) -> None:
    found = bundle.read(tiny.path)
    assert found.manifest == tiny.manifest
    assert found.manifest.expert_sizes == list(SIZES)
    assert found.classes.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 9, 10, 11]
    assert found.offsets.tolist() == [0, 5, 9, 13]
    assert found.labels is not None and found.labels[3] == "class 3"
    assert found.samples is not None and found.samples.shape == (2, WIDTH)
    onnx.checker.check_model(onnx.load_model_from_string(found.gate_model), full_check=True)


def test_the_same_layer_gives_the_same_files(tmp_path: Path) -> None:
    first, second = (write_tiny(tmp_path / name) for name in ("1", "2"))
    assert first.manifest.files == second.manifest.files


def test_plain_graphs_are_as_they_always_were() -> None:
    """Byte for byte those of the committed bundle, which has no bias and no preview."""
    demo = bundle.read(DEMO)
    assert demo.manifest.n_experts > 0
    for name, graph in [("U", demo.gate_model), *(("W", model) for model in demo.expert_models)]:
        assert graph is not None
        tensors = onnx.load_model_from_string(graph).graph.initializer
        weight = numpy_helper.to_array(next(t for t in tensors if t.name == name))
        if name == "U":
            assert graphs.gate_graph(weight) == graph
        else:
            assert graphs.expert_graph(weight, demo.manifest.n_classes) == graph


def test_an_expert_that_scores_all_its_classes_costs_as_many(tiny: bundle.Bundle) -> None:
    assert tiny.previews == (None, None, None)
    assert tiny.expert_costs == SIZES
    assert tiny.expert_cost(0, k=3) == SIZES[0]


def test_an_expert_without_classes_has_no_file(tmp_path: Path) -> None:
    written = bundle.write(
        tmp_path / "1",
        gate=np.eye(2, dtype=np.float32),
        weight=np.ones((3, 2), np.float32),
        offsets=np.array([0, 0, 3]),
        classes=np.arange(3, dtype=np.int32),
        n_classes=3,
        training=bundle.TrainingFacts(utilization=[0, 1], flops_speedup=0.6),
    )
    assert written.expert_models[0] is None
    assert not (tmp_path / "1" / "experts" / "000.onnx").exists()
    assert written.labels is None and written.samples is None


def test_the_manifest_is_written_last_and_a_failure_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def failing_rename(self: Path, _: Path) -> None:
        seen.append((self / MANIFEST).exists())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", failing_rename)
    with pytest.raises(OSError, match="No space"):
        write_tiny(tmp_path / "1")
    assert seen == [True]
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_is_never_overwritten(tiny: bundle.Bundle) -> None:
    before = (tiny.path / MANIFEST).read_bytes()
    with pytest.raises(errors.BundleExists):
        write_tiny(tiny.path)
    assert (tiny.path / MANIFEST).read_bytes() == before


def test_the_papers_speedup_formula() -> None:
    # 100 classes, two experts of 10 and 40 used 3:1, K = 2: 100 / (7.5 + 10 + 2)
    assert bundle.flops_speedup(100, [10, 40], [0.75, 0.25]) == pytest.approx(100 / 19.5)


# --- damage -----------------------------------------------------------------------------------

FILES = [
    MANIFEST,
    "gate.onnx",
    *(f"experts/00{expert}.onnx" for expert in range(3)),
    "experts/weights.bin",
    "index/offsets.npy",
    "index/classes.npy",
    "labels.txt",
    "samples.npy",
]


def test_the_list_of_files_is_complete(tiny: bundle.Bundle) -> None:
    present = {str(p.relative_to(tiny.path)) for p in tiny.path.rglob("*") if p.is_file()}
    assert present == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_byte_is_refused(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    step = max(1, len(content) // 200)
    for position in range(0, len(content), step):
        flipped = bytearray(content)
        flipped[position] ^= 1 << (position % 8)
        (folder / name).write_bytes(flipped)
        with pytest.raises(errors.BundleError) as refusal:
            bundle.read(folder)
        if name != MANIFEST:
            assert refusal.type is errors.ChecksumWrong
            assert name in str(refusal.value)


@pytest.mark.parametrize("name", FILES)
def test_any_truncation_is_refused(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    for length in {0, 1, len(content) // 2, len(content) - 1}:
        (folder / name).write_bytes(content[:length])
        with pytest.raises(errors.BundleError) as refusal:
            bundle.read(folder)
        if name != MANIFEST:
            assert refusal.type is errors.FileSizeWrong


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    expected = errors.BundleMissing if name == MANIFEST else errors.FileMissing
    with pytest.raises(expected):
        bundle.read(folder)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(errors.BundleMissing):
        bundle.read(tmp_path / "nothing")


# --- manifests that lie, with a right checksum ------------------------------------------------


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (set_field("head", False), errors.FileSetWrong),
        (set_field("format_version", 2), errors.ManifestMalformed),
        (lambda f: f["files"].pop("head/head.onnx"), errors.FileSetWrong),
        (lambda f: f["files"]["head/weights.bin"].update(bytes=3), errors.ShapeWrong),
        (lambda f: f["files"]["head/weights.bin"].update(sha256="1" * 64), errors.ChecksumWrong),
    ],
)
def test_a_manifest_that_lies_about_its_head(
    tmp_path: Path,
    change: Callable[[dict], None],  # type: ignore[type-arg]
    expected: type[errors.BundleError],
) -> None:
    folder = with_head(tmp_path)
    rewrite(folder, change)
    with pytest.raises(expected):
        bundle.read(folder, head=True)


def test_a_head_is_not_approximated_and_its_graph_is_checked(tmp_path: Path) -> None:
    folder = with_head(tmp_path)
    outside = graphs.External("weights.bin", 0, graphs.FLOAT, (N_CLASSES, WIDTH))
    preview = graphs.Preview(
        np.eye(2, WIDTH, dtype=np.float32), np.ones((N_CLASSES, 2), np.float32), 3
    )
    replace(folder, "head/head.onnx", graphs.expert_svd_graph(outside, N_CLASSES, preview))
    with pytest.raises(errors.GraphForbidden, match="approximated"):
        bundle.read(folder, head=True)
    replace(folder, "head/head.onnx", b"no graph")
    with pytest.raises(errors.GraphMalformed):
        bundle.read(folder, head=True)
    assert bundle.read(folder).head is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (set_field("format_version", 4), errors.UnknownFormatVersion),
        (set_field("format_version", "1"), errors.UnknownFormatVersion),
        (set_field("head", True), errors.ManifestMalformed),
        (set_field("n_classes", 0), errors.ManifestMalformed),
        (set_field("n_classes", "many"), errors.ManifestMalformed),
        (set_field("surprise", 1), errors.ManifestMalformed),
        (set_field("expert_sizes", [5, 4]), errors.ShapeWrong),
        (set_field("expert_sizes", [5, 4, 13]), errors.ShapeWrong),
        (set_field("expert_sizes", [5, 4, -1]), errors.ShapeWrong),
        (set_field("expert_sizes", [0, 0, 0]), errors.ShapeWrong),
        (set_field("expert_sizes", [4, 5, 4]), errors.ShapeWrong),
        (set_field("n_classes", 11), errors.IndexOutOfRange),
        (set_field("n_classes", 13), errors.ShapeWrong),
        (set_field("hidden_size", 5), errors.ShapeWrong),
        (set_field("labels", False), errors.FileSetWrong),
        (set_field("samples", 3), errors.ShapeWrong),
        (lambda f: f["training"].update(utilization=[1.0]), errors.ShapeWrong),
        (lambda f: f["training"].update(flops_speedup=-1), errors.ManifestMalformed),
        (lambda f: f["files"].pop("gate.onnx"), errors.FileSetWrong),
    ],
)
def test_a_lying_manifest(
    folder: Path,
    change: Callable[[dict], None],  # type: ignore[type-arg]
    expected: type[errors.BundleError],
) -> None:
    rewrite(folder, change)
    with pytest.raises(expected) as refusal:
        bundle.read(folder)
    assert refusal.type is expected


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "experts/../../secret", "..\\secret", "C:\\secret"]
)
def test_a_path_that_leaves_the_folder(folder: Path, name: str) -> None:
    entry = {"sha256": "1" * 64, "bytes": 1}
    rewrite(folder, lambda fields: fields["files"].update({name: entry}))
    with pytest.raises(errors.PathLeavesBundle):
        bundle.read(folder)


def test_an_unexpected_file(folder: Path) -> None:
    entry = {"sha256": "1" * 64, "bytes": 1}
    rewrite(folder, lambda fields: fields["files"].update({"run.sh": entry}))
    with pytest.raises(errors.FileSetWrong, match=r"run\.sh"):
        bundle.read(folder)


def test_a_link_that_leaves_the_folder(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    shutil.copy(folder / "labels.txt", outside)
    (folder / "labels.txt").unlink()
    (folder / "labels.txt").symlink_to(outside)
    with pytest.raises(errors.PathLeavesBundle):
        bundle.read(folder)


def test_a_manifest_without_checksum(folder: Path) -> None:
    fields = json.loads((folder / MANIFEST).read_text())
    del fields["checksum"]
    (folder / MANIFEST).write_text(json.dumps(fields))
    with pytest.raises(errors.ManifestMalformed):
        bundle.read(folder)


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000])
def test_a_manifest_that_is_no_manifest(folder: Path, content: bytes) -> None:
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(errors.ManifestMalformed):
        bundle.read(folder)


# --- arrays that lie --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 9, 10, 12], errors.IndexOutOfRange),
        ([-1, 1, 2, 3, 4, 5, 6, 7, 8, 0, 9, 10, 11], errors.IndexOutOfRange),
        ([0, 1, 2, 3, 3, 5, 6, 7, 8, 0, 9, 10, 11], errors.DuplicateClass),
        ([0, 1, 2, 4, 3, 5, 6, 7, 8, 0, 9, 10, 11], errors.ShapeWrong),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 9, 10], errors.ShapeWrong),
    ],
)
def test_wrong_class_ids(
    folder: Path, classes: list[int], expected: type[errors.BundleError]
) -> None:
    replace(folder, "index/classes.npy", npy(np.array(classes, np.int32)))
    with pytest.raises(expected) as refusal:
        bundle.read(folder)
    assert refusal.type is expected


@pytest.mark.parametrize("offsets", [[0, 5, 9, 12], [1, 5, 9, 13], [0, 9, 5, 13], [0, 5, 13]])
def test_wrong_offsets(folder: Path, offsets: list[int]) -> None:
    replace(folder, "index/offsets.npy", npy(np.array(offsets, np.int64)))
    with pytest.raises(errors.ShapeWrong):
        bundle.read(folder)


def test_arrays_of_another_type_or_with_pickles(folder: Path) -> None:
    replace(folder, "index/classes.npy", npy(np.zeros(13, np.int64)))
    with pytest.raises(errors.ArrayMalformed):
        bundle.read(folder)
    pickled = folder / "pickled.npy"
    np.save(pickled, np.array([print] * 13, dtype=object), allow_pickle=True)
    replace(folder, "index/classes.npy", pickled.read_bytes())
    with pytest.raises(errors.ArrayMalformed):
        bundle.read(folder)


def test_labels(folder: Path) -> None:
    replace(folder, "labels.txt", b"one\ntwo\n")
    with pytest.raises(errors.LabelsWrong):
        bundle.read(folder)
    replace(folder, "labels.txt", b"\xff\n" * N_CLASSES)
    with pytest.raises(errors.LabelsWrong):
        bundle.read(folder)


@pytest.mark.parametrize("labels", [["a"] * 11, ["a\nb"] + ["a"] * 11])
def test_labels_that_cannot_be_written(labels: list[str]) -> None:
    with pytest.raises(errors.LabelsWrong):
        _label_bytes(labels, N_CLASSES)


# --- graphs that lie --------------------------------------------------------------------------


def expert_model() -> onnx.ModelProto:
    return onnx.load_model_from_string(
        graphs.expert_graph(np.ones((SIZES[0], WIDTH), np.float32), N_CLASSES)
    )


def refuse_expert(folder: Path, model: onnx.ModelProto) -> errors.BundleError:
    replace(folder, "experts/000.onnx", model.SerializeToString())
    with pytest.raises(errors.BundleError) as refusal:
        bundle.read(folder)
    return refusal.value


def test_truncated_onnx_with_a_right_checksum(folder: Path) -> None:
    content = (folder / "experts/000.onnx").read_bytes()
    replace(folder, "experts/000.onnx", content[: len(content) // 2])
    with pytest.raises((errors.GraphMalformed, errors.ShapeWrong)):
        bundle.read(folder)
    replace(folder, "experts/000.onnx", b"not a model")
    with pytest.raises(errors.GraphMalformed):
        bundle.read(folder)


def test_weights_of_another_shape(folder: Path) -> None:
    wrong = graphs.expert_graph(np.ones((SIZES[0] + 1, WIDTH), np.float32), N_CLASSES)
    replace(folder, "experts/000.onnx", wrong)
    with pytest.raises(errors.ShapeWrong, match=r"W of shape \(6, 4\)"):
        bundle.read(folder)
    replace(folder, "gate.onnx", graphs.gate_graph(np.ones((3, WIDTH + 1), np.float32)))
    with pytest.raises(errors.ShapeWrong):
        bundle.read(folder)


def test_a_gate_in_place_of_an_expert(folder: Path) -> None:
    replace(folder, "experts/000.onnx", graphs.gate_graph(np.ones((3, WIDTH), np.float32)))
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


def test_every_refusal_is_one_sentence(folder: Path) -> None:
    os.truncate(folder / "gate.onnx", 10)
    with pytest.raises(errors.FileSizeWrong) as refusal:
        bundle.read(folder)
    sentence = str(refusal.value)
    assert sentence.endswith(".") and "\n" not in sentence
