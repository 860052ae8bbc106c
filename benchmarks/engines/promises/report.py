"""The tables of what `benchmarks.engines.promises` counted."""

from typing import Any

from benchmarks.document import table
from benchmarks.engines.report import measured_on

Run = dict[str, Any]


def markdown(runs: dict[str, Run]) -> str:
    exact = [run["exact"] for run in runs.values()]
    checked, differing = (sum(each[name] for each in exact) for name in ("rows", "differing"))
    commands: dict[str, list[str]] = {}
    for run in runs.values():
        commands.setdefault(measured_on(run), []).append(f"- `{run['command']}`")
    parts = [
        recall_table(runs),
        exact_table(runs),
        f"Of {checked:,} exact answers together, {differing:,} differ.",
    ]
    for machine, lines in commands.items():
        parts += [f"{machine}:", "\n".join(lines)]
    return "\n\n".join(parts)


def recall_table(runs: dict[str, Run]) -> str:
    header = ["head", "top", "recall asked", "missed, of 10,000", "95% interval", "may be missed"]
    header += ["kept", "rows from one expert", "all classes scanned", "head's rows looked at"]
    return table(
        header,
        (
            [
                f"{title} ({run['rows']:,} rows)",
                str(each["k"]),
                f"{each['recall']:g}",
                _of_many(each["missed"]),
                " to ".join(map(_of_many, each["interval"])),
                _of_many(each["may_miss"]),
                kept(each),
                f"{each['rungs']['sparse']:.1%}",
                f"{1 - each['rungs']['sparse']:.1%}",
                f"{each['cost']:.1%}",
            ]
            for title, run in runs.items()
            for each in run["recalls"]
        ),
    )


def kept(each: dict[str, Any]) -> str:
    """A mean above what may be missed can be chance; an interval that lies above it is not."""
    if each["missed"] <= each["may_miss"]:
        return "yes"
    return "within chance" if each["interval"][0] <= each["may_miss"] else "no"


def exact_table(runs: dict[str, Run]) -> str:
    header = ["head", "classes", "hidden", "rows answered exactly", "of these with noise"]
    header += ["not the float64 top 10"]
    return table(
        header,
        (
            [
                title,
                f"{run['n_classes']:,}",
                str(run["hidden_size"]),
                f"{run['exact']['rows']:,}",
                f"{run['exact']['with_noise']:,}",
                str(run["exact"]["differing"]),
            ]
            for title, run in runs.items()
        ),
    )


def _of_many(share: float) -> str:
    return f"{10_000 * share:.1f}"
