"""Run in the image: its bill of materials (the argument) lists every package that is there."""

import json
import sys
from importlib.metadata import distributions
from pathlib import Path

PROJECT = "doubly-sparse-softmax"

bill = json.loads(Path(sys.argv[1]).read_text())
listed = {(part["name"].lower().replace("_", "-"), part["version"]) for part in bill["components"]}
found = {
    (distribution.name.lower().replace("_", "-"), distribution.version)
    for distribution in distributions(path=[path for path in sys.path if "site-packages" in path])
    if distribution.name != PROJECT
}
if listed != found or not found:
    differing = ", ".join(f"{name} {version}" for name, version in sorted(listed ^ found))
    sys.exit(f"the bill of materials and the packages differ in {differing}")
sys.stdout.write(f"{len(listed)} packages\n")
