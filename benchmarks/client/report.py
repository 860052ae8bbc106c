"""The tables of docs/client.md, from the committed results."""

from pathlib import Path
from typing import Any

from benchmarks.client.turns import AT_ONCE
from benchmarks.document import table

RESULTS = Path("benchmarks/results/client.json")
TRANSPORT_RESULTS = Path("benchmarks/results/client-transports.json")
PEER_PACKAGES = (
    "numpy",
    "httptools",
    "tritonclient",
    "geventhttpclient",
    "aiohttp",
    "httpx",
    "httpcore",
)
TRANSPORT_PACKAGES = ("numpy", "httptools", "pyreqwest", "aiohttp", "urllib3", "httpx", "httpcore")


def rendered(results: dict[str, Any]) -> str:
    """Our client beside tritonclient."""
    header = ["", "at once", "rows", "us a request", "of tritonclient's", "its CPU us", "of those"]
    lines = [
        [
            *_place(point),
            f"{point['us']:,.0f}",
            f"{point['ratio']:.2f}",
            f"{point['cpu_us']:,.0f}",
            f"{point['cpu_ratio']:.2f}",
        ]
        for point in results["points"]
    ]
    said = results["machine"]
    words = (
        f"Measured on {said['cores']} cores of an {said['cpu']}, which the server shares, by"
        f" `{results['command']}`: {results['rounds']} rounds of {results['calls']} requests, top"
        f" {results['k']} of the demo model, tritonclient {said['tritonclient']}, httpx"
        f" {said['httpx']} and httpcore {said['httpcore']}. With {AT_ONCE} at once (threads, or"
        " tasks of one event loop) a request's time is that of all, divided by their number."
    )
    return f"{words}\n\n{table(header, lines)}"


def rendered_transports(results: dict[str, Any]) -> str:
    """Our connections beside those of HTTP libraries."""
    header = ["", "at once", "rows", "time of ours", "in quiet rounds", "CPU of ours"]
    lines = [
        [
            *_place(point),
            f"{point['ratio']:.2f}",
            f"{point['quiet_ratio']:.2f}",
            f"{point['cpu_ratio']:.2f}",
        ]
        for point in results["points"]
    ]
    said = results["machine"]
    words = (
        f"Measured on {said['cores']} cores of an {said['cpu']}, which the server and other work"
        f" share, by `{results['command']}`: {results['rounds']} rounds of {results['calls']}"
        f" requests in turns, .npy bodies, top {results['k']} of the demo model, pyreqwest"
        f" {said['pyreqwest']}, aiohttp {said['aiohttp']}, urllib3 {said['urllib3']}, httpx"
        f" {said['httpx']}. One at a time the median request counts, {AT_ONCE} at once (threads, or"
        " tasks of one event loop) requests by second. The first column is the median of the"
        " rounds' ratios; the second compares the fastest tenth of each one's rounds, which the"
        " other work disturbed least."
    )
    return f"{words}\n\n{table(header, lines)}"


def _place(point: dict[str, Any]) -> list[str]:
    name = f"`{point['client']}`" if "lient" in point["client"] else point["client"]
    return [name, str(point["at_once"]), str(point["rows"])]
