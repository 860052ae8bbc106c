"""A layer from a bundle answers by the engine, and never by one that is not as it is."""

import copy
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.fidelity_layer import a_contract, write_fidelity
from helpers.tiny_bundle import N_CLASSES, WIDTH, rows_for, write_tiny
from torch import Tensor, nn

from service import bundle
from service.engine import Engine
from service.errors import ModesConflict, NoContract, NoHead, RecallOutOfRange
from service.topk import Mode
from trainer import DSSoftmax
from trainer.layer.compiled_answers import NoEngine
from trainer.layer.head_softmax import HeadSoftmax

K, D, N = 4, 20, 60


@pytest.fixture(params=[False, True], ids=["own rows", "head's rows"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "1"
    if request.param:
        write_fidelity(path, n_experts=K, width=D, n_classes=N, contract=a_contract(K))
    else:
        write_tiny(path)
    return path


def rows_of(layer: DSSoftmax, count: int = 30) -> Tensor:
    return torch.randn(count, layer.in_features, generator=torch.Generator().manual_seed(1))


class Scanned(Exception):
    pass


def no_scan(*_: object) -> None:
    raise Scanned


def test_no_expert_is_scanned_in_pytorch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of hidden vectors as a model returns them: with gradients, in half precision."""
    layer, engine = DSSoftmax.from_bundle(folder), Engine(bundle.read(folder))
    hidden = rows_of(layer)
    monkeypatch.setattr(type(layer), "searched", no_scan)
    for asked in (
        hidden,
        hidden.clone().requires_grad_(),
        hidden.double(),
        hidden.T.contiguous().T,
    ):
        found, answer = layer.topk(asked, 3, 2), engine.topk(hidden.numpy(), 3, 2)
        assert np.array_equal(found.classes.numpy(), answer.classes)
        assert np.array_equal(found.log_probs.numpy(), answer.log_probs)
    assert layer.topk(hidden.bfloat16(), 3).classes.shape == (30, 3)
    assert layer.predict(hidden).tolist() == engine.topk(hidden.numpy(), 1).classes[:, 0].tolist()
    copied = copy.deepcopy(layer)  # which has no engine, or this test would show nothing
    with pytest.raises(Scanned):
        copied.topk(hidden, 3)


def test_in_inference_mode(folder: Path) -> None:
    with torch.inference_mode():
        layer = DSSoftmax.from_bundle(folder)
        layer.topk(rows_of(layer), 2)
        assert layer.compiled is not None
        layer.gate.mul_(-1)
        assert layer.compiled is None


def test_no_rows(folder: Path) -> None:
    layer = DSSoftmax.from_bundle(folder)
    assert layer.topk(rows_of(layer)[:0], 2).classes.shape == (0, 2)


# --- changed weights --------------------------------------------------------------------------


def in_place(layer: DSSoftmax) -> None:
    with torch.no_grad():
        layer.gate.mul_(-1.0)


def replaced(layer: DSSoftmax) -> None:
    layer.gate = nn.Parameter(-layer.gate.detach(), requires_grad=False)


def new_data(layer: DSSoftmax) -> None:
    layer.gate.data = -layer.gate.data


def there_and_back(layer: DSSoftmax) -> None:
    """Rounded; the new memory may be where the old was."""
    layer.half().float()


def loaded(layer: DSSoftmax) -> None:
    state = copy.deepcopy(layer.state_dict())
    state["gate"].mul_(-1.0)
    layer.load_state_dict(state)


def a_buffer_more(layer: DSSoftmax) -> None:
    layer.register_buffer("steps", torch.zeros(1))


@pytest.mark.parametrize(
    "change", [in_place, replaced, new_data, there_and_back, loaded, a_buffer_more]
)
def test_a_changed_layer_answers_by_itself(
    folder: Path, change: Callable[[DSSoftmax], None]
) -> None:
    layer = DSSoftmax.from_bundle(folder)
    change(layer)
    assert layer.compiled is None
    hidden = rows_of(layer)
    found, own = layer.topk(hidden, 3), layer.searched(hidden, 3)
    assert torch.equal(found.log_probs, own.sort(dim=1, descending=True).values[:, :3])
    for mode in ({"exact": True}, {"recall": 0.5}):
        with pytest.raises(NoEngine, match=r"changed, moved or copied since; load it with"):
            layer.topk(hidden, 3, **mode)  # type: ignore[arg-type]


def test_a_model_with_it_is_copied_and_saved(folder: Path) -> None:
    """As a whole, by PyTorch: copies answer as the layer does, without its engine."""
    layer = DSSoftmax.from_bundle(folder)
    model = nn.Sequential(nn.Linear(3, layer.in_features), layer)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    pickled = torch.load(file, weights_only=False)
    state = DSSoftmax.from_bundle(folder)
    other = nn.Sequential(nn.Linear(3, layer.in_features), state)
    other.load_state_dict(model.state_dict())
    inputs = torch.randn(20, 3)
    with torch.no_grad():
        expected = model(inputs)
        for copied in (copy.deepcopy(model), pickled, other):
            torch.testing.assert_close(copied(inputs), expected)
            hidden = model[0](inputs)
            found, answer = copied[1].topk(hidden, 3), layer.topk(hidden, 3)
            torch.testing.assert_close(found.log_probs, answer.log_probs, rtol=0, atol=0.03)
            assert torch.equal(found.classes, answer.classes)
            copied[1].gate.mul_(-1)
            assert not torch.equal(copied[1].topk(hidden, 3).classes, answer.classes)
    assert layer.compiled is not None


# --- exact and promised answers ---------------------------------------------------------------


def test_exact_and_promised_answers(tmp_path: Path) -> None:
    made = write_fidelity(tmp_path / "1", n_experts=K, width=D, n_classes=N, contract=a_contract(K))
    layer, engine = DSSoftmax.from_bundle(made.path), Engine(made)
    assert isinstance(layer, HeadSoftmax)
    hidden = rows_of(layer, 50)
    full = (hidden @ layer.head.T).sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(layer.topk(hidden, 5, exact=True).classes, full[:, :5])
    promised = layer.topk(hidden, 5, recall=0.9).classes
    answer = engine.topk(hidden.numpy(), 5, mode=Mode(recall=0.9))
    assert promised.tolist() == answer.classes.tolist()
    assert not torch.equal(promised, layer.topk(hidden, 5).classes)
    with pytest.raises(RecallOutOfRange):
        layer.topk(hidden, 5, recall=1.5)
    with pytest.raises(ModesConflict):
        layer.topk(hidden, 5, exact=True, recall=0.9)


def test_learned_rows_beside_their_head(tmp_path: Path) -> None:
    head = np.random.default_rng(2).normal(size=(N_CLASSES, WIDTH)).astype(np.float32)
    made = write_tiny(tmp_path / "1", head=head)
    layer, hidden = DSSoftmax.from_bundle(made.path), torch.from_numpy(rows_for(0, 1, 2))
    best = (hidden @ torch.from_numpy(head).T).argmax(dim=1)
    assert torch.equal(layer.topk(hidden, 1, exact=True).classes[:, 0], best)
    assert torch.equal(layer.topk(hidden, 1, recall=1.0).classes[:, 0], best)
    with pytest.raises(NoContract):
        layer.topk(hidden, 1, recall=0.9)


def test_a_bundle_without_its_head(tmp_path: Path) -> None:
    layer = DSSoftmax.from_bundle(write_tiny(tmp_path / "1").path)
    with pytest.raises(NoHead, match="ships no output layer"):
        layer.topk(torch.from_numpy(rows_for(0)), 1, exact=True)
    with pytest.raises(NoEngine, match="was not loaded from a bundle"):
        DSSoftmax(4, 5, 2).topk(torch.zeros(1, 4), 1, exact=True)
