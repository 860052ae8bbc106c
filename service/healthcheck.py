"""`python -m service.healthcheck`: ends with status 0 if the server of this container is ready.

It reads DSS_PORT and DSS_TLS__* from the environment, and imports little, since it runs every few
seconds. It connects to the loopback address, so the server's certificate is not verified.
"""

import http.client  # not urllib, which would follow a proxy set in the environment
import os
import ssl
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

PATH = "/readyz"
SECONDS = 2.0


def ready(env: Mapping[str, str]) -> bool:
    try:
        with closing(_connection(env)) as connection:
            connection.request("GET", PATH)
            return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False


def _connection(env: Mapping[str, str]) -> http.client.HTTPConnection:
    port = int(env.get("DSS_PORT", "8000"))
    if "DSS_TLS__CERT" not in env:
        return http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if "DSS_TLS__CA" in env:  # clients must present a certificate; the server's own will do
        context.load_cert_chain(env["DSS_TLS__CERT"], env["DSS_TLS__KEY"], lambda: _password(env))
    return http.client.HTTPSConnection("127.0.0.1", port, timeout=SECONDS, context=context)


def _password(env: Mapping[str, str]) -> str:
    if "DSS_TLS__KEY_PASSWORD_FILE" in env:
        return Path(env["DSS_TLS__KEY_PASSWORD_FILE"]).read_text().rstrip("\r\n")
    return env.get("DSS_TLS__KEY_PASSWORD", "")


if __name__ == "__main__":
    sys.exit(not ready(os.environ))
