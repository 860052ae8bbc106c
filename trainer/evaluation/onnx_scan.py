"""Scans over all classes as one ONNX Runtime call in one thread, like the service's own graphs.

B query rows, D hidden, N classes, k answers.
"""

from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from trainer.data.arrays import Head

OPSET = 17
IR_VERSION = 8
# Seven bits: without VNNI a processor adds two products of bytes in 16 bits, and 2 x 255 x 127
# does not fit, so that sums would be cut off.
WEIGHT_STEPS = 63


class OnnxScan:
    """Nodes from `hidden` [B,D] to `logits` [B,N], followed by a top-k."""

    def __init__(
        self,
        nodes: list[NodeProto],
        constants: dict[str, NDArray[Any]],
        hidden_size: int,
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            _graph(nodes, constants, hidden_size), options, providers=["CPUExecutionProvider"]
        )

    def topk(self, hidden: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        """Positions of the k largest logits, [B,k]."""
        return self._session.run(["position"], {"hidden": hidden, "k": np.array([k])})[0]


def _graph(nodes: list[NodeProto], constants: dict[str, NDArray[Any]], hidden_size: int) -> bytes:
    graph = helper.make_graph(
        [
            *nodes,
            helper.make_node("TopK", ["logits", "k"], ["score", "position"], axis=1),
        ],
        "scan",
        [
            helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["B", hidden_size]),
            helper.make_tensor_value_info("k", TensorProto.INT64, [1]),
        ],
        [helper.make_tensor_value_info("position", TensorProto.INT64, ["B", "k"])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
    )
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def full(head: Head) -> OnnxScan:
    """The head as it is."""
    constants: dict[str, NDArray[Any]] = {"W": head.weight}  # [N,D]
    if head.bias is not None:
        constants["bias"] = head.bias  # [N]
    return OnnxScan(
        [helper.make_node("Gemm", ["hidden", *constants], ["logits"], transB=1)],
        constants,
        head.weight.shape[1],
    )


def int8(weight: NDArray[np.float32], largest: float) -> OnnxScan:
    """Weights in seven bits with a scale for each class, inputs within +-`largest` as uint8."""
    scale = np.maximum(np.abs(weight).max(axis=1), np.finfo(np.float32).tiny) / WEIGHT_STEPS  # [N]
    quantised = np.rint(weight / scale[:, None]).astype(np.int8)
    step = np.float32(largest / 127)
    return OnnxScan(
        [
            helper.make_node("QuantizeLinear", ["hidden", "step", "zero"], ["small"]),
            helper.make_node("MatMulInteger", ["small", "W", "zero"], ["whole"]),
            helper.make_node("Cast", ["whole"], ["products"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["products", "scale"], ["logits"]),
        ],
        {
            "W": np.ascontiguousarray(quantised.T),
            "step": step,
            "zero": np.uint8(128),
            "scale": (scale * step).astype(np.float32),
        },
        weight.shape[1],
    )
