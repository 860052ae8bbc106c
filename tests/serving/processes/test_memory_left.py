"""How much memory a process may yet take, read from file trees as the kernel shows them."""

from pathlib import Path

import pytest

from service.system import memory

GIB = 2**30
NEW, OLD = "sys/fs/cgroup", "sys/fs/cgroup/memory"


def new_files(
    folder: str, limit: str, used: int, inactive: int = 0, active: int = 0
) -> dict[str, str]:
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.current": str(used),
        f"{folder}/memory.stat": f"anon 1\ninactive_file {inactive}\nactive_file {active}\n",
    }


def old_files(folder: str, limit: int, used: int, inactive: int = 0) -> dict[str, str]:
    return {
        f"{folder}/memory.limit_in_bytes": str(limit),
        f"{folder}/memory.usage_in_bytes": str(used),
        f"{folder}/memory.stat": f"inactive_file 7\ntotal_inactive_file {inactive}\n",
    }


CASES: dict[str, tuple[dict[str, str], int | None]] = {
    "nothing tells": ({}, None),
    "the machine alone": (
        {"proc/meminfo": "MemTotal:  9000000 kB\nMemFree: 5 kB\nMemAvailable:  2048 kB"},
        2048 * 1024,
    ),
    "no limit": ({"proc/self/cgroup": "0::/", **new_files(NEW, "max", 5)}, None),
    "a container's own group": (
        {"proc/self/cgroup": "0::/", **new_files(NEW, str(3 * GIB), GIB)},
        2 * GIB,
    ),
    "pages of files are given back, of those in use a half": (
        {"proc/self/cgroup": "0::/a", **new_files(f"{NEW}/a", "1000", 900, 300, 200)},
        500,
    ),
    "a group above": (
        {
            "proc/self/cgroup": "0::/a/b",
            **new_files(f"{NEW}/a/b", "max", 10),
            **new_files(f"{NEW}/a", "1000", 400),
        },
        600,
    ),
    "the least of all": (
        {
            "proc/meminfo": "MemAvailable:  1 kB",
            "proc/self/cgroup": "0::/a/b",
            **new_files(f"{NEW}/a/b", "2000", 10),
            **new_files(f"{NEW}/a", "3000", 2500),
        },
        500,
    ),
    "more than is allowed": ({"proc/self/cgroup": "0::/", **new_files(NEW, "10", 20)}, 0),
    "version 1": (
        {"proc/self/cgroup": "9:memory:/docker/1f", **old_files(OLD, 1000, 700, 100)},
        400,
    ),
    "version 1 without a limit": (
        {
            "proc/meminfo": "MemAvailable:  1 kB",
            "proc/self/cgroup": "9:memory:/",
            **old_files(OLD, 2**63 - 4096, 700),
        },
        1024,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_left(tmp_path: Path, case: str) -> None:
    files, expected = CASES[case]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert memory.bytes_left(tmp_path) == expected


def test_this_machine_tells() -> None:
    left = memory.bytes_left()
    assert left is not None and left > 0
