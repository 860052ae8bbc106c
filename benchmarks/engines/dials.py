"""Settings of the peers' dials for curves: from fast and coarse to as good as exact.

Wider than what `dss compare` sweeps, which asks for 10 answers of smaller heads.
"""

from math import isqrt

from trainer.baselines.method import Dial

LISTS = (16, 64, 256, 1024)
CLASSES_IN_A_LIST = (4, 200)  # on average, at least and at most
PROBES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REORDERED = (30, 100, 300, 1000)  # candidates ranked by the rows themselves
LEAVES_PER_ROOT = (1, 4)  # leaves of ScaNN's tree, in roots of the number of classes
SEARCHED = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of them
WINDOWS = (16, 32, 64, 128, 256)
SHARES = (0.005, 0.01, 0.02, 0.05, 0.1)


def reordered(k: int) -> list[int]:
    """At least twice and at most thirty times the answers asked for, or a hundred."""
    return [count for count in REORDERED if 2 * k <= count <= max(100, 30 * k)]


def ivf(n_classes: int) -> list[Dial]:
    fewest, most = CLASSES_IN_A_LIST
    return [
        Dial({"lists": lists, "probes": probes}, f"IVF{lists} nprobe {probes}")
        for lists in LISTS
        for probes in PROBES
        if n_classes // most <= lists <= n_classes // fewest and probes <= lists
    ]


def codes(n_classes: int, k: int) -> list[Dial]:
    return [
        Dial({**dial.settings, "reordered": count}, f"{dial.name} reorder {count}")
        for dial in ivf(n_classes)
        for count in reordered(k)
    ]


def scann(n_classes: int, k: int) -> list[Dial]:
    found = []
    for roots in LEAVES_PER_ROOT:
        leaves = max(1, min(roots * isqrt(n_classes), n_classes // 8))
        for searched in dict.fromkeys(max(1, round(share * leaves)) for share in SEARCHED):
            found += [
                Dial(
                    {"leaves": leaves, "searched": searched, "reordered": count},
                    f"ScaNN {leaves}/{searched} reorder {count}",
                )
                for count in reordered(k)
            ]
    return found


def svd(hidden_size: int) -> list[Dial]:
    return [
        Dial({"window": window, "share": share}, f"SVD w={window} {100 * share:g}%")
        for window in WINDOWS
        if window <= hidden_size // 2
        for share in SHARES
    ]
