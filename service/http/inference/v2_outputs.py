"""The outputs of protocol v2: which there are, which are asked for, and their tensors.

Without names all are answered; a request with a mode has two more, searched and rungs.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import orjson

from service.errors import NotSupported
from service.http import large_answers
from service.http.fields import InvalidField, UnknownField
from service.http.large_answers import Parts
from service.http.pieces import Pieces
from service.repository.model import Model
from service.topk import Answered

DATATYPES = {"classes": "INT64", "log_probs": "FP32", "experts": "INT64", "gates": "FP32"}
# Of requests with a mode; a rung is a number: 0 sparse, 1 escalated, 2 exact.
MODE_DATATYPES = {"searched": "INT64", "rungs": "UINT8"}
ALL_DATATYPES = DATATYPES | MODE_DATATYPES
BYTES = {"INT64": 8, "FP32": 4, "UINT8": 1}
GAP = b"\0"  # stands in JSON for what is put there later; never there otherwise


class Output(NamedTuple):
    name: str
    binary: bool


class Outputs(NamedTuple):
    """What a request wants to have."""

    always: tuple[Output, ...]
    with_mode: tuple[Output, ...]  # besides, if a mode was asked for
    binary: bool  # whether all of them are

    def of(self, answer: Answered) -> tuple[Output, ...]:
        return self.always if answer.rungs is None else self.always + self.with_mode

    def check_plain(self) -> None:
        """Refuse by name what an answer without a mode does not have."""
        if self.with_mode:
            return  # none was asked for by name
        for output in self.always:
            if output.name in MODE_DATATYPES:
                raise InvalidField(
                    f"The output {output.name!r} is there only if 'exact', 'recall' or 'rescore' is"
                    " asked for."
                )


# --- requests --------------------------------------------------------------------------------


def read(document: dict[str, Any], binary: bool) -> Outputs:
    """The outputs that a request asks for; `binary` is said of all whose own parameters do not."""
    named = _named(document, binary)
    if named:
        return Outputs(named, (), all(output.binary for output in named))
    return Outputs(_every(DATATYPES, binary), _every(MODE_DATATYPES, binary), binary)


def _every(datatypes: Mapping[str, str], binary: bool) -> tuple[Output, ...]:
    return tuple(Output(name, binary) for name in datatypes)


def _named(document: dict[str, Any], binary: bool) -> tuple[Output, ...]:
    """Those asked for by name, if any are."""
    asked = document.get("outputs")
    if asked is None or asked == []:
        return ()
    if not isinstance(asked, list) or not all(isinstance(output, dict) for output in asked):
        raise InvalidField("'outputs' must be a list of tensors.")
    for output in asked:
        if output.get("name") not in tuple(ALL_DATATYPES):
            known = ", ".join(ALL_DATATYPES)
            raise UnknownField(f"There is no such output; the outputs are {known}.")
        parameters = parameters_of(output)
        refuse_shared_memory(parameters)
        if parameters.get("classification"):
            raise NotSupported(
                "There is no classification of an output (class_count): the output 'classes'"
                " has the best classes already, as many as the parameter k says."
            )
    if len({output["name"] for output in asked}) < len(asked):
        raise InvalidField("An output is asked for twice.")
    return tuple(
        Output(output["name"], bool(parameters_of(output).get("binary_data", binary)))
        for output in asked
    )


def refuse_shared_memory(parameters: dict[str, Any]) -> None:
    if "shared_memory_region" in parameters:
        raise NotSupported("There is no shared memory: tensors are sent in the request.")


def parameters_of(document: dict[str, Any]) -> dict[str, Any]:
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidField("'parameters' must be an object.")
    return parameters


# --- answers ---------------------------------------------------------------------------------


def encode(
    model: Model,
    outputs: Outputs,
    asked_id: str | None,
    answer: Answered,
    promise: str | None = None,
) -> tuple[bytes, int]:
    """The answer, and the length of its JSON part."""
    rows, k = answer.classes.shape
    wanted = outputs.of(answer)
    if asked_id is None and promise is None and outputs.binary:
        head = _binary_head(model.name, model.version, wanted, rows, k)
    else:
        lists = {
            output.name: np.ravel(getattr(answer, output.name))
            for output in wanted
            if not output.binary
        }
        head = _head(model.name, model.version, wanted, rows, k, asked_id, lists, promise)
    tensors = [getattr(answer, output.name).tobytes() for output in wanted if output.binary]
    return b"".join((head, *tensors)), len(head)


def encode_large(
    model: Model,
    outputs: Outputs,
    asked_id: str | None,
    answer: Answered,
    promise: str | None = None,
) -> Pieces[tuple[Parts, int]]:
    """The same in pieces: tensors that are JSON a few numbers at a time."""
    rows, k = answer.classes.shape
    wanted = outputs.of(answer)
    lists = dict.fromkeys(ALL_DATATYPES, orjson.Fragment(GAP))
    head = _head(model.name, model.version, wanted, rows, k, asked_id, lists, promise)
    first, *others = head.split(GAP)
    parts = [first]
    in_json = [output.name for output in wanted if not output.binary]
    for name, between in zip(in_json, others, strict=True):
        parts += yield from large_answers.json_list(np.ravel(getattr(answer, name)))
        parts.append(between)
    json_length = sum(map(len, parts))
    for output in wanted:
        if output.binary:
            parts.append(getattr(answer, output.name).tobytes())
            yield
    return parts, json_length


@lru_cache(maxsize=256)
def _binary_head(name: str, version: int, outputs: Sequence[Output], rows: int, k: int) -> bytes:
    """The JSON part of an answer whose tensors all follow it."""
    return _head(name, version, outputs, rows, k, None, {})


def _head(
    name: str,
    version: int,
    outputs: Sequence[Output],
    rows: int,
    k: int,
    asked_id: str | None,
    lists: Mapping[str, Any],  # of the outputs that are JSON
    promise: str | None = None,
) -> bytes:
    tensors = []
    for output in outputs:
        datatype = ALL_DATATYPES[output.name]
        shape = [rows, k] if output.name in ("classes", "log_probs") else [rows]
        tensor: dict[str, Any] = {"name": output.name, "datatype": datatype, "shape": shape}
        if output.binary:
            size = int(np.prod(shape)) * BYTES[datatype]
            tensor["parameters"] = {"binary_data_size": size}
        else:
            tensor["data"] = lists[output.name]
        tensors.append(tensor)
    document: dict[str, Any] = {"model_name": name, "model_version": str(version)}
    if asked_id is not None:
        document["id"] = asked_id
    if promise is not None:
        document["parameters"] = {"promise": promise}
    document["outputs"] = tensors
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
