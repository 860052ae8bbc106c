"""TLS: the server's certificate, and perhaps the clients'."""

import asyncio
import logging
import ssl
from collections.abc import Callable
from pathlib import Path

from service.errors import DSSError
from service.settings import TlsSettings
from service.system.file_watch import FileWatch

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0


class TlsWrong(DSSError):
    """The certificate or its key cannot be used."""


class Tls:
    """One context for the server's whole life; new handshakes use what was loaded into it last."""

    def __init__(
        self, settings: TlsSettings, reload_failed: Callable[[bool], None] = lambda _: None
    ) -> None:
        self._settings = settings
        self._reload_failed = reload_failed
        files = (settings.cert, settings.key, settings.key_password_file)
        self._files = FileWatch(path for path in files if path is not None)
        self.context = make_context(settings)

    async def refresh(self, *, now: bool = False) -> None:
        """Use a new certificate if its files have changed. Connections that exist are kept."""
        if not await asyncio.to_thread(self._files.changed) and not now:
            return
        try:
            # A pair that does not fit would spoil the live context, so it is tried elsewhere first.
            await asyncio.to_thread(make_context, self._settings)
            _load(self.context, self._settings)
        except TlsWrong as failure:
            logger.error("%s The certificate of before stays.", failure)
            self._reload_failed(True)
            return
        self._reload_failed(False)
        logger.info("The certificate %s was read again.", self._settings.cert)


def make_context(settings: TlsSettings) -> ssl.SSLContext:
    """Raises TlsWrong."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load(context, settings)
    if settings.ca is not None:
        try:
            context.load_verify_locations(settings.ca)
        except OSError as error:
            raise TlsWrong(f"The CA file {settings.ca} cannot be used: {_why(error)}.") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load(context: ssl.SSLContext, settings: TlsSettings) -> None:
    cert, key = settings.cert, settings.key
    if cert is None or key is None:
        raise TlsWrong("TLS needs a certificate and its key.")
    password = _password(settings)
    try:
        # Always a password, be it empty: without one OpenSSL would ask at the terminal.
        context.load_cert_chain(cert, key, lambda: password)
    except OSError as error:
        raise TlsWrong(
            f"The certificate {cert} with the key {key} cannot be used: {_why(error)}."
        ) from error


def _password(settings: TlsSettings) -> str:
    path: Path | None = settings.key_password_file
    if path is not None:
        try:
            return path.read_text().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise TlsWrong(f"The password file {path} cannot be read.") from error
    return settings.key_password.get_secret_value() if settings.key_password else ""


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"{(error.reason or 'not PEM, or a wrong password').replace('_', ' ').lower()}"
    return error.strerror or type(error).__name__
