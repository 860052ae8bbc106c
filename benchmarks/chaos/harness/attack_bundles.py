"""Bundles made to attack whoever reads them, each with checksums that are right.

Every function damages a copy of a good bundle; its docstring says how. `ATTACKS` names for each
the refusal it must meet.
"""

import hashlib
import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from service import bundle
from service.bundle import Bundle
from service.bundle.format import (
    CLASSES,
    GATE,
    LABELS,
    MANIFEST,
    OFFSETS,
    SAMPLES,
    WEIGHTS,
    expert_file,
)
from service.bundle.manifest import NO_CHECKSUM

EXPERT = expert_file(0)
BOMB_BYTES = 2**27  # of zeros, once unpacked
SPARSE_BYTES = 2**40  # of a file that takes no room on the disk


@dataclass(frozen=True)
class Attack:
    name: str
    damage: Callable[[Path], None]
    reason: str  # what the refusal must say: part of its sentence


def write(attack: Attack, good: Bundle, path: Path) -> None:
    """The attack as a bundle; its manifest comes last, as a copy's would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.tmp"
    shutil.copytree(good.path, temporary, symlinks=True)
    attack.damage(temporary)
    temporary.rename(path)


def write_good(path: Path) -> Bundle:
    """With every file that a bundle may have."""
    rng = np.random.default_rng(1)
    n_classes, width, sizes = 24, 8, (10, 8, 6)
    return bundle.write(
        path,
        gate=rng.normal(size=(len(sizes), width)).astype(np.float32),
        weight=rng.normal(size=(n_classes, width)).astype(np.float32),
        offsets=np.cumsum([0, *sizes]),
        classes=np.arange(n_classes, dtype=np.int32),
        n_classes=n_classes,
        training=bundle.TrainingFacts(utilization=[0.5, 0.3, 0.2], flops_speedup=2.0),
        labels=[f"class {number}" for number in range(n_classes)],
        samples=rng.normal(size=(4, width)).astype(np.float32),
    )


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and state its checksum anew, as a careful forger would."""
    fields = json.loads((folder / MANIFEST).read_text())
    change(fields)
    fields["checksum"] = NO_CHECKSUM
    content = json.dumps(fields, indent=2)
    checksum = hashlib.sha256(content.encode()).hexdigest()
    (folder / MANIFEST).write_text(content.replace(NO_CHECKSUM, checksum))


def replace(folder: Path, name: str, content: bytes) -> None:
    """Change a file and its entry in the manifest."""
    (folder / name).write_bytes(content)
    entry = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    rewrite(folder, lambda fields: fields["files"].update({name: entry}))


def _set(name: str, value: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        rewrite(folder, lambda fields: fields.update({name: value}))

    return damage


# --- graphs ----------------------------------------------------------------------------------


def _graph(name: str, change: Callable[[onnx.ModelProto], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        model = onnx.load_model_from_string((folder / name).read_bytes())
        change(model)
        replace(folder, name, model.SerializeToString())

    return damage


def _weight(model: onnx.ModelProto) -> onnx.TensorProto:
    found: onnx.TensorProto = next(t for t in model.graph.initializer if t.name in ("W", "U"))
    return found


def _external(**facts: str) -> Callable[[onnx.ModelProto], None]:
    """Weights from another place than the manifest's."""

    def change(model: onnx.ModelProto) -> None:
        weight = _weight(model)
        weight.ClearField("raw_data")
        weight.ClearField("float_data")
        weight.data_location = TensorProto.EXTERNAL
        kept = {fact.key: fact.value for fact in weight.external_data} | facts
        del weight.external_data[:]
        for key, value in kept.items():
            weight.external_data.add(key=key, value=value)

    return change


def _huge_dims(model: onnx.ModelProto) -> None:
    """A tensor of 2^80 numbers, of which none is there."""
    weight = _weight(model)
    weight.dims[:] = [2**40, 2**40]
    weight.ClearField("raw_data")


def _huge_extra(model: onnx.ModelProto) -> None:
    """A further tensor that a runtime would make room for."""
    extra = numpy_helper.from_array(np.zeros(1, np.float32), "extra")
    extra.dims[:] = [2**20, 2**20]
    model.graph.initializer.append(extra)


def _control_flow(model: onnx.ModelProto) -> None:
    model.graph.node.add(op_type="Loop", name="forever")


def _foreign_code(model: onnx.ModelProto) -> None:
    model.opset_import.add(domain="com.example", version=1)


def _no_numbers(model: onnx.ModelProto) -> None:
    """Numbers that are none."""
    weight = _weight(model)
    values = numpy_helper.to_array(weight).copy()
    values[...] = np.nan
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))


def _nan_weights(folder: Path) -> None:
    name = f"experts/{WEIGHTS}"
    size = (folder / name).stat().st_size
    replace(folder, name, np.full(size // 4, np.nan, np.float32).tobytes())


# --- arrays ----------------------------------------------------------------------------------


def _zip_bomb(name: str) -> Callable[[Path], None]:
    """A small .npz that unpacks to much more, under the name of a .npy."""

    def damage(folder: Path) -> None:
        buffer = io.BytesIO()
        with (
            zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive,
            archive.open("classes.npy", "w", force_zip64=True) as member,
        ):
            np.lib.format.write_array_header_1_0(
                member, {"descr": "<i4", "fortran_order": False, "shape": (BOMB_BYTES // 4,)}
            )
            for _ in range(BOMB_BYTES // 2**20):
                member.write(bytes(2**20))
        replace(folder, name, buffer.getvalue())

    return damage


def _npy_header(name: str, header: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        text = header.encode() + b"\n"
        magic = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little")
        replace(folder, name, magic + text + bytes(64))

    return damage


def _pickle(folder: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array([os.system], dtype=object), allow_pickle=True)
    replace(folder, CLASSES, buffer.getvalue())


# --- files -----------------------------------------------------------------------------------


def _link(name: str, target: str) -> Callable[[Path], None]:
    """A file of the bundle that is a link to one of the system's."""

    def damage(folder: Path) -> None:
        content = Path(target).read_bytes()
        (folder / name).unlink()
        (folder / name).symlink_to(target)
        entry = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        rewrite(folder, lambda fields: fields["files"].update({name: entry}))

    return damage


def _linked_folder(folder: Path) -> None:
    """The folder of the experts lies elsewhere."""
    elsewhere = folder.parent.parent.parent / f"experts of {folder.parent.name}"
    (folder / "experts").rename(elsewhere)
    (folder / "experts").symlink_to(elsewhere)


def _linked_manifest(folder: Path) -> None:
    elsewhere = folder.parent.parent.parent / f"manifest of {folder.parent.name}"
    (folder / MANIFEST).rename(elsewhere)
    (folder / MANIFEST).symlink_to(elsewhere)


def _loop(folder: Path) -> None:
    (folder / GATE).unlink()
    (folder / GATE).symlink_to(GATE.rpartition("/")[2])


def _pipe(folder: Path) -> None:
    """Whoever opens it waits for ever."""
    (folder / GATE).unlink()
    os.mkfifo(folder / GATE)


def _sparse(name: str) -> Callable[[Path], None]:
    """A terabyte that takes no room on the disk, and would take all memory."""

    def damage(folder: Path) -> None:
        os.truncate(folder / name, SPARSE_BYTES)
        entry = {"sha256": "0" * 63 + "1", "bytes": SPARSE_BYTES}
        rewrite(folder, lambda fields: fields["files"].update({name: entry}))

    return damage


def _sparse_manifest(folder: Path) -> None:
    os.truncate(folder / MANIFEST, SPARSE_BYTES)


def _listed(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        entry = {"sha256": "1" * 64, "bytes": 1}
        rewrite(folder, lambda fields: fields["files"].update({name: entry}))

    return damage


def _deep_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"format_version": ' + "[" * 100_000)


def _infinite_speedup(folder: Path) -> None:
    """JSON as Python writes it, with numbers that are none: they would end up in every answer."""
    rewrite(folder, lambda fields: fields["training"].update(flops_speedup=float("inf")))


def _nan_utilization(folder: Path) -> None:
    def change(fields: dict[str, Any]) -> None:
        fields["training"]["utilization"][0] = float("nan")

    rewrite(folder, change)


HUGE_NPY = "{'descr': '<i4', 'fortran_order': False, 'shape': (2305843009213693952,)}"
OUTSIDE = "../../../../../../etc/passwd"

ATTACKS = (
    Attack("weights in /etc/passwd", _graph(EXPERT, _external(location=OUTSIDE)), "outside itself"),
    Attack("weights by root", _graph(EXPERT, _external(location="/etc/passwd")), "outside itself"),
    Attack("weights elsewhere", _graph(EXPERT, _external(offset="4")), "outside itself"),
    Attack("weights too long", _graph(EXPERT, _external(length=str(2**62))), "outside itself"),
    Attack("gate outside", _graph(GATE, _external(location="../gate.bin")), "outside itself"),
    Attack("huge expert", _graph(EXPERT, _huge_dims), "experts/000.onnx"),
    Attack("huge gate", _graph(GATE, _huge_dims), "gate.onnx"),
    Attack("huge extra tensor", _graph(EXPERT, _huge_extra), "experts/000.onnx"),
    Attack("control flow", _graph(EXPERT, _control_flow), "('Loop')"),
    Attack("foreign operators", _graph(GATE, _foreign_code), "com.example"),
    Attack("gate of NaN", _graph(GATE, _no_numbers), "NaN"),
    Attack("weights of NaN", _nan_weights, "NaN"),
    Attack("huge number of classes", _set("n_classes", 2**31 - 1), "000.onnx"),
    Attack("huge width", _set("hidden_size", 2**62), "weights.bin"),
    Attack("huge number of experts", _set("n_experts", 2**62), "expert sizes"),
    Attack("huge number of samples", _set("samples", 2**62), "samples.npy"),
    Attack("zip bomb of classes", _zip_bomb(CLASSES), "index/classes.npy"),
    Attack("zip bomb of samples", _zip_bomb(SAMPLES), "samples.npy"),
    Attack("huge .npy header", _npy_header(CLASSES, HUGE_NPY), "index/classes.npy"),
    Attack("deep .npy header", _npy_header(OFFSETS, "-" * 9000 + "1"), "index/offsets.npy"),
    Attack("pickle", _pickle, "index/classes.npy"),
    Attack("link out", _link(LABELS, "/etc/passwd"), "leaves the bundle"),
    Attack("linked folder", _linked_folder, "leaves the bundle"),
    Attack("linked manifest", _linked_manifest, "leaves the bundle"),
    Attack("link to itself", _loop, "gate.onnx"),
    Attack("pipe", _pipe, "gate.onnx"),
    Attack("a terabyte of labels", _sparse(LABELS), "labels.txt"),
    Attack("a terabyte of weights", _sparse(f"experts/{WEIGHTS}"), "weights.bin"),
    Attack("a terabyte of manifest", _sparse_manifest, "manifest.json"),
    Attack("path upwards", _listed("../../m/1/gate.onnx"), "leaves the bundle"),
    Attack("path from the root", _listed("/etc/passwd"), "leaves the bundle"),
    Attack("path with backslashes", _listed("..\\..\\secret"), "leaves the bundle"),
    Attack("name that looks alike", _listed("g\u0430te.onnx"), "unexpected file"),
    Attack("invisible character", _listed("gate.onnx\u200b"), "unexpected file"),
    Attack("reversed name", _listed("gate\u202exnno."), "unexpected file"),
    Attack("deep manifest", _deep_manifest, "manifest.json"),
    Attack("infinite speedup", _infinite_speedup, "manifest.json"),
    Attack("utilization of NaN", _nan_utilization, "manifest.json"),
)

# Folders of a model or a version that must not be taken for one.
ODD_MODELS = (
    "\uff4d",
    "m\u200b",
    "m\u202e",
    "\u043c",
    "m\n",
    ".m",
    "m e",
    "m%2e",
    "M" * 65,
    "..m",
    "-m",
)
ODD_VERSIONS = ("\uff12", "\u0662", "02", "+2", "2.0", "2 ", "2\n", "0", "-2", "1e1", "9999999999")
