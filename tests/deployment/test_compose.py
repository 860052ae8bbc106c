"""The files that put several replicas behind a proxy: deploy/compose."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from helpers.commands import TOOLS, run
from helpers.deployment.haproxy import CONFIG, needs_haproxy
from helpers.paths import ROOT
from ruamel.yaml import YAML

from service.server import supervisor
from service.settings import Settings

Json = dict[str, Any]


def read_yaml(path: Path) -> Json:
    """With Compose's tags; each stands here for the value that it says shall replace others."""
    reader = YAML(typ="safe", pure=True)
    reader.constructor.add_constructor("!reset", lambda *_: None)
    loaded: Json = reader.load(path)
    return loaded


BASE = read_yaml(ROOT / "docker-compose.yml")
OVERRIDE = read_yaml(ROOT / "deploy" / "compose" / "replicas.yml")
PROXY = OVERRIDE["services"]["proxy"]
PROXY_CONFIG = CONFIG.read_text()


def seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(ms|s|m)", text).groups()  # type: ignore[union-attr]
    return int(number) * {"ms": 0.001, "s": 1.0, "m": 60.0}[unit]


def of_proxy(pattern: str) -> float:
    (found,) = re.findall(pattern + r" (\w+)", PROXY_CONFIG)
    return seconds(found)


def test_with_the_override_only_the_proxy_is_published_and_where_the_service_was(
    tmp_path: Path,
) -> None:
    assert OVERRIDE["services"]["service"].pop("ports", "kept") is None
    published = BASE["services"]["service"]["ports"]
    assert PROXY["ports"] == published
    (port,) = {port.rsplit(":", 1)[1] for port in published}
    assert f"bind :{port}\n" in PROXY_CONFIG
    (tmp_path / "override.json").write_text(json.dumps(OVERRIDE))
    tool = TOOLS / "check-jsonschema"
    run(tool, "--builtin-schema", "vendor.compose-spec", "override.json", cwd=tmp_path)


def test_the_proxy_is_confined_as_the_others_are() -> None:
    other = BASE["services"]["prometheus"]
    for name in "read_only", "cap_drop", "security_opt", "restart", "logging":
        assert PROXY[name] == other[name], name
    assert set(PROXY["deploy"]["resources"]["limits"]) == {"cpus", "memory", "pids"}
    assert re.search(r":-haproxy:\d+\.\d+\.\d+-alpine\}$", PROXY["image"]), "wget is alpine's"
    assert PROXY["healthcheck"]["test"][0] == "CMD"
    assert "bind :8405\n" in PROXY_CONFIG and ":8405/" in PROXY["healthcheck"]["test"][-1]
    (mounted,) = PROXY["volumes"]
    source, target, mode = mounted.split(":")
    assert (ROOT / source).samefile(CONFIG) and mode == "ro"
    assert target == "/usr/local/etc/haproxy/haproxy.cfg", "where the image looks"


def test_times_fit_each_other() -> None:
    settings = Settings()
    limits = settings.limits
    for name in "client", "server":
        longest = max(limits.request_seconds, limits.body_seconds, limits.read_seconds)
        assert of_proxy(f"timeout {name}") > longest
    noticed = of_proxy("check inter") + of_proxy("fastinter")  # two failed checks
    assert noticed < settings.drain_seconds
    assert limits.request_seconds < of_proxy("hard-stop-after")
    assert of_proxy("hard-stop-after") < seconds(PROXY["stop_grace_period"])
    grace = seconds(BASE["services"]["service"]["stop_grace_period"])
    assert grace > settings.drain_seconds + settings.stop_seconds + supervisor.LATE_SECONDS


@needs_haproxy
def test_haproxy_has_nothing_to_say_against_the_configuration() -> None:
    done = subprocess.run(["haproxy", "-c", "-f", CONFIG], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout + done.stderr
