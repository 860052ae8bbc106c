"""The paper's tables with ours beside them."""

from typing import Any

from trainer.report.format import AT, NOTHING, SPLITS, cells, count, published_share, share, times
from trainer.report.layer import memory_picture
from trainer.report.page import Block, Cell, Column, Group, Table, Text
from trainer.report.runs import RANKS, Results

PUBLISHED = "published, on the authors' encoder"


def paper_tables(summary: dict[str, Any]) -> list[Block]:
    tables = summary["tables"]
    blocks: list[Block] = [
        Text(
            "Published numbers are the paper's, measured by its authors on encoders of their own"
            " and their own machine; ours are measured here, on the test split unless it is said"
            " otherwise. So compare each with the full softmax above it, not across."
        )
    ]
    if tables["1"]:
        blocks.append(
            _beside(
                "The paper's Table 1: top-1 accuracy, FLOPs and time of one query. The paper heads"
                " its times ms and calls them microseconds; they are taken as milliseconds.",
                tables["1"],
                ranks=RANKS[:1],
                latency=True,
            )
        )
    if tables["2"]:
        blocks.append(
            _beside(
                "The paper's Table 2: word-level language models. * classes may be left out.",
                tables["2"],
                ranks=RANKS,
            )
        )
    if tables["3"]:
        blocks.append(
            _beside(
                "The paper's Table 3: SVD-softmax alone and inside the experts.",
                tables["3"],
                ranks=RANKS[:1],
            )
        )
    else:
        blocks.append(Text("The paper's Table 3, SVD inside the experts, is on WikiText-2 only."))
    if not tables["1"]:
        blocks = [Text("The paper has no tables on this corpus.")]
    return blocks


def _beside(
    caption: str, entries: list[dict[str, Any]], *, ranks: tuple[str, ...], latency: bool = False
) -> Table:
    """A row for each measurement of ours, the published one before the first."""
    at = [f"top\u00a0{rank}" for rank in ranks]
    published = [*at, "FLOPs speedup", *(["ms"] if latency else [])]
    ours = [*at, "FLOPs speedup", *(["ms"] if latency else [])]
    rows = []
    for entry in entries:
        for number, our in enumerate(entry["ours"] or [None]):
            first = number == 0
            rows.append(
                [
                    Cell(entry["method"] if first else ""),
                    *_published_cells(entry["published"] if first else None, ranks, latency),
                    *_our_cells(our, ranks, latency),
                ]
            )
    return Table(
        caption,
        [
            Column("method", ""),
            *(Column(name, "number published") for name in published),
            Column("ours", ""),
            *(Column(name) for name in ours),
        ],
        rows,
        groups=[
            Group("", 1),
            Group(PUBLISHED, len(published), "published"),
            Group("measured here", 1 + len(ours)),
        ],
    )


def _published_cells(
    published: dict[str, Any] | None, ranks: tuple[str, ...], latency: bool
) -> list[Cell]:
    if published is None:
        return cells(*[""] * (len(ranks) + 1 + latency))
    speedup, took = published["flops_speedup"], published["latency_ms"]
    return cells(
        *(published_share(published["accuracy"].get(rank)) for rank in ranks),
        times(speedup),
        *([f"{took:.2f}" if took is not None else NOTHING] if latency else []),
    )


def _our_cells(our: dict[str, Any] | None, ranks: tuple[str, ...], latency: bool) -> list[Cell]:
    if our is None:
        return [Cell("not measured here", style="note"), *cells(*[""] * (len(ranks) + 1 + latency))]
    took = our["latency_us"]
    accuracy = our["accuracy"]
    return [
        Cell(our["title"], "" if our["split"] == "test" else f"{SPLITS[our['split']]} split"),
        *(Cell(share(accuracy[rank] if accuracy else None)) for rank in ranks),
        Cell(times(our["flops_speedup"])),
        *([Cell(f"{took / 1000:.3f}" if took is not None else NOTHING)] if latency else []),
    ]


# --- mitosis ------------------------------------------------------------------------------------


def mitosis(results: Results, summary: dict[str, Any], anchor: str) -> list[Block]:
    if results.mitosis is None:
        return [Text("No layer was grown by mitosis in this run.")]
    facts = summary["mitosis"]
    published = facts["published_peak_memory"]
    blocks: list[Block] = [
        Text(
            f"{facts['layer']} was grown from few experts by doubling. Its experts together never"
            f" held more than {facts['peak_memory']:.2f} full softmaxes"
            + (f"; the paper's needed {published:g}." if published else ".")
        )
    ]
    if results.mitosis.memory:
        blocks.append(memory_picture(results.mitosis.memory, anchor, published))
    else:
        blocks.append(Text("Its memory was not logged step by step, so no curve is drawn."))
    blocks.append(_mitosis_table(summary["tables"]["mitosis"]))
    return blocks


def _mitosis_table(stages: list[dict[str, Any]]) -> Table:
    with_published = any(stage["published"] for stage in stages)
    rows = [
        [
            Cell(str(stage["experts"])),
            *(_published_cells(stage["published"], RANKS, False) if with_published else []),
            *_stage_cells(stage["ours"]),
        ]
        for stage in stages
    ]
    published = [*AT, Column("FLOPs speedup")]
    return Table(
        "After training with each number of experts"
        + (", beside the paper's table of its appendix." if with_published else "."),
        [
            Column("experts"),
            *(Column(c.name, "number published") for c in published if with_published),
            Column("split", ""),
            *AT,
            Column("FLOPs speedup"),
            Column("rows held"),
            Column("peak memory, full softmaxes"),
        ],
        rows,
        groups=[
            Group("", 1),
            *([Group(PUBLISHED, len(published), "published")] if with_published else []),
            Group("measured here", 7),
        ],
    )


def _stage_cells(stage: dict[str, Any] | None) -> list[Cell]:
    if stage is None:
        return [Cell("not measured here", style="note"), *cells(*[""] * 6)]
    memory = stage["peak_memory"]
    return cells(
        SPLITS[stage["split"]],
        *(share(stage["accuracy"][rank]) for rank in RANKS),
        times(stage["flops_speedup"]),
        count(stage["rows"]),
        NOTHING if memory is None else f"{memory:.2f}",
    )
