"""Scrapes of /metrics of a model with thousands of experts, and of a thousand models."""

import os
import shutil
from functools import partial
from pathlib import Path

from benchmarks.chaos.harness import bundles, known_requests, mixed_traffic
from benchmarks.chaos.harness.attackers import Attack
from benchmarks.chaos.harness.mixed_traffic import Point
from benchmarks.chaos.harness.server_process import serving
from benchmarks.chaos.harness.verdict import Context, Figures
from benchmarks.engines.random_bundles import Shape, write_random

TITLE = "scrapes of /metrics beside ordinary traffic"
EXPERTS, QUICK_EXPERTS = 10_000, 2000
MODELS = 1500
TINY = Shape(n_classes=16, n_experts=2, held=10, hidden_size=4)
SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"
PAUSE_SECONDS = 1.5  # 10 scrapes a second from 15 connections


def run(context: Context) -> Figures:
    figures = Figures()
    experts = context.count(QUICK_EXPERTS, EXPERTS)
    points = _many_experts(context, figures, experts)
    if not context.quick:
        points += _many_models(context, figures)
    mixed_traffic.require(figures, points)
    return figures


def _many_experts(context: Context, figures: Figures, experts: int) -> list[Point]:
    models = context.folder / "experts"
    shape = Shape(n_classes=2 * experts, n_experts=experts, held=2, hidden_size=8)
    asked = known_requests.ask(bundles.write(models, [1], shape), k=2)
    attack = Attack(
        f"/metrics of {experts:,} experts", SCRAPE, pause=PAUSE_SECONDS, connections=(1, 15, 60)
    )
    start = partial(serving, models, context.folder / "run")
    return mixed_traffic.attack_each(context, figures, [attack], start, asked)


def _many_models(context: Context, figures: Figures) -> list[Point]:
    models = context.folder / "many"
    asked = known_requests.ask(bundles.write(models, [1]))
    tiny = write_random(context.folder / "tiny", TINY).path
    for number in range(MODELS - 1):
        _link(tiny, models / f"n{number:04d}" / "1")
    attack = Attack(
        f"/metrics of {MODELS:,} models", SCRAPE, pause=PAUSE_SECONDS, connections=(15,)
    )
    start = partial(serving, models, context.folder / "run")
    return mixed_traffic.attack_each(
        context, figures, [attack], start, asked, seconds=8.0, harmless=False
    )


def _link(source: Path, path: Path) -> None:
    """The same files once more, without a copy."""
    shutil.copytree(source, path, copy_function=os.link)
