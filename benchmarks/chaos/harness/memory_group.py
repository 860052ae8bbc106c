"""A control group with a memory limit for a server, inside the group of this process."""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.harness.verdict import NotPossible

MOUNT = Path("/sys/fs/cgroup")
ENTER = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


@dataclass(frozen=True)
class MemoryGroup:
    path: Path

    @property
    def prefix(self) -> tuple[str, ...]:
        """The command that runs another inside the group."""
        return (shutil.which("sh") or "sh", "-c", ENTER, str(self.path))

    def processes_killed(self) -> int:
        """By the kernel, because the limit was reached."""
        for name in ("memory.events", "memory.oom_control"):
            with suppress(OSError):
                for line in (self.path / name).read_text().splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        return 0


@contextmanager
def limited(limit: int) -> Iterator[MemoryGroup]:
    """Version 1 or 2 of control groups; the server must have ended before the end."""
    parent, name = _own_group()
    path = parent / f"dss-chaos-{uuid.uuid4().hex[:8]}"
    try:
        path.mkdir()
    except OSError as error:
        raise NotPossible(f"No control group can be made here: {error}") from error
    try:
        try:
            (path / name).write_text(str(limit))
        except OSError as error:
            raise NotPossible(f"Memory cannot be limited here: {error}") from error
        yield MemoryGroup(path)
    finally:
        with suppress(OSError):
            path.rmdir()


def _own_group() -> tuple[Path, str]:
    """The folder of this process's group, and the name of the limit in it."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return MOUNT / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return MOUNT / line[3:].lstrip("/"), "memory.max"
    raise NotPossible("There are no control groups here.")
