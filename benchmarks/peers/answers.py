"""What every peer serves: the sparse layer or the full softmax, named by two variables.

All peers call this in their own process, so that they differ only in what is around it.
B rows, D hidden, k answers.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

K = 10
MOST_ROWS = 64  # of a joined call: more gain nothing, and a full softmax's logits leave the cache
WIDTH = int(os.environ.get("HTTP_BENCH_WIDTH", "0"))  # D, which bodies of bare floats do not carry

Found = tuple[NDArray[np.int64], NDArray[np.float32]]  # classes and scores, [B,k] each
Answers = Callable[[NDArray[np.float32]], Found]


def load(model: str | None = None, path: Path | None = None) -> Answers:
    """Rows [B,D] to classes and scores, [B,k] each."""
    model = model or os.environ["HTTP_BENCH_MODEL"]
    path = path or Path(os.environ["HTTP_BENCH_PATH"])
    return {"sparse": sparse, "full": full}[model](path)


def sparse(path: Path) -> Answers:
    """The service's own engine."""
    from service import bundle
    from service.engine import Engine

    engine = Engine(bundle.read(path))

    def answer(hidden: NDArray[np.float32]) -> Found:
        found = engine.topk(hidden, K)
        return found.classes, found.log_probs

    return answer


def full(path: Path) -> Answers:
    """A product with all classes and a top-k in one ONNX Runtime call, in one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def answer(hidden: NDArray[np.float32]) -> Found:
        score, position = session.run(["score", "position"], {"hidden": hidden})
        return position, score

    return answer


def rows(body: bytes) -> NDArray[np.float32]:
    """A body of nothing but float32, [B,D]."""
    return np.frombuffer(body, np.float32).reshape(-1, WIDTH)


def joined(found: Found) -> bytes:
    """Classes, then scores, and nothing else."""
    classes, scores = found
    return classes.tobytes() + scores.tobytes()


def together(answer: Answers, requests: Sequence[NDArray[np.float32]]) -> list[Found]:
    """The answer to each of several requests [b,D], from as few calls as their rows fit."""
    found: list[Found] = []
    for part in parts(requests):
        classes, scores = answer(np.concatenate(part) if len(part) > 1 else part[0])  # [B,k] each
        first = 0
        for hidden in part:
            end = first + len(hidden)
            found.append((classes[first:end], scores[first:end]))
            first = end
    return found


def parts(requests: Iterable[NDArray[np.float32]]) -> Iterator[list[NDArray[np.float32]]]:
    """Neighbours with no more rows together than fit one call; a larger one stays alone."""
    part: list[NDArray[np.float32]] = []
    rows = 0
    for hidden in requests:
        if part and rows + len(hidden) > MOST_ROWS:
            yield part
            part, rows = [], 0
        part.append(hidden)
        rows += len(hidden)
    yield part
