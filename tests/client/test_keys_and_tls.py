"""Both clients against a server that wants API keys and speaks TLS."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.client.clients import Connect
from helpers.server import Running, running
from helpers.tiny_bundle import rows_for
from serving.api.test_access import QUERY, UNKNOWN, write_keys
from serving.api.test_tls import PASSWORD, Authority, flags

from service.client import ClientError, NotAuthorized, NotTrusted

ROWS = rows_for(0, 1, 2)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def guarded(
    models: Path, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """Over TLS, and with keys."""
    folder = tmp_path_factory.mktemp("guarded")
    authority.write(folder)
    write_keys(folder / "keys.toml", query="query", admin="admin")
    with running(
        models,
        folder / "log",
        *flags(folder),
        *("--default-model", "tiny", "--keys-file", str(folder / "keys.toml")),
        env={"DSS_TLS__KEY_PASSWORD": PASSWORD},
        tls=authority.client(),
    ) as server:
        yield server


def test_keys_and_tls(
    connect: Connect, guarded: Running, authority: Authority, tmp_path: Path
) -> None:
    trusted = authority.write_ca(tmp_path)
    for verify in (trusted, str(trusted), authority.client(), False):
        client = connect(guarded.url, api_key=QUERY, verify=verify)
        for _ in range(2):
            assert client.topk(ROWS, k=2).classes.shape == (3, 2)
    open_to_all = connect(guarded.url, verify=trusted)
    assert open_to_all.ready() is True
    with pytest.raises(NotAuthorized, match="api_key=") as failure:
        open_to_all.models()
    assert failure.value.status == 401
    with pytest.raises(NotAuthorized, match="does not know"):
        connect(guarded.url, verify=trusted, api_key=UNKNOWN).topk(ROWS)
    with pytest.raises(NotTrusted, match="verify="):
        connect(guarded.url).ready()
    with pytest.raises(ClientError):
        connect(guarded.url.replace("https", "http"), retries=0).topk(ROWS)


def test_no_tls_where_none_is_spoken(connect: Connect, server: Running) -> None:
    with pytest.raises(NotTrusted, match="No TLS"):
        connect(server.url.replace("http", "https")).topk(ROWS)
