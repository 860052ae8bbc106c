"""TLS as a client sees it: only TLS, client certificates, a new certificate without a restart."""

import signal
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import trustme
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from helpers.server import Running, running, wait_until
from helpers.tiny_bundle import rows_for

from service import healthcheck, settings
from service.cli.main import cli
from service.http.auth import tls
from service.http.auth.tls import HANDSHAKE_SECONDS

HOST = "127.0.0.1"
PASSWORD = "a password that nobody may see"  # noqa: S105
ROWS = {"inputs": rows_for(0).tolist(), "k": 1}


class Authority:
    """A CA of our own."""

    def __init__(self) -> None:
        self.ca = trustme.CA()

    def write(self, folder: Path, *, password: str = PASSWORD) -> int:
        """cert.pem and key.pem, new ones each time; the certificate's number."""
        issued = self.ca.issue_cert(HOST)
        key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
        encrypted = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(password.encode()),
        )
        (folder / "key.pem").write_bytes(encrypted)
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        (folder / "cert.pem").write_bytes(chain)
        return x509.load_pem_x509_certificate(chain).serial_number

    def write_ca(self, folder: Path) -> Path:
        path = folder / "ca.pem"
        self.ca.cert_pem.write_to_path(str(path))
        return path

    def client(self, *, shows_certificate: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.ca.configure_trust(context)
        if shows_certificate:
            self.ca.issue_cert("somebody@example.org").configure_cert(context)
        return context


def flags(folder: Path) -> tuple[str, ...]:
    return ("--tls-cert", str(folder / "cert.pem"), "--tls-key", str(folder / "key.pem"))


def number_shown(server: Running) -> int:
    """Of the certificate that a new connection is shown."""
    assert server.tls is not None
    with (
        socket.create_connection((HOST, server.port)) as plain,
        server.tls.wrap_socket(plain, server_hostname=HOST) as secure,
    ):
        shown = secure.getpeercert()
        assert shown is not None
        return int(str(shown["serialNumber"]), 16)


@dataclass(frozen=True)
class Secure:
    server: Running
    authority: Authority
    folder: Path


@pytest.fixture(scope="module")
def secure(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("secure")
    authority = Authority()
    authority.write(folder)
    with running(
        models,
        folder / "log",
        *flags(folder),
        *("--default-model", "tiny", "--log-level", "debug"),
        env={"DSS_TLS__KEY_PASSWORD": PASSWORD},
        tls=authority.client(),
    ) as server:
        yield Secure(server, authority, folder)


def connect(server: Running) -> httpx.Client:
    assert server.tls is not None
    return httpx.Client(base_url=server.url, verify=server.tls, timeout=30)


def test_requests_are_answered_over_tls(secure: Secure) -> None:
    with connect(secure.server) as http:
        for _ in range(3):  # the first is parsed, the others are known
            assert http.post("/topk", json=ROWS).status_code == 200
        assert http.get("/models").status_code == 200


def test_plain_http_is_not_answered(secure: Secure) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{HOST}:{secure.server.port}/livez")
    test_requests_are_answered_over_tls(secure)


def test_a_client_that_trusts_another_authority_turns_away(secure: Secure) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(secure.server.url + "/livez", verify=Authority().client())


def test_old_versions_of_tls_are_not_spoken(secure: Secure) -> None:
    context = tls.make_context(
        settings.TlsSettings.model_validate(
            {
                "cert": secure.folder / "cert.pem",
                "key": secure.folder / "key.pem",
                "key_password": PASSWORD,
            }
        )
    )
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_new_certificate_is_shown_without_dropping_connections(secure: Secure) -> None:
    server = secure.server
    with connect(server) as http:
        before = http.get("/livez").extensions["network_stream"].get_extra_info("client_addr")
        number = secure.authority.write(secure.folder)
        wait_until(lambda: number_shown(server) == number)
        answer = http.get("/livez")
        assert answer.status_code == 200
        assert answer.extensions["network_stream"].get_extra_info("client_addr") == before


def test_a_wrong_certificate_leaves_the_one_before(secure: Secure) -> None:
    server = secure.server

    def failed() -> bool:
        return "dss_tls_reload_failed 1.0" in http.get("/metrics").text

    number = secure.authority.write(secure.folder)
    wait_until(lambda: number_shown(server) == number)
    with connect(server) as http:
        # Of another pair: each file is good, but they do not fit.
        other = secure.folder / "other"
        other.mkdir()
        secure.authority.write(other)
        (other / "cert.pem").rename(secure.folder / "cert.pem")
        wait_until(failed)
        assert number_shown(server) == number
        mended = secure.authority.write(secure.folder)
        wait_until(lambda: not failed())
        assert number_shown(server) == mended
    assert "The certificate of before stays." in server.log.read_text()


def test_sighup_reads_the_certificate_again(secure: Secure) -> None:
    def times_read() -> int:
        return secure.server.log.read_text().count("was read again")

    before = times_read()
    secure.server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: times_read() == before + 1)


def test_the_probe_of_the_container_asks_over_tls(secure: Secure) -> None:
    assert probed(secure.server)
    assert not healthcheck.ready({"DSS_PORT": str(secure.server.port)})


def probed(server: Running, **env: str) -> bool:
    folder = server.log.parent
    files = {"DSS_TLS__CERT": str(folder / "cert.pem"), "DSS_TLS__KEY": str(folder / "key.pem")}
    return healthcheck.ready({"DSS_PORT": str(server.port), **files, **env})


def test_the_password_is_nowhere_to_be_seen(secure: Secure) -> None:
    with connect(secure.server) as http:
        shown = http.get("/metrics").text + http.get("/models").text
    shown += secure.server.log.read_text()
    shown += Path(f"/proc/{secure.server.process.pid}/cmdline").read_text()
    assert PASSWORD not in shown


def test_workers_ask_for_client_certificates(models: Path, tmp_path: Path) -> None:
    authority = Authority()
    authority.write(tmp_path)
    password = tmp_path / "password"
    password.write_text(PASSWORD + "\n")
    with running(
        models,
        tmp_path / "log",
        *flags(tmp_path),
        *("--tls-ca", str(authority.write_ca(tmp_path)), "--workers", "2"),
        *("--default-model", "tiny", "--drain-seconds", "0"),
        env={"DSS_TLS__KEY_PASSWORD_FILE": str(password)},
        tls=authority.client(shows_certificate=True),
    ) as server:
        # Someone who connects and says nothing holds up nobody.
        with socket.create_connection((HOST, server.port)):
            for _ in range(4):
                with connect(server) as http:
                    assert http.post("/topk", json=ROWS).status_code == 200
        assert probed(server, DSS_TLS__KEY_PASSWORD_FILE=str(password), DSS_TLS__CA="given")
        assert not probed(server)
        strangers = Authority().client(shows_certificate=True)
        authority.ca.configure_trust(strangers)
        for refused in (authority.client(), strangers):
            for _ in range(2):
                with pytest.raises(httpx.TransportError):
                    httpx.get(server.url + "/livez", verify=refused)
        number = authority.write(tmp_path)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: {number_shown(server) for _ in range(4)} == {number})
        with socket.create_connection((HOST, server.port)):
            number_shown(server)  # connections are accepted in their order, so that one has been
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(HANDSHAKE_SECONDS - 2) == 0
    assert "Traceback" not in server.log.read_text()
    assert PASSWORD not in server.log.read_text()


def test_a_password_of_the_environment_reaches_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are told the settings as JSON, where secrets are hidden unless asked for."""
    monkeypatch.setenv("DSS_TLS__KEY_PASSWORD", PASSWORD)
    given = {"tls": {"cert": tmp_path / "cert.pem", "key": tmp_path / "key.pem"}}
    loaded = settings.load(given)
    assert PASSWORD not in f"{loaded!r}{loaded.model_dump()}{loaded.model_dump_json()}"
    told = loaded.model_dump(mode="json", context=settings.WITH_SECRETS)
    assert settings.load(told).tls == loaded.tls


@pytest.mark.parametrize(
    ("env", "change", "sentence"),
    [
        ({"DSS_TLS__KEY_PASSWORD": PASSWORD}, "cert.pem", "cannot be used"),
        ({"DSS_TLS__KEY_PASSWORD": PASSWORD}, "key.pem", "cannot be used"),
        ({"DSS_TLS__KEY_PASSWORD": "wrong"}, None, "cannot be used"),
        ({}, None, "cannot be used"),
        ({"DSS_TLS__KEY_PASSWORD_FILE": "/nowhere"}, None, "The password file /nowhere"),
        ({"DSS_TLS__KEY_PASSWORD": PASSWORD, "DSS_TLS__CA": "/nowhere"}, None, "The CA file"),
    ],
)
def test_a_server_does_not_start_with_a_wrong_certificate(
    tmp_path: Path, env: dict[str, str], change: str | None, sentence: str
) -> None:
    Authority().write(tmp_path)
    if change is not None:
        (tmp_path / change).write_text("-----BEGIN NONSENSE-----\n")
    started = CliRunner().invoke(cli, ["serve", *flags(tmp_path)], env=env)
    assert started.exit_code == 1
    assert sentence in started.output
    assert started.output.count("\n") == 1
    assert PASSWORD not in started.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tls-cert", "a"], "tls.cert and tls.key need each other"),
        (["--tls-key", "a"], "tls.cert and tls.key need each other"),
        (["--tls-ca", "a"], "tls.cert and tls.key are missing"),
    ],
)
def test_flags_that_do_not_fit_together_are_refused(arguments: list[str], sentence: str) -> None:
    started = CliRunner().invoke(cli, ["serve", *arguments])
    assert started.exit_code == 1
    assert sentence in started.output
