"""How many CPUs a process may use, read from file trees as the kernel shows them."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from service.bundle import Bundle
from service.engine import Engine
from service.settings import Settings, load
from service.system import cpu_quota

OLD = "sys/fs/cgroup/cpu,cpuacct"


def old_files(folder: str, quota: str, period: str = "100000") -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": period}


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[Mapping[str, str]], Path]:
    def made(files: Mapping[str, str]) -> Path:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text + "\n")
        return tmp_path

    return made


CASES: dict[str, tuple[dict[str, str], float]] = {
    "no control groups": ({}, 8.0),
    "no limit": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, 8.0),
    "a container's own group at the root": (
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "250000 100000"},
        2.5,
    ),
    "the group's own limit": (
        {"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "50000 100000"},
        0.5,
    ),
    "a limit on a group above": (
        {
            "proc/self/cgroup": "0::/a/b",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000",
            "sys/fs/cgroup/a/cpu.max": "300000 100000",
        },
        3.0,
    ),
    "the least of several": (
        {
            "proc/self/cgroup": "0::/a/b",
            "sys/fs/cgroup/a/b/cpu.max": "400000 100000",
            "sys/fs/cgroup/a/cpu.max": "300000 200000",
            "sys/fs/cgroup/cpu.max": "700000 100000",
        },
        1.5,
    ),
    "a group of somebody else": (
        {"proc/self/cgroup": "0::/a", "sys/fs/cgroup/b/cpu.max": "100000 100000"},
        8.0,
    ),
    "a path of the host, seen in a container": (
        {"proc/self/cgroup": "0::/kubepods/pod1/c1", "sys/fs/cgroup/cpu.max": "200000 100000"},
        2.0,
    ),
    "a path outside of what is shown": (
        {"proc/self/cgroup": "0::/../other", "sys/fs/cgroup/cpu.max": "100000 100000"},
        1.0,
    ),
    "version 1": (
        {"proc/self/cgroup": "4:cpu,cpuacct:/docker/1f", **old_files(f"{OLD}/docker/1f", "150000")},
        1.5,
    ),
    "version 1, cpu alone, at the root": (
        {"proc/self/cgroup": "4:cpu:/docker/1f", **old_files("sys/fs/cgroup/cpu", "400000")},
        4.0,
    ),
    "version 1 without a limit": (
        {"proc/self/cgroup": "4:cpu,cpuacct:/", **old_files(OLD, "-1")},
        8.0,
    ),
    "both versions": (
        {
            "proc/self/cgroup": "5:memory:/m\n4:cpu,cpuacct:/\n0::/x",
            **old_files(OLD, "600000"),
            "sys/fs/cgroup/unified/x/cpu.max": "700000 100000",
        },
        6.0,
    ),
    "nonsense": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "none at all"}, 8.0),
    "a limit above what is there": (
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "9900000 100000"},
        8.0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_least_limit_counts(name: str, tree: Callable[[Mapping[str, str]], Path]) -> None:
    files, expected = CASES[name]
    assert cpu_quota.allowed(tree(files), present=8) == expected


@pytest.mark.parametrize(
    ("quota", "workers", "threads"),
    [(250, 1, 2), (250, 2, 1), (250, 3, 1), (50, 1, 1), (800, 2, 4), (800, 3, 2)],
)
def test_workers_share_whole_cpus(
    quota: int, workers: int, threads: int, tree: Callable[[Mapping[str, str]], Path]
) -> None:
    root = tree({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": f"{quota}000 100000"})
    assert cpu_quota.threads_per_worker(workers, root, present=8) == threads
    assert cpu_quota.whole_cpus(root, present=8) == cpu_quota.threads_per_worker(1, root, present=8)


def test_this_process_may_use_a_cpu() -> None:
    assert 1 <= cpu_quota.whole_cpus() <= max(1, int(cpu_quota.allowed()))


def test_one_worker_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_quota, "whole_cpus", lambda: 3)
    assert load({"workers": "auto"}).workers == 3
    assert load({"workers": "2"}).workers == Settings(workers=2).workers == 2


@pytest.mark.parametrize(
    ("backend", "asked", "given"),
    [("onnx", None, 6), ("onnx", 2, 2), ("compiled", None, 1), ("compiled", 2, 2)],
)
def test_onnx_runtime_takes_what_is_allowed_and_compiled_loops_one(
    backend: str, asked: int | None, given: int, tiny: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def remember(bundle: Bundle, threads: int) -> None:
        del bundle
        seen.append(threads)

    monkeypatch.setattr("service.engine.onnx_sessions.OnnxBackend", remember)
    monkeypatch.setattr("service.engine.compiled.CompiledBackend", remember)
    Engine(tiny, asked, backend, cpus=6)  # type: ignore[arg-type]
    assert seen == [given]


def test_sessions_have_the_threads_they_are_given(tiny: Bundle) -> None:
    backend = Engine(tiny, None, "onnx", cpus=3)._backend
    options = backend._gate.get_session_options()  # type: ignore[attr-defined]
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 1)
