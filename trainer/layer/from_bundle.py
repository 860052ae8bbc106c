"""Makes a layer from a bundle.

Weight rows are those that the bundle stores, as float32, so answers differ from the service's by
rounding alone: sums are added in another order, and a rounded gate value scales all scores of a
row. That stays within `parity.TOLERANCE`, by which an export is checked. An int8 bundle is the
exception. The layer has its weight rows in full, while the service scores all but the best classes
in whole numbers: its export was checked by `parity.INT8_TOLERANCE` and `INT8_AGREEMENT`.

b query rows, D hidden, V weight rows of one expert, w directions, c candidates.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from service import bundle
from service.bundle import Bundle, graphs
from service.bundle.manifest import read_manifest
from service.engine import Engine
from service.errors import DSSError
from trainer.layer import DSSoftmax
from trainer.layer.head_softmax import HeadSoftmax

Constants = Mapping[str, NDArray[Any]]  # of a graph, by name


class ApproximationFixed(DSSError):
    """An approximated expert's weight rows cannot change without its preview."""


def layer_from_bundle(path: Path) -> DSSoftmax:
    """The layer that a bundle was exported from, with approximated experts as they are served.

    As long as its weights are as they were loaded, `topk` is answered by the compiled engine.
    """
    manifest = read_manifest(path)
    # The engine needs a head's rows for exact answers; heads of older formats have none.
    made = bundle.read(path, head=manifest.rows_folder is not None, manifest=manifest)
    with torch.inference_mode(False):  # whose tensors do not count their changes
        layer = _head_softmax(made) if made.shared is not None else _learned_layer(made)
        layer.answer_by(Engine(made), path)
    return layer.eval()


def _head_softmax(made: Bundle) -> HeadSoftmax:
    """Of a bundle whose experts have the head's own rows."""
    rows, rest = made.shared, made.rest
    assert rows is not None and rest is not None  # noqa: S101
    gate = graphs.constants(made.gate_model)
    biased = rows.bias is not None or "bias" in gate
    head = torch.tensor(rows.weights)
    if biased:
        bias = np.zeros(len(rows.weights), np.float32) if rows.bias is None else rows.bias
        head = torch.cat([head, torch.tensor(bias)[:, None]], dim=1)
    matrix = _matrix(gate["U"], gate, biased)
    return HeadSoftmax(head, matrix, _keys(made), torch.tensor(rest), biased=biased)


def _learned_layer(made: Bundle) -> DSSoftmax:
    manifest = made.manifest
    gate = graphs.constants(made.gate_model)
    experts = [{} if model is None else graphs.constants(model) for model in made.expert_models]
    biased = any("bias" in constants for constants in (gate, *experts))
    sizes = (manifest.hidden_size, manifest.n_classes, manifest.n_experts)
    previewed = {number: experts[number] for number, size in enumerate(made.previews) if size}
    if previewed:
        layer: DSSoftmax = ApproximatedSoftmax(*sizes, _keys(made), biased, previewed)
    else:
        layer = DSSoftmax(*sizes, keys=_keys(made), biased=biased)
    layer.gate.data = _matrix(gate["U"], gate, biased)
    for number, expert in enumerate(layer.experts):
        expert.data = _matrix(made.expert_weight(number), experts[number], biased)
    return layer


def _keys(made: Bundle) -> Tensor:
    expert = np.repeat(np.arange(made.manifest.n_experts), made.manifest.expert_sizes)
    return torch.from_numpy(expert * made.manifest.n_classes + made.classes.astype(np.int64))


def _matrix(weight: NDArray[np.float32], constants: Constants, biased: bool) -> Tensor:
    """Rows [V,D], or [V,D+1] where any graph of the bundle has a bias: this one may have none."""
    matrix = torch.tensor(weight)
    if not biased:
        return matrix
    bias = constants.get("bias", np.zeros(len(weight), np.float32))
    return torch.cat([matrix, torch.tensor(bias)[:, None]], dim=1)


class ApproximatedSoftmax(DSSoftmax):
    """With SVD-softmax inside some experts: their c best classes by a preview are scored exactly.

    The others keep their cheap scores in `log_prob`, so that probabilities sum to 1, and are never
    answered by `topk`.
    """

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        n_experts: int,
        keys: Tensor,
        biased: bool,
        previewed: Mapping[int, Constants],
    ) -> None:
        super().__init__(in_features, n_classes, n_experts, keys=keys, biased=biased)
        self.candidates = {e: int(found["candidates"][0]) for e, found in previewed.items()}
        self.directions = nn.ParameterDict(
            {str(e): _fixed(found["P"]) for e, found in previewed.items()}  # [w,D]
        )
        self.previews = nn.ParameterDict(
            {str(e): _fixed(found["Q"]) for e, found in previewed.items()}  # [V,w]
        )

    def _scores(
        self, number: int, hidden: Tensor, gate: Tensor, k: int | None
    ) -> tuple[Tensor, Tensor]:
        if number not in self.candidates:
            return super()._scores(number, hidden, gate, k)
        weight = self.experts[number]
        exact = self._logits(hidden, weight)  # [b,V]
        cheap = hidden @ self.directions[str(number)].T @ self.previews[str(number)].T
        if self.biased:
            cheap = cheap + weight[:, -1]
        count = min(max(k or 1, self.candidates[number]), len(weight))  # c
        best = cheap.topk(count, dim=1).indices  # [b,c]
        scored = torch.zeros_like(cheap, dtype=torch.bool).scatter(1, best, True)
        scores = gate[:, None] * torch.where(scored, exact, cheap)
        logsumexp = self._logsumexp(scores)
        return scores if k is None else scores.masked_fill(~scored, -torch.inf), logsumexp

    def keep_rows(self, kept: Tensor) -> None:
        del kept
        raise ApproximationFixed(
            "An approximated layer cannot be pruned; load a bundle that was exported without"
            " --svd-window."
        )


def _fixed(array: NDArray[np.float32]) -> nn.Parameter:
    """A parameter that is moved and saved with the layer, and is not trained."""
    return nn.Parameter(torch.tensor(array), requires_grad=False)
