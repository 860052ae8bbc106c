"""What pip has to fetch for a target of the Dockerfile: pyproject.toml, service or trainer."""

import sys
import tomllib
from pathlib import Path

path, target = sys.argv[1:]
config = tomllib.loads(Path(path).read_text())
wanted = config["build-system"]["requires"] + config["project"]["dependencies"]
if target == "trainer":
    wanted += config["project"]["optional-dependencies"]["train"]
sys.stdout.write("\n".join(wanted) + "\n")
