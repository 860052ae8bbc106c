"""Compares every graph of a bundle with the weights that it stands for.

Answers come from the compiled loops, which read the weights; other programs run the graphs. Here
each graph runs once, and what it computes from a copy of the weights is compared with them.
R rows, D hidden, K experts, V classes of one expert, w directions of a preview.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.bundle import Bundle, graphs
from service.bundle.format import GATE, HEAD, HEAD_FILE, expert_file
from service.bundle.head_rows import HeadRows
from service.bundle.quantisation import WEIGHT_STEPS
from service.engine.onnx_sessions import session
from service.errors import GraphDiffers

ANSWERS = 10
GATE_VALUE = np.float32(0.5)
CLOSE = 1e-3  # relative to the largest value
NUMBERS_AT_ONCE = 2**20  # weights that are compared at once

Rows = NDArray[np.float32]  # [R,D]
Arrays = dict[str, NDArray[Any]]


def compare_graphs(bundle: Bundle, rows: Rows) -> None:
    """Raises GraphDiffers for the first graph that is not what the weights say."""
    _compare_gate(bundle, rows)
    for expert, model in enumerate(bundle.expert_models):
        if model is None:
            continue
        if bundle.shared is not None:
            _compare_shared(bundle, bundle.shared, expert, model, rows)
        else:
            _compare_expert(bundle, expert, model, rows, expert_file(expert))
    if bundle.head is not None:
        model = bundle.head.expert_models[0]
        assert model is not None  # noqa: S101  it holds all classes
        file = f"{bundle.manifest.rows_folder or HEAD}/{HEAD_FILE}"
        if bundle.rows is None:
            _compare_expert(bundle.head, 0, model, rows, file)
        else:
            _compare_head(bundle.rows, model, rows, file)


def _compare_gate(bundle: Bundle, rows: Rows) -> None:
    inside = graphs.constants(bundle.gate_model)
    logits = rows @ inside["U"].T + inside.get("bias", np.float32(0))  # [R,K]
    logits -= logits.max(axis=1, keepdims=True)
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    run = session(bundle.gate_model, {}, 1).run
    experts, gates = run(None, {"hidden": rows, "g": np.array([bundle.manifest.n_experts])})
    _check_close(GATE, gates, np.take_along_axis(expected, experts, axis=1))


def _compare_expert(bundle: Bundle, expert: int, model: bytes, rows: Rows, file: str) -> None:
    size = bundle.manifest.expert_sizes[expert]
    arrays = graphs.constants(model) | bundle.external(expert)
    by_row = bundle.weights is None or bundle.by_row(expert)
    if "W8" in arrays:
        _compare_quantised(file, arrays)
    if "Q" in arrays:
        _compare_preview(file, arrays)
    exact = np.empty((len(rows), size), np.float32)  # [R,V]
    for part in _parts(size, rows.shape[1]):
        weight = arrays["W"][part].T if by_row else arrays["W"][:, part]
        exact[:, part] = rows @ weight.astype(np.float32)
    scores: NDArray[np.float32] = GATE_VALUE * (exact + arrays.get("bias", np.float32(0)))
    score, position, logsumexp = _run(model, bundle.external(expert), rows, size)
    _check_close(file, score, np.take_along_axis(scores, position, axis=1))
    if not {"W8", "Q"} & arrays.keys():  # all classes are scored exactly
        _check_close(file, score, -np.sort(-scores, axis=1)[:, : score.shape[1]])
        _check_close(file, logsumexp, _logsumexp(scores, bundle.manifest.n_classes - size))


def _compare_head(head: HeadRows, model: bytes, rows: Rows, file: str) -> None:
    """A full softmax whose matrix is stored by row."""
    scores = GATE_VALUE * _scores(head, rows, slice(None))
    score, position, logsumexp = _run(model, {"W": head.weights}, rows, scores.shape[1])
    _check_close(file, score, np.take_along_axis(scores, position, axis=1))
    _check_close(file, score, -np.sort(-scores, axis=1)[:, : score.shape[1]])
    _check_close(file, logsumexp, _logsumexp(scores, 0))


def _compare_shared(bundle: Bundle, head: HeadRows, expert: int, model: bytes, rows: Rows) -> None:
    """An expert that gathers the head's rows; the gate value makes no difference to it."""
    assert bundle.rest is not None  # noqa: S101  of a fidelity bundle
    file, rest = expert_file(expert), bundle.rest[expert].astype(np.float64)
    scores = _scores(head, rows, bundle.expert_classes(expert))
    score, position, logsumexp = _run(model, {"W": head.weights}, rows, scores.shape[1])
    _check_close(file, score, np.take_along_axis(scores, position, axis=1))
    _check_close(file, score, -np.sort(-scores, axis=1)[:, : score.shape[1]])
    others = (rows @ rest[:-1] + rest[-1])[:, None]
    all_scores = np.concatenate([scores, others], axis=1)
    top = all_scores.max(axis=1, keepdims=True)
    expected = top + np.log(np.exp(all_scores - top).sum(axis=1, keepdims=True))
    _check_close(file, logsumexp, expected)


def _scores(head: HeadRows, rows: Rows, classes: NDArray[np.int32] | slice) -> NDArray[np.float64]:
    """Of rows with some classes of a head, [R,V]."""
    chosen = np.arange(len(head.weights))[classes]
    exact = np.empty((len(rows), len(chosen)))
    for part in _parts(len(chosen), rows.shape[1]):
        exact[:, part] = rows @ head.weights[chosen[part]].T
    return exact if head.bias is None else exact + head.bias[chosen]


def _run(model: bytes, outside: Arrays, rows: Rows, size: int) -> list[NDArray[Any]]:
    feeds = {
        "hidden": rows,
        "gate": np.full((len(rows), 1), GATE_VALUE, np.float32),
        "k": np.array([min(size, ANSWERS)]),
    }
    found: list[NDArray[Any]] = session(model, outside, 1).run(None, feeds)
    return found


def _compare_quantised(file: str, arrays: Arrays) -> None:
    """W8 times its steps is W, but for half a step."""
    for part in _parts(*arrays["W8"].shape):
        whole, steps = arrays["W8"][part], arrays["scale"][part, None]
        away = np.abs(arrays["W"][part] - whole * steps)
        if (away > 0.51 * steps).any() or np.abs(whole.astype(np.int16)).max() > WEIGHT_STEPS:
            raise GraphDiffers(f"{file}: W8 and its scale are not W in whole steps.")


def _compare_preview(file: str, arrays: Arrays) -> None:
    """Q is W along the directions P."""
    for part in _parts(*arrays["W"].shape):
        _check_close(f"Q of {file}", arrays["Q"][part], arrays["W"][part] @ arrays["P"].T)


def _parts(size: int, hidden_size: int) -> Iterator[slice]:
    step = max(1, NUMBERS_AT_ONCE // hidden_size)
    for first in range(0, size, step):
        yield slice(first, min(size, first + step))


def _logsumexp(scores: NDArray[np.floating[Any]], absent: int) -> NDArray[np.float64]:
    """[R,1]; an absent class has the score 0."""
    wide = scores.astype(np.float64)
    largest = wide.max(axis=1, keepdims=True)
    if absent:
        largest = np.maximum(largest, 0)
    total = np.exp(wide - largest).sum(axis=1, keepdims=True) + absent * np.exp(-largest)
    logsumexp: NDArray[np.float64] = largest + np.log(total)
    return logsumexp


def _check_close(what: str, found: NDArray[Any], expected: NDArray[Any]) -> None:
    largest = max(1e-6, float(np.abs(expected).max(initial=0)))
    if not (np.abs(found - expected) <= CLOSE * largest).all():  # a NaN is no match either
        raise GraphDiffers(f"{what} does not compute what the weights say.")
