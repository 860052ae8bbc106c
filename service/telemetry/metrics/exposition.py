"""Writes metrics in Prometheus' text format, as prometheus_client does and several times as fast.

It is for counters, gauges and histograms without timestamps or exemplars: all that is shown here.
Most of the work would be to write the same labels and numbers again and again, so they are kept.
"""

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

TEXT = str.maketrans({"\\": r"\\", "\n": r"\n"})
LABEL = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def text(families: Iterable[Metric]) -> bytes:
    pairs: dict[tuple[str, str], str] = {}
    numbers: dict[float, str] = {}
    lines: list[str] = []

    def pair(label: tuple[str, str]) -> str:
        written = pairs.get(label)
        if written is None:
            written = pairs[label] = f'{label[0]}="{label[1].translate(LABEL)}"'
        return written

    def number(value: float) -> str:
        written = numbers.get(value)
        if written is None:
            written = numbers[value] = str(floatToGoString(value))  # type: ignore[no-untyped-call]
        return written

    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        lines.append(f"# HELP {name} {family.documentation.translate(TEXT)}\n")
        lines.append(f"# TYPE {name} {family.type}\n")
        for sample in family.samples:
            labels = ",".join(map(pair, sorted(sample.labels.items())))
            braced = f"{{{labels}}}" if labels else ""
            lines.append(f"{sample.name}{braced} {number(sample.value)}\n")
    # A label that is no Unicode must not cost everybody the page.
    return "".join(lines).encode("utf-8", "replace")
