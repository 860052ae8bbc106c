"""What a process takes up."""

import os
from pathlib import Path


def resident(process: int) -> int:
    pages = Path(f"/proc/{process}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def descriptors(process: int) -> int:
    return len(list(Path(f"/proc/{process}/fd").iterdir()))
