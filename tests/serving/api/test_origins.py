"""Requests that a page has a browser send: for another host, or from another origin."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from helpers.raw_http import Connection, request
from helpers.serving.connection_ways import WAYS, Served, Way, served

from service.http.auth import origins
from service.settings import AccessSettings, CorsSettings

HOSTS = ("models.example", "*.svc.local", "127.0.0.1", "[::1]")
ALLOWED = "https://allowed.example"


@pytest.mark.parametrize(
    "host", ["models.example", "MODELS.example:8000", "a.svc.local", "127.0.0.1:1", "[::1]:80"]
)
def test_a_listed_host(host: str) -> None:
    assert origins.is_for([(b"host", host.encode())], HOSTS)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "models.example.evil.example",
        "svc.local",
        "xsvc.local",
        "[::2]",
        "[",
        ":",
    ],
)
def test_another_host(host: str) -> None:
    assert not origins.is_for([(b"host", host.encode())], HOSTS)


def test_no_host_and_two_hosts() -> None:
    assert not origins.is_for([], HOSTS)
    assert not origins.is_for([(b"host", b"models.example")] * 2, HOSTS)


@pytest.mark.parametrize("way", WAYS[:2], ids=["cache", "none"])
def test_a_request_for_another_host_is_421_however_often(tmp_path: Path, way: Way) -> None:
    wrong = request(1).replace(b"Host: x", b"Host: evil.example")
    right = request(1).replace(b"Host: x", b"Host: models.example")
    with served(tmp_path, way, hosts=HOSTS) as server, Connection(server.port) as connection:
        for _ in range(3):
            connection.send(wrong)
            status, headers, _ = connection.answer()
            assert (status, headers["content-type"]) == (421, "application/problem+json")
            connection.send(right)
            assert connection.classes() == [[1]]
        for path, status in (("/models", 421), ("/livez", 200)):  # probes name a pod's address
            connection.send(f"GET {path} HTTP/1.1\r\nHost: evil.example\r\n\r\n".encode())
            assert connection.answer()[0] == status
        denied = server.app.state.service.metrics.registry.get_sample_value(
            "dss_denied_requests_total", {"reason": "host"}
        )
        assert denied == 4


# --- pages that would change the server ------------------------------------------------------


@pytest.fixture(scope="module")
def open_to_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(
        tmp_path_factory.mktemp("open"),
        WAYS[0],
        access=AccessSettings(open_admin=True),
        cors=CorsSettings(origins=(ALLOWED,)),
    ) as server:
        yield server


@pytest.fixture
def client(open_to_all: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{open_to_all.port}", timeout=30) as made:
        yield made


CHANGES = [
    ("POST", "/v2/repository/models/tiny/load"),
    ("POST", "/v2/logging"),
    ("DELETE", "/models/tiny/labels/stable"),
    ("PUT", "/models/tiny/labels/stable"),
]


@pytest.mark.parametrize(
    "said",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "https://127.0.0.1", "Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
    ids=str,
)
def test_a_page_of_another_origin_changes_nothing(
    client: httpx.Client, said: dict[str, str]
) -> None:
    for method, path in CHANGES:
        refused = client.request(method, path, headers=said)
        assert refused.status_code == 403, path
    assert "cors.origins" in client.post("/v2/logging", headers=said).json()["error"]
    assert client.get("/models", headers=said).status_code == 200


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"Origin": ALLOWED, "Sec-Fetch-Site": "cross-site"},
        {"Origin": "https://behind.a.proxy", "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
    ],
    ids=str,
)
def test_others_do(client: httpx.Client, said: dict[str, str]) -> None:
    changed = client.post("/v2/logging", json={"log_verbose_level": 0}, headers=said)
    assert changed.status_code == 200
    own = {"Origin": str(client.base_url).rstrip("/")}
    assert client.post("/v2/repository/models/tiny/load", headers=own).status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_what_a_form_can_send_is_415(client: httpx.Client, kind: str) -> None:
    page = {"Referer": str(client.base_url), "Content-Type": kind}
    assert client.post("/v2/logging", content="{}", headers=page).status_code == 415


def test_json_is_known_by_its_type_whatever_follows(client: httpx.Client) -> None:
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        sent = client.post("/v2/logging", content="{}", headers={"Content-Type": kind})
        assert sent.status_code == 200
    for headers in ({}, {"Content-Type": "text/plain; charset=utf-8"}):  # as tritonclient does
        assert client.post("/v2/logging", content="{}", headers=headers).status_code == 200
