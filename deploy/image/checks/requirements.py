"""What pip has to fetch for the trainer besides the service's packages: pyproject.toml."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
sys.stdout.write("\n".join(project["optional-dependencies"]["train"]) + "\n")
