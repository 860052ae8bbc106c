"""Finds classes by name. Names are looked through one by one, in a thread: there is no second copy
of them, and none has to be kept in order."""

from time import sleep

import numpy as np
from numpy.typing import NDArray

from service.repository.class_index import REST_SECONDS

NAMES_AT_ONCE = 4096


def search(labels: NDArray[np.object_], text: str, most: int) -> list[int]:
    """At most so many classes whose names hold the text, in upper or lower case.

    Those that are called just so come first, then those that begin with it, by class id.
    """
    wanted = text.casefold()
    if not wanted:
        return list(range(min(most, len(labels))))
    ranks: tuple[list[int], list[int], list[int]] = ([], [], [])
    for begin in range(0, len(labels), NAMES_AT_ONCE):
        names = labels[begin : begin + NAMES_AT_ONCE].tolist()
        for at in [i for i, name in enumerate(names) if wanted in name.casefold()]:
            rank = ranks[_rank(names[at].casefold(), wanted)]
            if len(rank) < most:
                rank.append(begin + at)
        if len(ranks[0]) == most:
            break
        sleep(REST_SECONDS)
    return [number for rank in ranks for number in rank][:most]


def _rank(name: str, wanted: str) -> int:
    if name == wanted:
        return 0
    return 1 if name.startswith(wanted) else 2
