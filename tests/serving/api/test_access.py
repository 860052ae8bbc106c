"""API keys and scopes as a client sees them, and what the files of keys may say."""

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute
from helpers.api_keys import ADMIN, LATER, QUERY, UNKNOWN, bearer, write_keys
from helpers.server import Running, running, wait_until
from helpers.tiny_bundle import rows_for
from pydantic import ValidationError
from starlette.routing import Route

from service.http.app import create_app
from service.http.auth import keys
from service.http.auth.access import Access, Forbidden, Unauthorized
from service.settings import AccessSettings, Settings

PROBES = {"/livez", "/readyz", "/startupz", "/v2/health/live", "/v2/health/ready"}
OPEN = {"/": 200, "/page/{file}": 404}  # the explorer page; it has no file called nothing
ASKED = {"/topk", "/infer", "/repository/index"}  # how paths end that are POSTed to but read
ROWS = {"inputs": rows_for(0).tolist(), "k": 1}


@dataclass(frozen=True)
class Keyed:
    server: Running
    http: httpx.Client
    file: Path

    def status(self, token: str, path: str = "/models") -> int:
        return self.http.get(path, headers=bearer(token)).status_code

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics", headers=bearer(ADMIN)).text.splitlines()
        found = [line for line in lines if line.partition(" ")[0] == name]
        return float(found[0].split()[1]) if found else 0.0


@pytest.fixture(scope="module")
def keyed(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("keyed")
    file = folder / "keys.toml"
    write_keys(file, query="query", admin="admin")
    arguments = ("--default-model", "tiny", "--keys-file", str(file), "--log-level", "debug")
    with (
        running(models, folder / "log", *arguments) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        yield Keyed(server, http, file)


# --- routes -----------------------------------------------------------------------------------


def all_routes() -> list[tuple[str, str]]:
    """Every method and path that the application has, documented or not."""
    found = []
    for route in create_app(Settings()).routes:
        assert isinstance(route, Route | APIRoute), f"{route} needs to be covered by this test."
        found += [(method, route.path) for method in sorted(route.methods or ())]
    return found


def needs_admin(method: str, path: str) -> bool:
    reads = method in ("GET", "HEAD", "OPTIONS") or any(path.endswith(end) for end in ASKED)
    return not reads


@pytest.mark.parametrize(("method", "path"), all_routes())
def test_every_route_but_the_probes_and_the_page_is_covered(
    keyed: Keyed, method: str, path: str
) -> None:
    place = re.sub(r"{\w+}", "nothing", path)

    def ask(headers: dict[str, str]) -> httpx.Response:
        return keyed.http.request(method, place, headers=headers)

    if path in PROBES or (method == "GET" and path in OPEN):
        assert ask({}).status_code == OPEN.get(path, 200)
        return
    for refused in (ask({}), ask(bearer(UNKNOWN))):
        assert refused.status_code == 401
        assert refused.headers["WWW-Authenticate"] == 'Bearer realm="dss"'
        if method != "HEAD":
            shown = refused.json()
            assert "API key" in (shown["error"] if path.startswith("/v2") else shown["detail"])
    assert (ask(bearer(QUERY)).status_code == 403) == needs_admin(method, path)
    assert ask(bearer(ADMIN)).status_code not in (401, 403)


def test_the_page_is_open_and_what_it_asks_for_is_not(keyed: Keyed) -> None:
    page = keyed.http.get("/")
    assert page.status_code == 200
    for part in re.findall(r'"(page/[^"]+)"', page.text):
        assert keyed.http.get(f"/{part}").status_code == 200
    for path in ("/page", "/page/", "/page/a/b", "/pages/a.js", "/models", "/docs"):
        assert keyed.http.get(path).status_code == 401
    assert keyed.http.post("/").status_code == 401
    assert keyed.http.head("/").status_code == 401


def test_a_path_that_does_not_exist_is_no_secret_only_to_those_with_a_key(keyed: Keyed) -> None:
    assert keyed.http.get("/nothing").status_code == 401
    assert keyed.status(QUERY, "/nothing") == 404
    assert keyed.http.post("/nothing", headers=bearer(QUERY)).status_code == 403
    assert keyed.http.post("/nothing", headers=bearer(ADMIN)).status_code == 404


def test_a_key_of_the_wrong_scope_is_told_so(keyed: Keyed) -> None:
    before = keyed.metric('dss_denied_requests_total{reason="scope"}')
    refused = keyed.http.post("/v2/logging", headers=bearer(QUERY))
    assert refused.status_code == 403
    assert "WWW-Authenticate" not in refused.headers
    assert refused.json() == {"error": "The key 'query' does not have the scope admin."}
    assert keyed.metric('dss_denied_requests_total{reason="scope"}') == before + 1


@pytest.mark.parametrize(
    "headers",
    [
        [("Authorization", QUERY)],
        [("Authorization", f"Basic {QUERY}")],
        [("Authorization", f"Bearer{QUERY}")],
        [("Authorization", "Bearer")],
        [("Authorization", f"Bearer {QUERY}x")],
        [("Authorization", f"Bearer {QUERY[:-1]}")],
        [("Authorization", "Bearer " + "x" * 20_000)],
        [("Authorization", b"Bearer \xff\xfe")],
        [("Authorization", f"Bearer {QUERY}"), ("Authorization", f"Bearer {QUERY}")],
        [("X-API-Key", QUERY)],
    ],
)
def test_what_is_not_a_known_bearer_is_refused(
    keyed: Keyed, headers: list[tuple[str, str | bytes]]
) -> None:
    for method, path in (("GET", "/models"), ("POST", "/topk")):
        encoded = [
            (name.encode(), value if isinstance(value, bytes) else value.encode())
            for name, value in headers
        ]
        assert keyed.http.request(method, path, headers=encoded).status_code == 401


def test_a_key_in_the_address_is_not_a_key(keyed: Keyed) -> None:
    for name in ("access_token", "key", "api_key"):
        assert keyed.http.get(f"/models?{name}={QUERY}").status_code == 401


def test_the_scheme_is_spelled_in_any_case(keyed: Keyed) -> None:
    for scheme in ("bearer", "BEARER"):
        headers = {"Authorization": f"{scheme}  {QUERY}"}
        assert keyed.http.get("/models", headers=headers).status_code == 200
        assert keyed.http.post("/topk", json=ROWS, headers=headers).status_code == 200


def test_a_refused_body_does_not_disturb_the_connection(keyed: Keyed) -> None:
    for _ in range(3):
        assert keyed.http.post("/topk", json=ROWS).status_code == 401
        assert keyed.http.post("/topk", json=ROWS, headers=bearer(QUERY)).status_code == 200


# --- without keys -----------------------------------------------------------------------------


def test_without_keys_everyone_may_ask_and_nobody_may_change_anything(http: httpx.Client) -> None:
    assert http.get("/metrics").status_code == 200
    assert http.post("/topk", json=ROWS).status_code == 200
    changing = [(m, path) for m, path in all_routes() if needs_admin(m, path)]
    for method, path in changing:
        refused = http.request(method, path)
        assert refused.status_code == 403
        assert "access.keys_file" in refused.text
    assert http.post("/nothing").status_code == 404
    assert http.put("/topk").status_code == 405


def test_open_admin_lets_everyone_change_the_server() -> None:
    closed, opened = Access(), Access(AccessSettings(open_admin=True))
    with pytest.raises(Forbidden, match="open_admin"):
        closed.check("admin", [])
    opened.check("admin", [])


@pytest.mark.parametrize(
    ("wanted", "query", "admin"),
    [("open", True, True), ("query", True, True), ("admin", False, True)],
)
def test_what_the_metrics_need_is_a_setting(wanted: str, query: bool, admin: bool) -> None:
    given = [
        {"name": "query", "key": QUERY, "scopes": ["query"]},
        {"name": "admin", "key": ADMIN, "scopes": ["admin"]},
    ]
    access = Access(AccessSettings.model_validate({"keys": given, "metrics": wanted}))

    def may(*headers: tuple[bytes, bytes]) -> bool:
        try:
            access.check("metrics", headers)
        except (Unauthorized, Forbidden):
            return False
        return True

    assert may() == (wanted == "open")
    assert may((b"authorization", f"Bearer {QUERY}".encode())) == query
    assert may((b"authorization", f"Bearer {ADMIN}".encode())) == admin


# --- other keys while the server runs ---------------------------------------------------------


def test_keys_change_under_traffic(keyed: Keyed) -> None:
    """A key that stays is never refused; one that is revoked is, on a connection it has used."""
    done = threading.Event()
    statuses: list[int] = []

    def ask() -> None:
        with httpx.Client(base_url=keyed.server.url) as http:
            while not done.is_set():
                answer = http.post("/topk", json=ROWS, headers=bearer(ADMIN))
                statuses.append(answer.status_code)

    def topk(http: httpx.Client) -> int:
        return http.post("/topk", json=ROWS, headers=bearer(LATER)).status_code

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        with httpx.Client(base_url=keyed.server.url) as http:
            assert topk(http) == 401
            write_keys(keyed.file, query="query", admin="admin", later="query")
            wait_until(lambda: topk(http) == 200)
            assert [topk(http) for _ in range(5)] == [200] * 5
            write_keys(keyed.file, query="query", admin="admin")
            wait_until(lambda: topk(http) == 401)
    finally:
        done.set()
        asking.join()
    assert set(statuses) == {200}


def test_a_wrong_file_leaves_the_keys_as_they_were(keyed: Keyed) -> None:
    keyed.file.write_text(f'[[keys]]\nname = "{LATER}\n')
    wait_until(lambda: keyed.metric("dss_keys_reload_failed") == 1)
    assert keyed.status(QUERY) == 200
    keyed.file.unlink()
    wait_until(lambda: "cannot be read" in keyed.server.log.read_text())
    assert keyed.status(QUERY) == 200
    assert keyed.metric("dss_keys_reload_failed") == 1
    write_keys(keyed.file, query="query", admin="admin")
    wait_until(lambda: keyed.metric("dss_keys_reload_failed") == 0)
    log = keyed.server.log.read_text()
    assert log.count("keeping the previous keys.") == 2
    assert LATER not in log


def test_sighup_reads_the_file_that_looks_as_before(keyed: Keyed) -> None:
    change_unseen(keyed.file)
    try:
        keyed.server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: keyed.status(LATER) == 200)
        assert keyed.status(QUERY) == 401
    finally:
        write_keys(keyed.file, query="query", admin="admin")
    wait_until(lambda: keyed.status(QUERY) == 200)


def change_unseen(file: Path) -> None:
    """LATER instead of QUERY, in a file of the same size, age and number."""
    before = file.stat()
    text = file.read_text()
    hashes = [json.loads(part.split("\n")[0]) for part in text.split("sha256 = ")[1:]]
    later = keys.entry("later", LATER, ["query"]).split('sha256 = "')[1][:64]
    file.write_text(text.replace(hashes[0], later))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_ino) == (before.st_size, before.st_ino)


def test_workers_have_the_keys_and_hear_of_changes(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    write_keys(file, query="query")
    inline = [{"name": "ops", "key": ADMIN, "scopes": ["admin"]}]
    with running(
        models,
        tmp_path / "log",
        *("--workers", "2", "--default-model", "tiny", "--keys-file", str(file)),
        env={"DSS_ACCESS__KEYS": json.dumps(inline)},
    ) as server:

        def statuses(token: str) -> set[int]:
            """Connections are dealt out in turn, so that both workers are met."""
            found = set()
            for _ in range(4):
                with httpx.Client(base_url=server.url) as http:
                    found.add(http.post("/topk", json=ROWS, headers=bearer(token)).status_code)
            return found

        assert statuses(QUERY) == statuses(ADMIN) == {200}
        assert statuses(LATER) == {401}
        denied = f'dss_denied_requests_total{{reason="unknown_key"}} {4.0}'
        assert denied in httpx.get(server.url + "/metrics", headers=bearer(QUERY)).text
        change_unseen(file)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: statuses(LATER) == {200} and statuses(QUERY) == {401})
        assert statuses(ADMIN) == {200}
    assert not any(token in server.log.read_text() for token in (QUERY, ADMIN, LATER))


# --- secrets ----------------------------------------------------------------------------------


def test_no_key_is_shown_by_settings_or_failures() -> None:
    given = {"name": "a", "key": QUERY, "scopes": ["query"]}
    loaded = Settings.model_validate({"access": {"keys": [given]}})
    assert QUERY not in f"{loaded!r}{loaded}{loaded.model_dump()}{loaded.model_dump_json()}"
    with pytest.raises(ValidationError) as failure:
        Settings.model_validate({"access": {"keys": [{**given, "scopes": QUERY}]}})
    assert QUERY not in str(failure.value)


def test_a_log_at_debug_level_shows_no_key(keyed: Keyed) -> None:
    for token in (QUERY, ADMIN, UNKNOWN):
        for method, path in (("POST", "/topk"), ("GET", "/models"), ("POST", "/v2/logging")):
            keyed.http.request(method, path, headers=bearer(token), content=b"{")
        keyed.http.post("/topk", json=ROWS, headers=bearer(token))
    shown = keyed.server.log.read_text()
    shown += "".join(
        keyed.http.get(path, headers=bearer(ADMIN)).text
        for path in ("/metrics", "/models", "/openapi.json", "/v2")
    )
    command = Path(f"/proc/{keyed.server.process.pid}/cmdline").read_text()
    for token in (QUERY, ADMIN, UNKNOWN):
        assert token not in shown + command
    assert "uthorization" not in keyed.server.log.read_text()
