"""A run's figures in plain words: what they mean, and what to do if they are too low."""

from typing import Any

KEPT = 0.99  # of the full softmax's first answers: nobody will notice the others
CROWDED = 0.25  # of all classes in one expert
OVERSIZED = 5.0  # times the classes that an answer scores on average
IDLE = 0.5  # of an equal share of the rows


def verdict(summary: dict[str, Any]) -> str:
    """One sentence on the answers, from the figures of summary.json."""
    kept = summary["precision"]["1"]
    words = f"keeps the model's first answer on {100 * kept:.1f}% of rows"
    if kept >= KEPT:
        return f"It {words}."
    lost = f"It loses {100 * (1 - kept):.1f} points of the model's first answers"
    return f"{lost}: {remedy(summary)}."


def remedy(summary: dict[str, Any]) -> str:
    reachable, possible = summary.get("reachable"), summary.get("speedup_for_99")
    asked = summary["flops_speedup"]
    if reachable is not None and reachable["1"] < KEPT:
        if possible is not None and possible < asked:
            return f"allow {speedup(possible)} or bring more rows"
        return "allow a smaller speedup or bring more rows"
    if summary.get("objective") == "accuracy":
        return (
            "its rows are learned from labels too, so --objective fidelity keeps more of them, and"
            " so do more rows"
        )
    return "bring more rows"


def speedup(times: float) -> str:
    """Rounded down: more would not do."""
    return f"{int(times)}x" if times >= 10 else f"{int(10 * times) / 10:.1f}x"


def balance_warning(summary: dict[str, Any]) -> str | None:
    """A sentence if one expert holds far more classes than the others, with what to do."""
    largest, experts = summary["largest_expert"], len(summary["utilization"])
    equal = 1 / experts
    crowded = largest["share"] > max(CROWDED, 2 * equal)
    oversized = largest["classes"] > OVERSIZED * max(summary["mean_rows"], 1.0)
    if not (crowded or oversized):
        return None
    held = (
        f"Expert {largest['expert']} holds {largest['classes']:,} classes,"
        f" {100 * largest['share']:.0f}% of all,"
    )
    if largest["utilization"] < IDLE * equal and summary["keep_one"]:
        return (
            f"{held} most of them for the sake of a copy of every class: its answers are slow but"
            f" rare ({100 * largest['utilization']:.1f}% of rows). --no-keep-one drops them; more"
            " rows show where they belong."
        )
    return (
        f"{held} and is chosen for {100 * largest['utilization']:.1f}% of rows: --experts"
        f" {2 * experts} divides it, and a larger --speedup makes it smaller."
    )
