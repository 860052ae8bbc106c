"""Every server of the comparison: how it is started, what it serves, and with which settings."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.http.models import Models
from service.bench.server import free_port

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "benchmarks" / "peers"
ENVIRONMENTS = ROOT / ".venv-peers"
INSTALLED = ".requirements"  # what an environment was made from
WORKERS_MISSING = "dss serve has no --workers here"


class NotServing(Exception):
    """A server that cannot be installed, does not start or answers wrongly; the text says why."""


@dataclass(frozen=True)
class Place:
    """Where one server runs."""

    python: Path
    port: int
    folder: Path  # its own, empty
    models: Models

    @property
    def bin(self) -> Path:
        return self.python.parent


@dataclass(frozen=True)
class Server:
    name: str
    model: str  # sparse or full
    wires: tuple[str, ...]
    command: Callable[[Place], Sequence[str | Path]]
    settings: str
    peer: str | None = None  # whose environment; None: the one this runs in
    environment: Mapping[str, str] = field(default_factory=dict)

    def line(self, wire: str) -> str:
        """What a measurement is called: the wire is named where there are several."""
        return self.name if wire == self.wires[0] else f"{self.name} {wire}"


# --- commands --------------------------------------------------------------------------------


def _ours(*flags: str) -> Callable[[Place], Sequence[str | Path]]:
    def command(place: Place) -> Sequence[str | Path]:
        serve: list[str | Path] = [place.python, "-m", "service.cli", "serve"]
        if "--workers" in flags and "--workers" not in _output([*serve, "--help"]):
            raise NotServing(WORKERS_MISSING)
        options = ["--models", str(place.models.folder), "--port", str(place.port)]
        return [*serve, *options, "--drain-seconds", "0", *flags]

    return command


def _uvicorn(app: str, workers: int = 1) -> Callable[[Place], Sequence[str | Path]]:
    def command(place: Place) -> Sequence[str | Path]:
        options = ["--loop", "uvloop", "--http", "httptools", "--ws", "none", "--lifespan", "off"]
        options += ["--no-access-log", "--log-level", "warning", "--workers", str(workers)]
        return [place.python, "-m", "uvicorn", app, "--port", str(place.port), *options]

    return command


def _module(name: str, *arguments: str) -> Callable[[Place], Sequence[str | Path]]:
    """python -m name, with {port} and {folder} filled in."""

    def command(place: Place) -> Sequence[str | Path]:
        filled = [part.format(port=place.port, folder=place.folder) for part in arguments]
        return [place.python, "-m", name, *filled]

    return command


def _bentoml(place: Place) -> Sequence[str | Path]:
    app = "benchmarks.peers.bentoml.serve:TopK"
    return [place.bin / "bentoml", "serve", app, "--port", str(place.port), "--host", "127.0.0.1"]


def _mlserver(**batching: float) -> Callable[[Place], Sequence[str | Path]]:
    def command(place: Place) -> Sequence[str | Path]:
        settings = {
            "host": "127.0.0.1",
            "http_port": place.port,
            "grpc_port": free_port(),
            "metrics_port": free_port(),
            "metrics_endpoint": None,
            "parallel_workers": 0,
            "debug": False,
            "gzip_enabled": False,
        }
        model = {"name": "topk", "implementation": "benchmarks.peers.mlserver.serve.TopK"}
        (place.folder / "settings.json").write_text(json.dumps(settings))
        (place.folder / "model-settings.json").write_text(json.dumps(model | batching))
        return [place.bin / "mlserver", "start", place.folder]

    return command


def _output(command: Sequence[str | Path]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout + done.stderr


# --- the list --------------------------------------------------------------------------------

FLOOR = "benchmarks.peers.floor:app"
BATCHING = "benchmarks.peers.floor_batching:app"
MOSEC = _module("benchmarks.peers.mosec.serve", "--address", "127.0.0.1", "--port", "{port}")
TRITON = _module("benchmarks.peers.triton.serve", "{port}", "{folder}")
LITSERVE = _module("benchmarks.peers.litserve.serve", "{port}")
RAY = _module("benchmarks.peers.ray.serve", "{port}")

UVICORN = "uvicorn with uvloop and httptools, no access log"
NATURAL = f"{UVICORN}; requests that come while the model computes are joined, up to 64 rows"
MOSEC_BATCHING = "1 worker, up to 64 requests gathered, 1 ms of waiting, its least"
TRITON_BATCHING = "Python backend, 1 instance, dynamic batching up to 256 rows, no delay"
MLSERVER = "model in the server's process, no metrics, no compression"

SERVERS = (
    Server("ours", "sparse", ("npy", "json"), _ours(), "dss serve, 1 worker"),
    Server(
        "ours, 2 workers",
        "sparse",
        ("npy", "json"),
        _ours("--workers", "2"),
        "dss serve --workers 2",
    ),
    Server("floor", "sparse", ("raw",), _uvicorn(FLOOR), f"{UVICORN}; no batching, no checks"),
    Server("floor, full", "full", ("raw",), _uvicorn(FLOOR), f"{UVICORN}; no batching, no checks"),
    Server("floor, full, batching", "full", ("raw",), _uvicorn(BATCHING), NATURAL),
    Server(
        "floor, full, batching, 2 workers",
        "full",
        ("raw",),
        _uvicorn(BATCHING, workers=2),
        f"{NATURAL}; 2 workers",
    ),
    Server("naive FastAPI", "sparse", ("json",), _uvicorn("benchmarks.peers.naive:app"), UVICORN),
    Server("mosec", "sparse", ("raw",), MOSEC, MOSEC_BATCHING, "mosec"),
    Server(
        "mosec, no batching",
        "sparse",
        ("raw",),
        MOSEC,
        "1 worker, no batching",
        "mosec",
        {"HTTP_BENCH_BATCH": "1"},
    ),
    Server("mosec, full", "full", ("raw",), MOSEC, MOSEC_BATCHING, "mosec"),
    Server("Triton", "sparse", ("v2 binary",), TRITON, TRITON_BATCHING, "triton"),
    Server("Triton, full", "full", ("v2 binary",), TRITON, TRITON_BATCHING, "triton"),
    Server(
        "LitServe", "sparse", ("base64",), LITSERVE, "1 worker, fast_queue, no batching", "litserve"
    ),
    Server(
        "LitServe, batching",
        "sparse",
        ("base64",),
        LITSERVE,
        "1 worker, fast_queue, up to 64 requests gathered for up to 1 ms",
        "litserve",
        {"HTTP_BENCH_BATCH": "64"},
    ),
    Server(
        "MLServer",
        "sparse",
        ("v2 json", "v2 base64"),
        _mlserver(),
        f"{MLSERVER}, no batching",
        "mlserver",
    ),
    Server(
        "MLServer, batching",
        "sparse",
        ("v2 json",),
        _mlserver(max_batch_size=64, max_batch_time=0.001),
        f"{MLSERVER}, up to 64 requests gathered for up to 1 ms",
        "mlserver",
    ),
    Server(
        "BentoML",
        "sparse",
        ("base64",),
        _bentoml,
        "1 worker, asynchronous method, no batching, no access log, no metrics",
        "bentoml",
        {"DO_NOT_TRACK": "1"},
    ),
    Server(
        "Ray Serve",
        "sparse",
        ("raw",),
        RAY,
        "1 replica, no batching, no access log",
        "ray",
        {"RAY_USAGE_STATS_ENABLED": "0"},
    ),
)

# The two that `--head-cache` compares.
HEAD_CACHE = Server("this service", "sparse", ("npy",), _ours(), "dss serve, 1 worker")
HEAD_CACHE_OFF = replace(
    HEAD_CACHE,
    name="this service, head cache off",
    settings="dss serve, 1 worker, DSS_HEAD_CACHE=false",
    environment={"DSS_HEAD_CACHE": "false"},
)


# --- environments ----------------------------------------------------------------------------


def python_of(server: Server) -> Path:
    """The interpreter of a server's environment, which is made if it is missing or out of date."""
    if server.peer is None:
        return Path(sys.executable)
    environment = ENVIRONMENTS / server.peer
    python = environment / "bin" / "python"
    files = [PEERS / "engine.txt", *sorted((PEERS / server.peer).glob("requirements*.txt"))]
    wanted = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    made_from = environment / INSTALLED
    if made_from.is_file() and made_from.read_text() == wanted:
        return python
    ENVIRONMENTS.mkdir(exist_ok=True)
    (ENVIRONMENTS / ".gitignore").write_text("*\n")
    _run([sys.executable, "-m", "venv", "--clear", environment], "The environment was not made")
    pip: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    for file in files[1:]:
        alone = ["--no-deps"] if file.stem.endswith("-alone") else []
        _run([*pip, *alone, "--requirement", file], f"{server.peer} was not installed")
    made_from.write_text(wanted)
    return python


def versions_of(server: Server) -> dict[str, str]:
    """Of the packages that its environment names."""
    if server.peer is None:
        return {}
    code = (
        "import json, sys; from importlib.metadata import version;"
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    names = []
    for file in (PEERS / server.peer).glob("requirements*.txt"):
        lines = (line.partition("==") for line in file.read_text().splitlines())
        names += [name.partition("[")[0] for name, pinned, _ in lines if pinned]
    python = ENVIRONMENTS / server.peer / "bin" / "python"
    found: dict[str, str] = json.loads(_output([python, "-c", code, *names]))
    return found


def _run(command: Sequence[str | Path], failure: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise NotServing(f"{failure}: {(errors or done.stderr.splitlines() or ['?'])[-1][:200]}")
