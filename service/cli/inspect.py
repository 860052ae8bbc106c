"""A bundle described for people: `dss inspect`."""

from typing import TYPE_CHECKING, Any

import numpy as np

from service.bundle import Bundle, flops_speedup
from service.bundle.contract import Contract
from service.terminal import console
from service.terminal.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType


def describe(bundle: Bundle) -> dict[str, Any]:
    manifest = bundle.manifest
    costs, utilization = bundle.expert_costs, manifest.training.utilization
    copies = np.bincount(bundle.classes, minlength=manifest.n_classes)
    counts, classes = np.unique(copies, return_counts=True)
    return {
        "path": str(bundle.path),
        "format_version": manifest.format_version,
        "created": manifest.created,
        "classes": manifest.n_classes,
        "hidden_size": manifest.hidden_size,
        "labels": manifest.labels,
        "head": manifest.head,
        "objective": manifest.objective,
        "exact": manifest.rows_folder is not None,
        "contract": None if manifest.contract is None else _contract(manifest.contract),
        "bytes": sum(entry.bytes for entry in manifest.files.values()),
        # Worked out from what the graphs compute, not copied from what the manifest says.
        "flops_speedup": flops_speedup(manifest.n_classes, costs, utilization),
        "accuracy": manifest.training.accuracy,
        "full_accuracy": manifest.training.full_accuracy,
        "mean_copies": float(copies.mean()),
        "copies": {
            str(count): number
            for count, number in zip(counts.tolist(), classes.tolist(), strict=True)
        },
        "approximated": sum(preview is not None for preview in bundle.previews),
        "experts": [
            {"expert": expert, "classes": size, "cost": cost, "utilization": share}
            for expert, (size, cost, share) in enumerate(
                zip(manifest.expert_sizes, costs, utilization, strict=True)
            )
        ],
    }


def _contract(contract: Contract) -> dict[str, Any]:
    """What may be promised, and with how many rows that was found out."""
    scanned = contract.exact_only
    return {
        "rows": contract.rows,
        "ks": contract.ks,
        "levels": contract.levels,
        "sparse": [level for level in contract.levels if level not in scanned],
        "exact_only": scanned,
    }


def table(facts: dict[str, Any]) -> str:
    approximated = facts["approximated"]
    lines = [
        f"{facts['path']}",
        "",
        *(f"{name:<12} {value}".rstrip() for name, value in _summary(facts)),
        "",
        f"{'expert':>6}  {'classes':>9}"
        + (f"  {'cost':>9}" if approximated else "")
        + f"  {'utilization':>11}",
    ]
    lines += [
        f"{row['expert']:>6}  {row['classes']:>9,}"
        + (f"  {row['cost']:>9,.1f}" if approximated else "")
        + f"  {row['utilization']:>11.2%}"
        for row in facts["experts"]
    ]
    return "\n".join(lines)


def drawing(facts: dict[str, Any]) -> "RenderableType":
    """The same for a terminal: a bar for each expert's share of the traffic."""
    from rich import box
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    approximated = facts["approximated"]
    experts = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("expert", "classes", *(["cost"] if approximated else []), "utilization"):
        experts.add_column(title, justify="right", no_wrap=True)
    experts.add_column()
    busiest = max(row["utilization"] for row in facts["experts"]) or 1.0
    for row in facts["experts"]:
        cost = [f"{row['cost']:,.1f}"] if approximated else []
        share = row["utilization"]
        filled = ProgressBar(busiest, share, width=30, complete_style="cyan", finished_style="cyan")
        cells = [str(row["expert"]), f"{row['classes']:,}", *cost, f"{share:.2%}"]
        experts.add_row(*cells, filled)
    path = Text(facts["path"], style="bold")
    return Group(path, Text(), console.facts(_summary(facts)), Text(), experts)


def _summary(facts: dict[str, Any]) -> list[tuple[str, str]]:
    approximated = facts["approximated"]
    return [
        ("classes", f"{facts['classes']:,}" + (" with labels" if facts["labels"] else "")),
        ("hidden size", f"{facts['hidden_size']:,}"),
        *(
            [("objective", "fidelity: the head's own rows")]
            if facts["objective"] == "fidelity"
            else []
        ),
        (
            "experts",
            f"{len(facts['experts']):,}"
            + (f", {approximated:,} of them approximated by SVD" if approximated else ""),
        ),
        ("speedup", f"{facts['flops_speedup']:.2f}x fewer FLOPs than a full softmax"),
        ("accuracy", _accuracy(facts)),
        ("copies", f"{facts['mean_copies']:.3f} per class"),
        *(
            ("", f"{number:,} classes in {count} {'expert' if count == '1' else 'experts'}")
            for count, number in facts["copies"].items()
        ),
        *([("head", _head(facts))] if facts["head"] else []),
        *([("contract", _promises(facts["contract"]))] if facts["contract"] else []),
        ("size", f"{facts['bytes']:,} bytes"),
        ("created", f"{printable(facts['created'])}, format {facts['format_version']}"),
    ]


def _head(facts: dict[str, Any]) -> str:
    return "shipped, for exact answers" if facts["exact"] else "shipped, to compare answers with"


def _promises(contract: dict[str, Any]) -> str:
    levels, scanned = (
        ", ".join(f"{level:g}" for level in contract[name]) for name in ("sparse", "exact_only")
    )
    ks = ", ".join(f"{k:,}" for k in contract["ks"])
    sparse = f"recall {levels} at k up to {ks}" if levels else "no recall from experts"
    exact = f", {scanned} exact only" if scanned else ""
    return f"{sparse}{exact}, calibrated on {contract['rows']:,} rows"


def _accuracy(facts: dict[str, Any]) -> str:
    if facts["accuracy"] is None:
        return "not recorded"
    full = facts["full_accuracy"]
    against = "" if full is None else f" (a full softmax: {full:.2%})"
    return f"{facts['accuracy']:.2%}{against}"
