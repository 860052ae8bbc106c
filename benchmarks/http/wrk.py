"""Load by wrk: requests that take turns, and what it measured, as one line of its own."""

import re
import resource
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.http.body_formats import Rows, Wire

WRK = "wrk"
# done() has exact numbers where wrk's own report rounds them.
SCRIPT = """\
local requests, turn = {}, 0

function init(args)
  for number = 1, %(count)d do
    local file = assert(io.open("%(folder)s/" .. number, "rb"))
    requests[number] = wrk.format("POST", "%(path)s", {%(headers)s}, file:read("*a"))
    file:close()
  end
end

function request()
  turn = turn %% %(count)d + 1
  return requests[turn]
end

function done(summary, latency, all)
  local errors = summary.errors
  print(string.format(
    "measured requests=%%d seconds=%%.6f p50_us=%%d p90_us=%%d p99_us=%%d refused=%%d" ..
    " connect=%%d read=%%d write=%%d timeout=%%d",
    summary.requests, summary.duration / 1e6, latency:percentile(50), latency:percentile(90),
    latency:percentile(99), errors.status, errors.connect, errors.read, errors.write,
    errors.timeout))
end
"""
COUNTS = ("requests", "refused", "connect", "read", "write", "timeout")


class LoadFailed(Exception):
    """wrk did not measure."""


@dataclass(frozen=True)
class Load:
    requests: int
    seconds: float
    p50_us: float
    p90_us: float
    p99_us: float
    errors: dict[str, int]  # by kind, only those that happened

    @property
    def requests_per_second(self) -> float:
        return self.requests / self.seconds


def write_script(folder: Path, port: int, wire: Wire, bodies: Sequence[Rows]) -> Path:
    """A wrk script that sends these rows in turn, so that no server answers one row for ever."""
    folder.mkdir(parents=True)
    for number, hidden in enumerate(bodies, 1):
        (folder / str(number)).write_bytes(wire.encode(hidden))
    headers = {"Host": f"127.0.0.1:{port}"} | wire.headers(bodies[0])
    script = folder / "load.lua"
    script.write_text(
        SCRIPT
        % {
            "count": len(bodies),
            "folder": folder,
            "path": wire.path,
            "headers": ", ".join(f'["{name}"] = "{value}"' for name, value in headers.items()),
        }
    )
    return script


def load(script: Path, port: int, concurrency: int, seconds: int) -> tuple[Load, float]:
    """What wrk measured, and the CPU seconds that it took itself."""
    command = [WRK, "-t1", f"-c{concurrency}", f"-d{seconds}s", "--latency", "-s", str(script)]
    before = _children_seconds()
    done = subprocess.run(  # noqa: S603
        [*command, f"http://127.0.0.1:{port}"], capture_output=True, text=True, check=False
    )
    return parse(done.stdout + done.stderr), _children_seconds() - before


def parse(output: str) -> Load:
    line = re.search(r"^measured (.*)$", output, re.MULTILINE)
    if line is None:
        raise LoadFailed(f"wrk measured nothing: {output.strip()[-300:]}")
    fields = dict(part.split("=") for part in line[1].split())
    counts = {name: int(fields[name]) for name in COUNTS}
    requests = counts.pop("requests")
    return Load(
        requests=requests,
        seconds=float(fields["seconds"]),
        p50_us=float(fields["p50_us"]),
        p90_us=float(fields["p90_us"]),
        p99_us=float(fields["p99_us"]),
        errors={name: count for name, count in counts.items() if count},
    )


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
