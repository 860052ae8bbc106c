"""What a group of workers has in memory once: weights, and what the fork server has imported."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from helpers.tiny_bundle import write_tiny
from helpers.worker_group import Group, children, group

from service import bundle

WIDTH, N_EXPERTS, PER_EXPERT = 128, 8, 15_000
WEIGHT_BYTES = 4 * WIDTH * N_EXPERTS * PER_EXPERT  # 61 MB


def write_large(path: Path) -> None:
    rng = np.random.default_rng(0)
    size = N_EXPERTS * PER_EXPERT
    utilization = [1 / N_EXPERTS] * N_EXPERTS
    bundle.write(
        path,
        gate=rng.normal(size=(N_EXPERTS, WIDTH)).astype(np.float32),
        weight=rng.normal(size=(size, WIDTH)).astype(np.float32),
        offsets=np.arange(0, size + 1, PER_EXPERT),
        classes=np.arange(size, dtype=np.int32),
        n_classes=size,
        training=bundle.TrainingFacts(utilization=utilization, flops_speedup=1.0, accuracy=0.5),
    )


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """`tiny` and a large model in three workers."""
    models = tmp_path_factory.mktemp("models")
    write_tiny(models / "tiny" / "1")
    write_large(models / "large" / "1")
    with group(models, tmp_path_factory.mktemp("three"), workers=3) as started:
        yield started


@dataclass
class Mapping:
    """A part of a process's memory that some file is behind, in kilobytes."""

    size: int = 0
    rss: int = 0
    pss: int = 0


def file_mappings(process: int) -> Iterator[Mapping]:
    mapping, behind = Mapping(), False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            if behind:
                yield mapping
            mapping, behind = Mapping(), line.split()[4] != "0"  # an inode
        elif name in ("Size", "Rss", "Pss"):
            setattr(mapping, name.lower(), int(value.split()[0]))


def private_bytes(process: int) -> int:
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


def test_weights_are_in_memory_once(three: Group) -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(256, WIDTH)).astype(np.float32)
    for _ in range(3):
        answer = httpx.post(
            f"{three.server.url}/models/large/topk?k=1",
            content=npy(rows),
            headers={"content-type": "application/x-npy"},
            timeout=60,
        )
        assert answer.status_code == 200
        assert set(answer.json()["experts"]) == set(range(N_EXPERTS)), "not all was read"
    weights = WEIGHT_BYTES // 1024
    processes = three.table.workers.values()
    mapped = [
        mapping
        for process in processes
        for mapping in file_mappings(process)
        if mapping.size >= weights
    ]
    assert len(mapped) >= 3
    assert sum(mapping.rss for mapping in mapped) > 2.7 * weights, "all have read all of it"
    assert sum(mapping.pss for mapping in mapped) < 1.1 * weights, "and it is there once"
    assert max(private_bytes(process) for process in processes) < WEIGHT_BYTES


def npy(rows: np.ndarray) -> bytes:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {rows.shape}}}"
    header = header.ljust(117) + "\n"
    return (
        b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + rows.tobytes()
    )


def test_workers_share_what_the_fork_server_has_imported(three: Group) -> None:
    fork_server = three.table.fork_server
    assert fork_server is not None
    assert len(list(Path(f"/proc/{fork_server}/task").iterdir())) == 1, "only one thread may fork"
    supervisor = three.server.process.pid
    assert {fork_server, *three.table.workers.values()} <= set(children(supervisor))
    name = "x-request-id"
    names = {httpx.get(three.server.url + "/livez").headers.get(name, "-") for _ in range(3)}
    assert len({given.rpartition("-")[0] for given in names}) == 3, "requests of two have one name"
