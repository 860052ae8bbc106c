"""Which URLs a client takes."""

from typing import Any

import pytest
from helpers.client.clients import Connect
from helpers.client.scripted_server import answer, scripted, top_k

from service.client import Client, NotTrusted, WrongAddress, address

ROW = [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://localhost:8000", ("localhost", 8000, "localhost:8000", "", False)),
        ("http://localhost", ("localhost", 80, "localhost", "", False)),
        ("https://example.org/", ("example.org", 443, "example.org", "", True)),
        ("https://example.org/dss/", ("example.org", 443, "example.org", "/dss", True)),
        ("http://[::1]:9000/a%20b", ("::1", 9000, "[::1]:9000", "/a%20b", False)),
        ("http://büro.de", ("xn--bro-hoa.de", 80, "xn--bro-hoa.de", "", False)),
    ],
)  # fmt: skip
def test_addresses(url: str, found: tuple[Any, ...]) -> None:
    assert tuple(address.parse(url)) == found


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "",
        "http://",
        "ftp://host",
        "http://host:0",
        "http://host:99999",
        "http://host:port",
        "http://user:password@host",
        "http://host?x=1",
        "http://[::1",
        "http://host/a b",
    ],
)
def test_what_is_no_address_is_called_so(url: str) -> None:
    with pytest.raises(WrongAddress):
        Client(url)


def test_a_path_before_all_paths_is_kept(connect_once: Connect) -> None:
    with scripted(top_k(), answer(200, b'{"models": []}')) as server:
        client = connect_once(f"{server.url}/behind/")
        client.topk(ROW, k=2)
        client.models()
    assert [head.split()[1] for head, _ in server.requests] == [
        "/behind/topk?k=2",
        "/behind/models",
    ]


def test_an_authority_that_cannot_be_read_is_called_so(tmp_path: Any) -> None:  # noqa: ANN401
    for verify in (tmp_path / "nothing", str(tmp_path / "nothing")):
        with pytest.raises(NotTrusted, match="cannot be read"):
            Client("https://localhost", verify=verify)
