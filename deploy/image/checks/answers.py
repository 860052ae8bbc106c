"""Run beside the image: what a client sees of the server at this address, with these samples."""

import json
import re
import sys
import urllib.request
from pathlib import Path
from urllib.parse import urljoin

url, samples = sys.argv[1], Path(sys.argv[2])
ask = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def get(path: str) -> bytes:
    with ask(urljoin(url, path)) as answer:
        body: bytes = answer.read()
    if not body and "probe" not in path:
        sys.exit(f"{path} is empty")
    return body


for probe in "/livez", "/startupz", "/readyz":
    get(probe)
if b"dss_flops_speedup_ratio" not in get("/metrics"):
    sys.exit("/metrics lacks the model's")
parts = []
for page in "/", "/docs":
    found = re.findall(r'(?:src|href)="([^"#]+)"', get(page).decode())
    if len(found) < 3:
        sys.exit(f"{page} has no parts")
    parts += found
for part in [*parts, "openapi.json"]:
    get("/" + part)
headers = {"content-type": "application/x-npy", "accept": "application/json"}
with ask(urllib.request.Request(url + "/topk?k=1", samples.read_bytes(), headers)) as answered:  # noqa: S310
    classes = json.load(answered)["classes"]
first, last = classes[0], classes[-1]
if (first, last) != ([0], [9999]):  # as README has it
    sys.exit(f"/topk answered {first} ... {last}")
sys.stdout.write(f"/topk answered {len(classes)} rows, the pages have their {len(parts)} parts\n")
