"""Makes docs/images/dashboard.png: what the dashboard shows after some minutes of varied traffic.

A real service is scraped by a real Prometheus with the committed rules.

    make dashboard-picture            needs Prometheus (Debian: prometheus)
    python -m deploy.pictures.dashboard --minutes 10
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from deploy.pictures.dashboard.render import of_prometheus
from deploy.pictures.model_with_head import write_headed
from deploy.pictures.traffic import Phase, Rows, bad_requests, driven, requests
from service.bench.server import HOST, ServerProcess, free_port, running, serving

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "models" / "demo"
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
PICTURE = ROOT / "docs" / "images" / "dashboard.png"
SCRAPE_SECONDS = 1.0
SERVICE_SETTINGS = {"DSS_SHADOW__RATE": "0.1", "DSS_REPOSITORY__POLL_SECONDS": "0.5"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0, help="of traffic")
    parser.add_argument("--out", type=Path, default=PICTURE)
    given = parser.parse_args()
    if shutil.which("prometheus") is None:
        sys.exit("Prometheus is not installed (Debian: prometheus).")
    seconds = 60 * given.minutes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = folder / "models"
        rows = Rows(DEMO / "1")
        write_headed(DEMO / "1", models / "demo" / "1", rows)
        point(models, {"stable": 1})
        log = folder / "service.log"
        with (
            serving(models, log, env=SERVICE_SETTINGS) as service,
            scraping(service.port, folder) as prometheus,
        ):
            began = time.time()
            driven(service.port, seconds, phases(models, rows))
            picture = of_prometheus(
                f"http://127.0.0.1:{prometheus}",
                model="demo",
                seconds=time.time() - began,
                scrape_seconds=SCRAPE_SECONDS,
            )
    given.out.write_bytes(picture)
    print(f"{given.out}: {len(picture):,} bytes")  # noqa: T201


def phases(models: Path, rows: Rows) -> Sequence[Phase]:
    """A day in a few minutes: usual load, more, too much, mistakes, other inputs, a new version."""
    experts = np.arange(rows.n_experts)
    few = experts[::17]
    usual = requests(rows, experts, sizes=(1, 2, 4, 8, 16, 32))
    heavy = requests(rows, experts, sizes=(64, 128, 256))
    huge = requests(rows, experts, sizes=(2048, 4096), number=16)
    shifted = requests(rows, few, sizes=(64, 128, 256), noise=3.0)
    mistaken = [*usual, *40 * bad_requests(rows)]
    return (
        Phase("usual load", 0.26, usual, per_second=150),
        Phase("more load", 0.1, heavy, per_second=150),
        Phase("too much", 0.06, huge, per_second=2000),
        Phase("usual load", 0.08, usual, per_second=150),
        Phase("mistakes", 0.1, mistaken, per_second=150),
        Phase("other inputs", 0.26, shifted, per_second=150),
        Phase(
            "a new version", 0.14, usual, per_second=150, begins=lambda: bring_version(models, 2)
        ),
    )


def bring_version(models: Path, version: int) -> None:
    """The same bundle under the next number: what is shown is the switch."""
    shutil.copytree(models / "demo" / "1", models / "demo" / "copied")
    (models / "demo" / "copied").rename(models / "demo" / str(version))
    point(models, {"stable": version, "previous": 1})


def point(models: Path, labels: dict[str, int]) -> None:
    written = models / "demo" / "labels.new"
    written.write_text(json.dumps(labels))
    written.rename(models / "demo" / "labels.json")


@contextmanager
def scraping(target: int, folder: Path) -> Iterator[int]:
    """Prometheus with the committed rules, but at a quicker pace."""
    port = free_port()
    config = {
        "global": {
            "scrape_interval": f"{SCRAPE_SECONDS:g}s",
            "scrape_timeout": f"{SCRAPE_SECONDS:g}s",
            "evaluation_interval": f"{SCRAPE_SECONDS:g}s",
        },
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": "doubly-sparse-softmax",
                "static_configs": [{"targets": [f"127.0.0.1:{target}"]}],
                # As the service is called where it is deployed.
                "relabel_configs": [{"target_label": "instance", "replacement": "service:8000"}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    log = folder / "prometheus.log"
    with running(command, log) as process:
        ServerProcess(HOST, port, process=process, log=log).wait_for("/-/ready")
        yield port


if __name__ == "__main__":
    main()
