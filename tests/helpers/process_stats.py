"""What a process has in memory and open."""

from service.bench import proc_stats


def resident(process: int) -> int:
    """Bytes."""
    found = proc_stats.resident_bytes([process])
    assert found is not None
    return found


def descriptors(process: int) -> int:
    return len(proc_stats.open_files(process))
