"""Memory of the process: large blocks go back to the system as soon as they are freed."""

import ctypes

LARGE_BYTES = 4 * 2**20
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def return_large_blocks() -> None:
    """Without this glibc learns from the first large block that is freed to keep the next ones.

    Clients' large answers, freed in any order, would leave holes that only other large answers
    fill.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:  # only glibc has it
        set_option(M_MMAP_THRESHOLD, LARGE_BYTES)
