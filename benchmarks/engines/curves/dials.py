"""Settings of the peers' dials for curves: from fast and coarse to as good as exact.

Wider than what `dss compare` sweeps, which asks for 10 answers of smaller heads.
"""

from math import isqrt

from trainer.baselines.method import Dial
from trainer.baselines.scann_tree import FLAT

LISTS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
CLASSES_IN_A_LIST = (32, 640)  # on average, at least and at most
PROBES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
REORDERED = (10, 30, 60, 100, 200, 300, 600, 1000)  # candidates ranked by the rows themselves
LEAVES_PER_ROOT = (0.25, 0.5, 1, 2, 4)  # leaves of ScaNN's tree, in roots of the number of classes
SPILLED = (0.5, 1, 2)  # of trees that hold each class twice (SOAR)
SEARCHED = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0)  # of the leaves
WIDTHS = (4, 6, 10, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)  # of graph searches
WINDOWS = (16, 32, 64, 128)
SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)


def reordered(k: int) -> list[int]:
    """At least twice and at most twenty times the answers asked for, or a hundred."""
    return [count for count in REORDERED if 2 * k <= count <= max(100, 20 * k)]


def ivf(n_classes: int) -> list[Dial]:
    fewest, most = CLASSES_IN_A_LIST
    return [
        Dial({"lists": lists, "probes": probes}, f"IVF{lists} nprobe {probes}")
        for lists in LISTS
        for probes in PROBES
        if n_classes / most <= lists <= max(LISTS[0], n_classes // fewest) and probes <= lists
    ]


def codes(n_classes: int, k: int) -> list[Dial]:
    return [
        Dial({**dial.settings, "reordered": count}, f"{dial.name} reorder {count}")
        for dial in ivf(n_classes)
        for count in reordered(k)
    ]


def scann(n_classes: int, k: int) -> list[Dial]:
    """Codes of all rows, trees, and trees with spilling."""
    found = [
        Dial({"leaves": FLAT, "searched": -1, "reordered": count}, f"ScaNN flat reorder {count}")
        for count in reordered(k)
    ]
    trees = [(roots, False) for roots in LEAVES_PER_ROOT] + [(roots, True) for roots in SPILLED]
    for roots, spilling in trees:
        leaves = max(1, min(round(roots * isqrt(n_classes)), n_classes // 8))
        for searched in dict.fromkeys(max(1, round(share * leaves)) for share in SEARCHED):
            found += [
                Dial(
                    {
                        "leaves": leaves,
                        "spilling": spilling,
                        "searched": searched,
                        "reordered": count,
                    },
                    f"ScaNN {'SOAR ' if spilling else ''}{leaves}/{searched} reorder {count}",
                )
                for count in reordered(k)
            ]
    return found


def svd(n_classes: int, hidden_size: int, k: int) -> list[Dial]:
    """Candidates must be enough for k answers."""
    return [
        Dial({"window": window, "share": share}, f"SVD w={window} {100 * share:g}%")
        for window in WINDOWS
        if window <= hidden_size // 2
        for share in SHARES
        if round(share * n_classes) >= k
    ]
