"""The full softmax that a bundle replaces: its exact top-k, and a scan to take the time of.

B rows, D hidden, N classes, k answers.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from trainer.vectors import Head, VectorsInvalid, chunks

OPSET = 17
IR_VERSION = 8
LOGITS_AT_ONCE = 2**24  # 64 MB of them
LARGEST_MODEL = 2**31 - 2**20  # what one ONNX message can hold


class LogitsOverflow(VectorsInvalid):
    pass


def rows_at_once(n_classes: int) -> int:
    """How many rows of logits over so many classes are computed together: memory stays bounded."""
    return max(1, min(16384, LOGITS_AT_ONCE // n_classes))


def full_topk(hidden: NDArray[np.float32], head: Head, k: int) -> NDArray[np.int64]:
    """The k classes with the largest logits of each row, [B,k] descending, ties by class id."""
    found = np.empty((len(hidden), k), np.int64)
    for part in chunks(len(hidden), rows_at_once(len(head.weight))):
        with np.errstate(over="ignore", invalid="ignore"):  # refused by _largest
            logits = hidden[part] @ head.weight.T  # [b,N]
            if head.bias is not None:
                logits += head.bias
        found[part] = _largest(logits, k)
    return found


def _largest(logits: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    n_classes = logits.shape[1]
    found = np.argpartition(logits, n_classes - k, axis=1)[:, n_classes - k :]  # [b,k] in no order
    values = np.take_along_axis(logits, found, axis=1)
    if not np.isfinite(values).all():  # NaN counts as largest, so it would be among them
        raise LogitsOverflow(
            "The head's logits for these hidden vectors are too large for float32."
        )
    order = np.lexsort((found, -values), axis=1)
    found = np.take_along_axis(found, order, axis=1)
    # Among classes tied for the last place argpartition takes any; the lowest ids are wanted.
    tied = (logits >= values.min(axis=1, keepdims=True)).sum(axis=1) > k
    found[tied] = np.argsort(-logits[tied], axis=1, kind="stable")[:, :k]
    return found


def full_scan(head: Head, k: int) -> Callable[[NDArray[np.float32]], object] | None:
    """One ONNX Runtime call over all classes in one thread: a product and a top-k, nothing more.

    None if the head is too large for one ONNX model.
    """
    if head.weight.nbytes > LARGEST_MODEL:
        return None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(
        _full_graph(head), options, providers=["CPUExecutionProvider"]
    )
    wanted = np.array([k])
    return lambda hidden: session.run(None, {"hidden": hidden, "k": wanted})


def _full_graph(head: Head) -> bytes:
    """hidden[B,D], k[1] -> score[B,k], position[B,k]."""
    constants: dict[str, NDArray[Any]] = {"W": head.weight}
    if head.bias is not None:
        constants["bias"] = head.bias
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["hidden", *constants], ["logits"], transB=1),
            helper.make_node("TopK", ["logits", "k"], ["score", "position"], axis=1),
        ],
        "full",
        [
            helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["B", head.weight.shape[1]]),
            helper.make_tensor_value_info("k", TensorProto.INT64, [1]),
        ],
        [
            helper.make_tensor_value_info("score", TensorProto.FLOAT, ["B", "k"]),
            helper.make_tensor_value_info("position", TensorProto.INT64, ["B", "k"]),
        ],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
    )
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content
