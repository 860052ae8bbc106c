"""`save_pretrained` and `from_pretrained`: a folder gives back the layer, or its bundle."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.fidelity_layer import a_contract, write_fidelity
from helpers.tiny_bundle import write_tiny
from serving.engine.test_svd_experts import D as WIDE_D
from serving.engine.test_svd_experts import make_run
from torch import nn

from service import bundle
from trainer import DSSoftmax
from trainer.export.export import export
from trainer.export.svd_softmax import Approximation
from trainer.layer.head_softmax import HeadSoftmax, keys_of
from trainer.layer.pretrained import BundleGone, FolderTaken, LayerUnknown, NoLayer

D, K, N = 6, 4, 30


def some_held() -> torch.Tensor:
    held = torch.rand(K, N) < 0.4
    held[-1, -1] = True  # or one class less would not be noticed
    return held


def learned(*, biased: bool) -> DSSoftmax:
    torch.manual_seed(0)
    keys = keys_of(some_held())
    return DSSoftmax(D, N, K, gate_noise=0.5, keys=keys, biased=biased).eval()


def sharing(*, biased: bool) -> HeadSoftmax:
    torch.manual_seed(0)
    head, gate = torch.randn(N, D + biased), torch.randn(K, D + biased)
    keys = keys_of(some_held())
    return HeadSoftmax(head, gate, keys, torch.randn(K, D + 1), biased=biased).eval()


def assert_equal(found: DSSoftmax, layer: DSSoftmax) -> None:
    assert type(found) is type(layer) and not found.training
    facts = ("in_features", "n_classes", "n_experts", "gate_noise", "biased")
    assert all(getattr(found, name) == getattr(layer, name) for name in facts)
    state, expected = found.state_dict(), layer.state_dict()
    assert list(state) == list(expected)
    for name, weight in expected.items():
        assert state[name].dtype == weight.dtype and torch.equal(state[name], weight)
    trained = {name for name, weight in layer.named_parameters() if weight.requires_grad}
    assert {name for name, weight in found.named_parameters() if weight.requires_grad} == trained
    hidden = torch.randn(20, layer.in_features, dtype=layer.gate.dtype)
    assert torch.equal(found.log_prob(hidden), layer.log_prob(hidden))


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("make", [learned, sharing])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_arrays_give_back_an_equal_layer(
    tmp_path: Path, make: type[DSSoftmax], biased: bool, dtype: torch.dtype
) -> None:
    layer = make(biased=biased).to(dtype)
    layer.save_pretrained(str(tmp_path / "deep" / "layer"))
    assert_equal(DSSoftmax.from_pretrained(str(tmp_path / "deep" / "layer")), layer)


@pytest.mark.parametrize("fidelity", [False, True], ids=["own rows", "head's rows"])
def test_an_unchanged_layer_is_saved_as_its_bundle(tmp_path: Path, fidelity: bool) -> None:
    if fidelity:
        made = write_fidelity(tmp_path / "1", contract=a_contract(4))
    else:
        head = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
        made = write_tiny(tmp_path / "1", head=head)
    layer = DSSoftmax.from_bundle(made.path)
    layer.save_pretrained(tmp_path / "saved" / "2")
    assert bundle.read(tmp_path / "saved" / "2").manifest == made.manifest  # as a server reads it
    found = DSSoftmax.from_pretrained(tmp_path / "saved" / "2")
    assert found.compiled is not None
    hidden = torch.randn(10, layer.in_features)
    assert torch.equal(found.topk(hidden, 3).log_probs, layer.topk(hidden, 3).log_probs)
    exact = layer.topk(hidden, 3, exact=True).classes
    assert torch.equal(found.topk(hidden, 3, exact=True).classes, exact)


@pytest.mark.parametrize("fidelity", [False, True], ids=["own rows", "head's rows"])
def test_a_changed_one_as_arrays(tmp_path: Path, fidelity: bool) -> None:
    made = write_fidelity(tmp_path / "1") if fidelity else write_tiny(tmp_path / "1")
    layer = DSSoftmax.from_bundle(made.path)
    with torch.no_grad():
        layer.gate.mul_(2.0)
    layer.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "manifest.json").exists()
    found = DSSoftmax.from_pretrained(tmp_path / "saved")
    assert found.compiled is None
    assert_equal(found, layer)


def test_approximated_experts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", biased=True)
    made = export(run, tmp_path / "1", approximation=Approximation(6, 0.1, 100))
    layer = DSSoftmax.from_bundle(made.path)
    with torch.no_grad():
        layer.gate.mul_(2.0)
    layer.save_pretrained(tmp_path / "saved")
    found = DSSoftmax.from_pretrained(tmp_path / "saved")
    assert_equal(found, layer)
    hidden = torch.randn(50, WIDE_D)
    assert torch.equal(found.topk(hidden, 5).classes, layer.topk(hidden, 5).classes)


# --- what is refused ---------------------------------------------------------------------------


def test_a_folder_with_something_in_it(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FolderTaken, match="save the layer in a new folder"):
        learned(biased=False).save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    learned(biased=False).save_pretrained(tmp_path / "empty")


@pytest.mark.parametrize("damage", ["gone", "other"])
def test_a_bundle_that_is_not_what_it_was(tmp_path: Path, damage: str) -> None:
    made = write_tiny(tmp_path / "1")
    layer = DSSoftmax.from_bundle(made.path)
    if damage == "gone":
        made.path.rename(tmp_path / "2")
    else:
        (made.path / "experts" / "weights.bin").write_bytes(b"\0" * 208)
    with pytest.raises(BundleGone, match=r"save copy\.deepcopy\(layer\)"):
        layer.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_a_kind_that_could_not_be_loaded(tmp_path: Path) -> None:
    class Other(DSSoftmax):
        pass

    with pytest.raises(LayerUnknown, match="A Other cannot be saved"):
        Other(D, N, K).save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_no_layer(tmp_path: Path) -> None:
    with pytest.raises(NoLayer, match="neither"):
        DSSoftmax.from_pretrained(tmp_path)


WRONG = {
    "kind": "Module",
    "n_classes": N - 1,
    "n_experts": 10**9,
    "in_features": 10**9,
    "biased": True,
    "bfloat16": 3,
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("make", [learned, sharing])
def test_a_document_that_says_otherwise(tmp_path: Path, make: type[DSSoftmax], name: str) -> None:
    folder = tmp_path / "saved"
    make(biased=False).save_pretrained(folder)
    config = json.loads((folder / "layer.json").read_text())
    (folder / "layer.json").write_text(json.dumps(config | {name: WRONG[name]}))
    with pytest.raises(NoLayer, match="damaged"):
        DSSoftmax.from_pretrained(folder)


def test_arrays_that_would_run_code(tmp_path: Path) -> None:
    """And any others that are not the layer's."""
    folder = tmp_path / "saved"
    layer = learned(biased=False)
    layer.save_pretrained(folder)
    state = {name: weight.numpy() for name, weight in layer.state_dict().items()}
    keys = state["keys"]
    others = [
        {"gate": np.array([nn.Linear], object)},
        {"keys": keys[::-1].copy()},
        {"keys": keys - keys[0] - 1},
        {"keys": keys[:-1]},
        {"keys": keys.astype(np.float32)},
        {"experts.0": state["experts.0"][:-1]},
        {"more": keys},
    ]
    for other in others:
        np.savez(folder / "layer.npz", **(state | other))
        with pytest.raises(NoLayer, match="damaged"):
            DSSoftmax.from_pretrained(folder)
    for content in (b"", b"PK", pickle.dumps(state)):
        (folder / "layer.npz").write_bytes(content)
        with pytest.raises(NoLayer, match="damaged"):
            DSSoftmax.from_pretrained(folder)
