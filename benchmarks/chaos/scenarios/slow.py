"""Slow-loris: heads and bodies that trickle, answers that nobody reads; others are unaffected."""

import socket
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.chaos.harness import bundles, known_requests
from benchmarks.chaos.harness.load import Plan, loading
from benchmarks.chaos.harness.server_process import Server, client_ports, serving
from benchmarks.chaos.harness.verdict import MIB, Context, Figures
from service.bench.http_reader import ANSWER_SECONDS, HOST

TITLE = "slow-loris: slow heads, slow bodies, slow readers"
TRICKLE_SECONDS = 0.1  # between two bytes
SLACK_SECONDS = 5.0
# An answer of 6 MB, more than what the system keeps for a socket.
MANY_ROWS, MANY_ANSWERS = 4096, 128
READ_LATE_BYTES = 4096
MEMORY_BYTES = 256 * MIB  # limits.max_pending_bytes


@dataclass
class Slow:
    kind: str
    socket: socket.socket
    rest: bytes  # what it has not sent yet
    begun: float
    port: int  # its own
    cut_off: float | None = None  # after how many seconds


def run(context: Context) -> Figures:
    figures = Figures()
    asked = known_requests.ask(bundles.write(context.folder / "models", [1]))
    limit = context.choose(1.0, 5.0)
    count = dict.fromkeys(KINDS, context.count(20, 100)) | {READERS: context.count(6, 30)}
    env = {
        "DSS_LIMITS__HEAD_SECONDS": str(limit),
        "DSS_LIMITS__BODY_SECONDS": str(limit),
        "DSS_LIMITS__READ_SECONDS": str(limit),
    }
    with serving(context.folder / "models", context.folder / "run", env=env) as server:
        with loading(Plan(server.port, asked, connections=8, rate=200)) as load:
            load.wait_for_answers(100)
            figures.rss_start, figures.fds_start = server.rss(), server.descriptors()
            context.say(f"{sum(count.values())} slow clients")
            slow = [_open(server.port, kind) for kind in KINDS for _ in range(count[kind])]
            largest = _trickle(slow, limit + SLACK_SECONDS, server)
            outcome = load.finish()
        figures.fds_end = server.descriptors() + 8  # those of the load were open at the start
        figures.rss_end = server.rss()
    outcome.counted_in(figures)
    figures.p50_ms, figures.p99_ms = outcome.percentile(50), outcome.percentile(99)
    for kind in KINDS:
        mine = [one for one in slow if one.kind == kind]
        cut = [one.cut_off for one in mine if one.cut_off is not None]
        slowest = max(cut, default=0.0)
        figures.facts[f"{kind}: cut off, after at most"] = f"{len(cut)}, {slowest:.1f} s"
        words = f"all with {kind} are cut off within {limit:g} s and a little"
        figures.require(words, len(cut) == len(mine), f"{len(cut)} of {len(mine)}")
    figures.facts["slow clients"] = len(slow)
    figures.facts["most memory, MB"] = largest / MIB
    figures.require_right()
    figures.require_none_failed()
    figures.require_none_lost()
    grown = largest - figures.rss_start
    words = "unread answers take less than 256 MB"
    figures.require(words, grown < MEMORY_BYTES, f"{grown / MIB:.0f} MB")
    figures.require_flat_descriptors()
    return figures


# --- clients ---------------------------------------------------------------------------------

# Heads that begin as those of usual requests do, and heads of no known kind.
READERS = "slow readers"
KINDS = ("slow heads", "slow unknown heads", "slow bodies", READERS)


def _open(port: int, kind: str) -> Slow:
    if kind == READERS:
        made = _reader(port)
        return Slow(kind, made, b"", time.monotonic(), made.getsockname()[1])
    small = known_requests.request("json", np.zeros((1, bundles.SMALL.hidden_size), np.float32), 5)
    made = socket.create_connection((HOST, port))
    if kind == "slow heads":
        at_once, rest = small[:20], small[20:]
    elif kind == "slow unknown heads":
        at_once, rest = b"GET /livez HTTP/1.1\r\nX-A: ", b"a" * 10_000
    else:
        at_once, rest = small[:-200], small[-200:]
    made.sendall(at_once)
    made.setblocking(False)
    return Slow(kind, made, rest, time.monotonic(), made.getsockname()[1])


def _reader(port: int) -> socket.socket:
    """A connection whose large answer has begun to arrive."""
    rows = np.zeros((MANY_ROWS, bundles.SMALL.hidden_size), np.float32)
    request = known_requests.request("npy", rows, MANY_ANSWERS)
    while True:
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_LATE_BYTES)
        made.settimeout(ANSWER_SECONDS)
        made.connect((HOST, port))
        made.sendall(request)
        # The queue is short: so large a request may be rejected while others wait.
        if made.recv(12, socket.MSG_PEEK).endswith(b" 200"):
            made.setblocking(False)
            return made
        made.close()


def _trickle(slow: list[Slow], seconds: float, server: Server) -> int:
    """A byte at a time from each until all are cut off or the time is over; the most memory."""
    deadline = time.monotonic() + seconds
    largest = 0
    while time.monotonic() < deadline and any(one.cut_off is None for one in slow):
        largest = max(largest, server.rss())
        held = client_ports(server.process.pid, server.port)
        for one in slow:
            if one.cut_off is None and _is_cut_off(one, held):
                one.cut_off = time.monotonic() - one.begun
        time.sleep(TRICKLE_SECONDS)
    for one in slow:
        one.socket.close()
    return largest


def _is_cut_off(one: Slow, held: set[int]) -> bool:
    """Whether the server has ended the connection, and no longer holds it."""
    if one.rest:
        try:
            one.socket.send(one.rest[:1])
            one.rest = one.rest[1:]
        except BlockingIOError:
            pass
        except OSError:
            return True
    return one.port not in held
