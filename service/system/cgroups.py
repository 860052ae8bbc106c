"""This process's control groups: where the kernel shows their limits and what they use."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def folders_v2(root: Path = ROOT) -> Iterator[Path]:
    """The group of version 2 and those above it."""
    mount = root / "sys/fs/cgroup"
    for controllers, path in _groups(root / "proc/self/cgroup"):
        if controllers == [""]:  # version 2; `unified` where version 1 is there as well
            for place in (mount, mount / "unified"):
                yield from _upwards(place, path)


def folders_v1(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """The group of one controller of version 1 and those above it."""
    mount = root / "sys/fs/cgroup"
    for controllers, path in _groups(root / "proc/self/cgroup"):
        if controller in controllers:
            for place in {mount / controller, mount / ",".join(controllers)}:
                yield from _upwards(place, path)


def read(file: Path) -> str:
    """A file's content, or nothing."""
    try:
        return file.read_text()
    except OSError:
        return ""


def _groups(file: Path) -> Iterator[tuple[list[str], PurePosixPath]]:
    """Lines such as `0::/system.slice/a.service` and `4:cpu,cpuacct:/docker/1f`."""
    for line in read(file).splitlines():
        _, controllers, path = line.split(":", 2)
        yield controllers.split(","), PurePosixPath(path)


def _upwards(mount: Path, path: PurePosixPath) -> Iterator[Path]:
    """A group's folder and those above it.

    In a container the path may be the host's while what is mounted is the container's own group;
    then only the last of these is there.
    """
    below = path.relative_to("/")
    if ".." not in below.parts:
        for part in (below, *below.parents):
            if part != PurePosixPath("."):
                yield mount / part
    yield mount
