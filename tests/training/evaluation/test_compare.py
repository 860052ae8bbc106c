"""`dss compare`: every method measured alike, chosen on validation rows, reported on test rows."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.dss_process import dss

from service import bundle
from service.errors import BundleMissing
from trainer.baselines import compare as comparing
from trainer.baselines import measurement as measuring
from trainer.baselines.compare import HeadUnsuitable, MethodUnknown, choose, compare
from trainer.baselines.measurement import Record, Split, digest, measured, spread
from trainer.baselines.method import Inputs, Options
from trainer.baselines.scan import Full
from trainer.data.arrays import ClassesDisagree, Head, Vectors, open_head, open_vectors

N, D, K = 80, 16, 4
QUICK = ["full", "svd", "faiss-ivf"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    rng = np.random.default_rng(0)
    head = rng.normal(size=(N, D)).astype(np.float32)
    for name, rows in (("train", 1500), ("valid", 300), ("test", 200)):
        labels = rng.integers(N, size=rows)
        hidden = 0.5 * head[labels] + 0.6 * rng.normal(size=(rows, D))
        np.save(folder / f"{name}.npy", hidden.astype(np.float16 if name == "test" else np.float32))
        np.save(folder / f"{name}.labels.npy", labels.astype(np.int32))
    np.save(folder / "head.npy", head)
    np.save(folder / "wide.npy", np.zeros((N, D + 1), np.float32))
    held = np.arange(N).reshape(K, -1)
    bundle.write(
        folder / "bundle",
        gate=rng.normal(size=(K, D)).astype(np.float32),
        weight=head[held.ravel()],
        offsets=np.arange(K + 1) * N // K,
        classes=held.ravel().astype(np.int32),
        n_classes=N,
        training=bundle.TrainingFacts(utilization=[1 / K] * K, flops_speedup=2.0),
    )
    return folder


def vectors(files: Path, name: str) -> Vectors:
    return open_vectors(
        files / f"{name}.npy", files / f"{name}.labels.npy", n_classes=N, hidden_size=D
    )


def run(
    files: Path,
    work: Path,
    methods: Sequence[str],
    *,
    bundles: dict[str, Path] | None = None,
    test: bool = False,
    latency: bool = False,
    rows: int = 100,
) -> dict[str, Any]:
    return compare(
        vectors(files, "train"),
        open_head(files / "head.npy"),
        vectors(files, "valid"),
        vectors(files, "test") if test else None,
        work,
        bundles=bundles,
        methods=methods,
        options=Options(rows=rows, latency=latency),
    )


def command(files: Path, *more: object) -> subprocess.CompletedProcess[str]:
    arguments = ["--hidden", files / "train.npy", "--labels", files / "train.labels.npy"]
    arguments += ["--head", files / "head.npy", "--valid-hidden", files / "valid.npy"]
    arguments += ["--valid-labels", files / "valid.labels.npy", *more]
    return dss("compare", *arguments)


def test_the_command(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = command(
        files,
        *("--test-hidden", files / "test.npy", "--test-labels", files / "test.labels.npy"),
        *("--bundle", f"mine={files / 'bundle'}", "--methods", "full,svd"),
        *("--rows", 100, "--out", out),
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert list(figures) == [
        *("n_classes", "hidden_size", "machine", "rows", "dials", "full", "points"),
    ]
    assert (figures["n_classes"], figures["hidden_size"], figures["dials"]) == (N, D, "valid")
    assert figures["rows"] == {"valid": 100, "test": 200}
    assert {len(figures["full"][split]) for split in ("valid", "test")} == {3}
    points = figures["points"]
    assert all(point["latency_us"] > 0 for point in points)
    assert len(done.stdout.splitlines()) == len(points) + 1
    mine = [point for point in points if point["method"] == "ds"]
    assert {point["name"] for point in mine} == {"mine"}
    assert [(p["split"], p["dial"]["experts_searched"]) for p in mine][:3] == [
        *(("valid", 1), ("valid", 2), ("valid", 4)),
    ]
    assert ("test", 1) in [(p["split"], p["dial"]["experts_searched"]) for p in mine]
    (full,) = (p for p in points if p["method"] == "full" and p["split"] == "test")
    assert full["accuracy"] == figures["full"]["test"]
    assert full["flops_speedup"] == 1 and full["chosen"]
    tested = {p["name"]: p for p in points if p["method"] == "svd" and p["split"] == "test"}
    assert {point["paper"] for point in tested.values()} >= {"SVD-10", "SVD-50"}
    assert sum(point["chosen"] for point in tested.values()) == 1


def test_figures_are_printed_too_if_asked_for(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = command(files, "--methods", "full", "--rows", 50, "--no-latency", "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(out.read_text())
    assert "valid full" in done.stderr  # what is told on the way goes elsewhere


def test_figures_by_hand(files: Path) -> None:
    """Accuracy and precision are those of the answers, on evenly spread rows."""
    valid, head = vectors(files, "valid"), open_head(files / "head.npy")
    split = Split(valid, spread(len(valid.labels), 100), head)
    assert len(split.rows) == 100 and split.rows[0] == 0 and split.rows[-1] == 299
    answers = np.argsort(-(valid.hidden[split.rows] @ head.weight.T), axis=1)
    labels = valid.labels[split.rows][:, None]
    inputs = Inputs(valid, head, files, "", Options())
    figures = measured(Full(inputs).build(Full(inputs).dials()[0]), split)
    assert figures["accuracy"] == split.full_accuracy
    for k in (1, 5, 10):
        assert figures["accuracy"][str(k)] == (answers[:, :k] == labels).any(1).mean()
        assert figures["precision"][str(k)] == 1


def test_few_rows_at_once_give_the_same_figures(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundles = {"mine": files / "bundle"}
    together = run(files, tmp_path / "a", ["svd"], bundles=bundles)
    monkeypatch.setattr(measuring, "rows_at_once", lambda _: 7)
    apart = run(files, tmp_path / "b", ["svd"], bundles=bundles)
    for one, other in zip(together["points"], apart["points"], strict=True):
        assert one["accuracy"] == other["accuracy"]
        assert one["flops_speedup"] == pytest.approx(other["flops_speedup"])


FULL = {"1": 0.3, "5": 0.5, "10": 0.6}


def setting(loss: tuple[float, float, float], speedup: float) -> dict[str, Any]:
    accuracy = {k: FULL[k] - lost for k, lost in zip(FULL, loss, strict=True)}
    return {"accuracy": accuracy, "flops_speedup": speedup}


def test_the_quickest_setting_without_loss_is_chosen() -> None:
    within = setting((0.0004, 0.0004, -0.1), 8)
    slower = setting((0, 0, 0), 4)
    lossy_at_ten = setting((-0.1, -0.1, 0.0006), 20)
    assert choose([slower, within, lossy_at_ten], FULL) == 1
    assert choose([slower, lossy_at_ten], FULL) == 0


def test_the_most_accurate_setting_is_chosen_if_all_lose() -> None:
    assert choose([setting((0.1, 0.1, 0.1), 9), setting((0.01, 0.1, 0.1), 2)], FULL) == 1


def test_of_equally_quick_settings_the_most_accurate_is_chosen() -> None:
    assert choose([setting((0, 0, 0), 1), setting((-0.1, 0, 0), 1)], FULL) == 1


def test_a_stopped_comparison_goes_on(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished points are measured once, whatever comes after; the test split as well."""
    seen: list[int] = []
    allowed = 7

    def counting(*arguments: Any) -> dict[str, Any]:
        if len(seen) == allowed:
            raise KeyboardInterrupt
        seen.append(len(arguments[1].rows))
        return measured(*arguments)

    monkeypatch.setattr(comparing, "measured", counting)
    with pytest.raises(KeyboardInterrupt):
        run(files, tmp_path, QUICK, test=True)
    assert len(seen) == allowed
    allowed = 10_000
    figures = run(files, tmp_path, QUICK, test=True)
    assert len(seen) == len(figures["points"])
    assert run(files, tmp_path, QUICK, test=True) == figures
    assert len(seen) == len(figures["points"])
    run(files, tmp_path, QUICK, rows=50)  # other rows are another measurement
    assert len(seen) > len(figures["points"])


def test_latencies_are_taken_once_for_the_same_points(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(files, tmp_path, ["full"], latency=True)
    assert first["points"][0]["latency_us"] > 0
    monkeypatch.setattr(comparing, "latencies", lambda searches, _: [1.5] * len(searches))
    assert run(files, tmp_path, ["full"], latency=True) == first
    more = run(files, tmp_path, ["full", "full-int8"], latency=True)
    assert {point["latency_us"] for point in more["points"]} == {1.5}
    assert run(files, tmp_path, ["full"])["points"][0]["latency_us"] is None


def test_a_method_without_its_package_is_skipped(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    points = run(files, tmp_path, ["full", "fgd"])["points"]
    assert points[0]["method"] == "full"
    assert points[1:] == [
        {"method": "fgd", "skipped": "Install doubly-sparse-softmax[baselines] for this."}
    ]


@pytest.mark.parametrize(
    ("more", "code", "sentence"),
    [
        (["--labels", "nowhere.npy"], 1, "nowhere.npy does not exist."),
        (["--head", "{files}/wide.npy"], 1, f"not of {D + 1}"),
        (["--bundle", "mine"], 2, "is not NAME=PATH"),
        (["--bundle", "a=b", "--bundle", "a=c"], 2, "given twice"),
        (["--test-hidden", "{files}/test.npy"], 2, "go together"),
        (["--rows", "0"], 2, "0"),
        (["--out", "{files}"], 1, "cannot be written"),
    ],
)
def test_bad_input_is_a_sentence_and_writes_nothing(
    files: Path, tmp_path: Path, more: list[str], code: int, sentence: str
) -> None:
    changes = [text.format(files=files) for text in more]
    done = command(files, "--out", tmp_path / "out.json", *changes)
    assert done.returncode == code
    assert sentence in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_unsuitable_inputs(files: Path, tmp_path: Path) -> None:
    training, valid = vectors(files, "train"), vectors(files, "valid")
    head = open_head(files / "head.npy")
    biased = Head(head.weight, np.zeros(N, np.float32))
    work = tmp_path / "work"
    with pytest.raises(HeadUnsuitable):
        compare(training, biased, valid, None, work)
    with pytest.raises(HeadUnsuitable):
        compare(training, Head(head.weight[:10], None), valid, None, work)
    with pytest.raises(MethodUnknown):
        compare(training, head, valid, None, work, methods=["magic"])
    shorter = Head(head.weight[:-1], None)
    with pytest.raises(ClassesDisagree):
        compare(training, shorter, valid, None, work, bundles={"mine": files / "bundle"})
    with pytest.raises(BundleMissing):
        compare(training, head, valid, None, work, bundles={"mine": files / "nowhere"})
    assert not work.exists()


def test_the_record_outlives_its_process(tmp_path: Path) -> None:
    Record(tmp_path / "points.json").put("a", {"x": 1})
    again = Record(tmp_path / "points.json")
    assert again.get("a") == {"x": 1} and again.get("b") is None


def test_digests_tell_arrays_apart() -> None:
    array = np.arange(12, dtype=np.float32)
    assert digest(array) == digest(array.copy())
    others = [array + 1, array.reshape(3, 4), array.astype(np.int32)]
    assert len({digest(array), *(digest(other) for other in others)}) == 4
    assert digest(array, array) != digest(array)
