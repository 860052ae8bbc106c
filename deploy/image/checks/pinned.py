"""Run in the image: every package is in the version that the constraints (the argument) name."""

import sys
from importlib.metadata import distributions

pins = dict(line.split("==") for line in sys.argv[1].split())
pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
found = {
    distribution.name.lower().replace("_", "-"): distribution.version.split("+")[0]  # torch's +cpu
    for distribution in distributions(path=[path for path in sys.path if "site-packages" in path])
}
found.pop("doubly-sparse-softmax")
wrong = [f"{name} {version}" for name, version in found.items() if pins.get(name) != version]
if wrong or not found:
    sys.exit(f"not as constraints.txt has it: {', '.join(wrong)}")
sys.stdout.write(f"{len(found)} packages\n")
