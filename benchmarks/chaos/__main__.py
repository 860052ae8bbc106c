"""Abuse and faults against real servers, one scenario after the other, each with its own.

    python -m benchmarks.chaos                      everything: 20 minutes and a soak of 30
    python -m benchmarks.chaos --quick              does everything work? some minutes
    python -m benchmarks.chaos --only kill --only overload
    python -m benchmarks.chaos --tables docs/chaos.md    runs nothing, renders the JSON

Every answer is checked against the engine. With --only, the other scenarios' results stay as they
are in the file. The exit status is 1 if a criterion fails.
"""

import json
import shlex
import sys
import tempfile
import traceback
from argparse import ArgumentParser, Namespace
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.chaos import tables
from benchmarks.chaos.harness.verdict import Context, Figures, NotPossible
from benchmarks.chaos.scenarios.registry import NAMES, scenario, title
from service.system.machine import machine

RESULTS = Path("benchmarks/results/chaos.json")
PACKAGES = ("fastapi", "httptools", "numba", "numpy", "onnxruntime", "orjson", "uvicorn", "uvloop")


def main() -> None:
    options = _options()
    if options.tables:
        tables.update(options.tables, json.loads(options.out.read_text()))
        return
    results = _earlier(options)
    for name in options.only or NAMES:
        results["scenarios"][name] = run_one(name, options)
        in_order = {known: results["scenarios"].get(known) for known in NAMES}
        results["scenarios"] = {known: found for known, found in in_order.items() if found}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    _say(tables.render(results))
    chosen = [results["scenarios"][name] for name in options.only or NAMES]
    sys.exit(0 if all(found["passed"] for found in chosen) else 1)


def _options() -> Namespace:
    parser = ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="seconds a scenario")
    parser.add_argument("--only", action="append", choices=NAMES, help="[all]")
    parser.add_argument("--soak-minutes", type=float, default=30.0, help="[30]")
    parser.add_argument("--requests", type=int, default=100_000, help="of the fuzzer [100000]")
    parser.add_argument("--seed", type=int, default=1, help="of the fuzzer [1]")
    parser.add_argument("--out", type=Path, help=f"[{RESULTS}; with --quick nothing is kept]")
    parser.add_argument("--tables", type=Path, help="render --out into this document, and end")
    options = parser.parse_args()
    if options.out is None:
        options.out = Path("/dev/null") if options.quick and not options.tables else RESULTS
    return options


def _earlier(options: Namespace) -> dict[str, Any]:
    facts = {
        "command": shlex.join(["python", "-m", "benchmarks.chaos", *sys.argv[1:]]),
        "machine": machine(*PACKAGES),
        "scenarios": {},
    }
    if options.only and options.out.is_file():
        facts["scenarios"] = json.loads(options.out.read_text())["scenarios"]
    return facts


def run_one(name: str, options: Namespace) -> dict[str, Any]:
    _say(f"{name}: {title(name)}")
    begun = monotonic()

    def say(text: str) -> None:
        _say(f"  {monotonic() - begun:6.1f} s  {text}")

    reason = None
    with tempfile.TemporaryDirectory(prefix=f"chaos-{name}-") as folder:
        context = Context(
            Path(folder),
            quick=options.quick,
            requests=options.requests,
            soak_minutes=options.soak_minutes,
            seed=options.seed,
            say=say,
        )
        try:
            figures = scenario(name)(context)
        except NotPossible as error:
            figures, reason = Figures(), str(error)
        except Exception as error:  # the other scenarios shall run all the same
            traceback.print_exc()
            figures = Figures()
            figures.require(
                "the scenario ran to its end", False, f"{type(error).__name__}: {error}"
            )
            log = Path(folder) / "run" / "log"
            if log.exists():
                _say(f"  the end of the server's log:\n{log.read_text(errors='replace')[-3000:]}")
    for criterion in figures.criteria:
        say(f"{'ok  ' if criterion.passed else 'FAIL'} {criterion.words}: {criterion.found}")
    for note in figures.notes:
        say(f"note: {note}")
    if reason:
        say(f"not run: {reason}")
    return {
        "title": title(name),
        "seconds": round(monotonic() - begun, 1),
        "quick": options.quick,
        "not_run": reason,
    } | figures.as_json()


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
