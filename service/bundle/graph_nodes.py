"""The nodes of a bundle's graphs: every graph that is written has them, and no other is read.

B rows, D hidden, K experts, V classes of one expert, g experts asked for, k answers asked for,
c candidates.
"""

from functools import cache
from typing import Literal, NamedTuple

import onnx
from onnx import TensorProto, helper

Nodes = tuple[onnx.NodeProto, ...]
Kind = Literal["plain", "svd", "int8", "shared"]


class ExpertForm(NamedTuple):
    """What the nodes of an expert's graph depend on."""

    kind: Kind
    biased: bool
    absent: bool  # there are classes outside the expert
    by_column: bool = False  # a plain expert's matrix is [D,V], outside the graph, not [V,D]
    halves: bool = False  # it is float16


@cache
def gate_nodes(biased: bool) -> Nodes:
    return (
        _product("hidden", "U", "logits", biased),
        helper.make_node("Softmax", ["logits"], ["all_gates"], axis=1),
        # Ranked by logit: softmax values far behind the best underflow to equal zeros.
        helper.make_node("TopK", ["logits", "g"], ["top_logits", "expert"], axis=1),
        helper.make_node("GatherElements", ["all_gates", "expert"], ["gate"], axis=1),
    )


@cache
def expert_nodes(form: ExpertForm) -> Nodes:
    if form.kind == "shared":
        return tuple(_shared(form))
    if form.kind == "plain":
        scored = _plain(form)
    elif form.kind == "svd":
        scored = [*_svd_preview(form), *_exact_scores_of_candidates(form)]
    else:
        scored = [*_int8_preview(form), *_exact_scores_of_candidates(form)]
    return (*scored, *_normaliser(form))


def _plain(form: ExpertForm) -> list[onnx.NodeProto]:
    nodes, matrix = [], "W"
    if form.halves:
        nodes, matrix = [helper.make_node("Cast", ["W"], ["wide"], to=TensorProto.FLOAT)], "wide"
    return [
        *nodes,
        _product("hidden", matrix, "logits", form.biased, by_column=form.by_column),
        helper.make_node("Mul", ["logits", "gate"], ["scores"]),
        helper.make_node("TopK", ["scores", "k"], ["score", "position"], axis=1),
    ]


def _shared(form: ExpertForm) -> list[onnx.NodeProto]:
    """All of an expert whose rows are gathered from the head's."""
    return [
        helper.make_node("Gather", ["W", "classes"], ["rows"], axis=0),  # [V,D]
        _product("hidden", "rows", "scores", form.biased),
        helper.make_node("TopK", ["scores", "k"], ["score", "position"], axis=1),
        helper.make_node("ReduceLogSumExp", ["scores"], ["present"], axes=[1]),
        helper.make_node("Mul", ["hidden", "rest"], ["rest_products"]),
        helper.make_node("ReduceSum", ["rest_products", "row_axis"], ["rest_sum"]),  # [B,1]
        helper.make_node("Add", ["rest_sum", "rest_bias"], ["absent"]),
        helper.make_node("Concat", ["present", "absent"], ["both"], axis=1),
        helper.make_node("ReduceLogSumExp", ["both"], ["logsumexp"], axes=[1]),
    ]


def _svd_preview(form: ExpertForm) -> list[onnx.NodeProto]:
    """Make `preview_logits` [B,V] and `c` [1]."""
    return [
        _product("hidden", "P", "projected", False),
        _product("projected", "Q", "preview_logits", form.biased),
        helper.make_node("Max", ["k", "candidates"], ["c"]),
    ]


def _int8_preview(form: ExpertForm) -> list[onnx.NodeProto]:
    """Make `preview_logits` [B,V] and `c` [1]."""
    return [
        helper.make_node("Abs", ["hidden"], ["sizes"]),
        helper.make_node("ReduceMax", ["sizes"], ["found_largest"], axes=[1]),  # [B,1]
        helper.make_node("Max", ["found_largest", "smallest"], ["largest"]),
        helper.make_node("Div", ["steps", "largest"], ["steps_per_one"]),
        helper.make_node("Mul", ["hidden", "steps_per_one"], ["in_steps"]),
        helper.make_node("Round", ["in_steps"], ["whole"]),
        helper.make_node("Add", ["whole", "middle"], ["positive"]),
        helper.make_node("Cast", ["positive"], ["activations"], to=TensorProto.UINT8),
        helper.make_node("Transpose", ["W8"], ["columns"], perm=[1, 0]),
        helper.make_node("MatMulInteger", ["activations", "columns", "zero_point"], ["counts"]),
        helper.make_node("Cast", ["counts"], ["sums"], to=TensorProto.FLOAT),  # [B,V]
        helper.make_node("Div", ["largest", "steps"], ["step"]),
        # In this order, because ONNX Runtime fuses sums * (step * scale) + bias wrongly when step
        # is not one number for all rows.
        helper.make_node("Mul", ["sums", "scale"], ["scaled"]),
        helper.make_node("Mul", ["scaled", "step"], ["products8"]),
        helper.make_node("Add", ["products8", "bias"], ["preview_logits"])
        if form.biased
        else helper.make_node("Identity", ["products8"], ["preview_logits"]),
        helper.make_node("Mul", ["k", "per_answer"], ["wanted"]),
        helper.make_node("Max", ["wanted", "at_least"], ["wanted_or_more"]),
        helper.make_node("Min", ["wanted_or_more", "size"], ["c"]),
    ]


def _exact_scores_of_candidates(form: ExpertForm) -> list[onnx.NodeProto]:
    """Given `preview_logits` and `c`, make `score`, `position` and all `scores` [B,V]."""
    nodes = [
        helper.make_node(
            "TopK", ["preview_logits", "c"], ["best_previews", "unordered"], axis=1, sorted=0
        ),
        # In the order of their positions, so that equal scores are answered in that order.
        helper.make_node("TopK", ["unordered", "c"], ["candidate", "where"], axis=1, largest=0),
        helper.make_node("Gather", ["W", "candidate"], ["rows"], axis=0),  # [B,c,D]
        helper.make_node("Unsqueeze", ["hidden", "last_axis"], ["column"]),  # [B,D,1]
        helper.make_node("MatMul", ["rows", "column"], ["products"]),  # [B,c,1]
        helper.make_node("Squeeze", ["products", "last_axis"], ["exact_products"]),
    ]
    logits = "exact_products"
    if form.biased:
        logits = "exact_logits"
        nodes += [
            helper.make_node("Gather", ["bias", "candidate"], ["candidate_bias"], axis=0),
            helper.make_node("Add", ["exact_products", "candidate_bias"], ["exact_logits"]),
        ]
    return [
        *nodes,
        helper.make_node("Mul", [logits, "gate"], ["exact_scores"]),
        helper.make_node("TopK", ["exact_scores", "k"], ["score", "place"], axis=1),
        helper.make_node("GatherElements", ["candidate", "place"], ["position"], axis=1),
        helper.make_node("Mul", ["preview_logits", "gate"], ["preview_scores"]),
        helper.make_node(
            "ScatterElements", ["preview_scores", "candidate", "exact_scores"], ["scores"], axis=1
        ),
    ]


def _normaliser(form: ExpertForm) -> list[onnx.NodeProto]:
    """Given `scores`, make `logsumexp`."""
    # Row-wise reductions only: ONNX Runtime's Log rounds the last rows of a batch differently.
    if not form.absent:
        return [helper.make_node("ReduceLogSumExp", ["scores"], ["logsumexp"], axes=[1])]
    return [
        helper.make_node("ReduceLogSumExp", ["scores"], ["present"], axes=[1]),
        helper.make_node("Mul", ["gate", "zero"], ["column_of_zeros"]),
        helper.make_node("Add", ["column_of_zeros", "log_absent"], ["absent"]),
        helper.make_node("Concat", ["present", "absent"], ["both"], axis=1),
        helper.make_node("ReduceLogSumExp", ["both"], ["logsumexp"], axes=[1]),
    ]


def _product(
    rows: str, matrix: str, output: str, biased: bool, by_column: bool = False
) -> onnx.NodeProto:
    inputs = [rows, matrix, "bias"] if biased else [rows, matrix]
    if by_column:
        return helper.make_node("Gemm", inputs, [output])
    return helper.make_node("Gemm", inputs, [output], transB=1)
