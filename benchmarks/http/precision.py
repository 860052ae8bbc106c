"""How often served models name the full softmax's first class, as `benchmarks.engines` found."""

import json
import shlex
from pathlib import Path
from typing import Any

ENGINES = Path("benchmarks/results/engines.json")


def with_precision(results: dict[str, Any], engines: Path = ENGINES) -> dict[str, Any]:
    """The results with `precision_at_1` of both models, if the bundle was measured there."""
    found = _of_bundle(results["command"], engines)
    if found is None:
        return results
    model = results["model"] | {"precision_at_1": {"sparse": found, "full": 1.0}}
    return results | {"model": model}


def _of_bundle(command: str, engines: Path) -> float | None:
    words = shlex.split(command)
    if "--bundle" not in words or not engines.exists():
        return None
    name = Path(words[words.index("--bundle") + 1]).parent.name
    for run in json.loads(engines.read_text()).values():
        for point in run["contestants"]:
            if point.get("bundle") == name and point["dial"] == {"experts": 1}:
                return float(point["precision"]["1"])
    return None
