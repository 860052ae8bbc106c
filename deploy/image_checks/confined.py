"""Run in the image: none of the folders named can be written to, and nothing is privileged."""

import sys
from pathlib import Path

for folder in sys.argv[1:]:
    try:
        (Path(folder) / "x").write_text("")
    except OSError as error:
        reason = error.strerror
    else:
        sys.exit(f"{folder} can be written to")
status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
if int(status["CapEff"], 16) or int(status["CapBnd"], 16) or status["NoNewPrivs"] != "1":
    sys.exit("there are privileges, or ways to them")
uid = status["Uid"].split("\t")[0]
if uid == "0":
    sys.exit("this is root")
sys.stdout.write(f"{reason}, user {uid}, process {status['Pid']}, no capabilities\n")
