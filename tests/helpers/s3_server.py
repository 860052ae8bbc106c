"""An S3 server of files on this machine: rclone's own."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from helpers.manifests import tool
from helpers.server import free_port, wait_until

# It opens a server of a test and nothing else.
KEYS = {"AWS_ACCESS_KEY_ID": "access", "AWS_SECRET_ACCESS_KEY": "secret"}


@contextmanager
def s3(buckets: Path, log: Path) -> Iterator[str]:
    """Its address; each folder of `buckets` is one."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [tool("rclone"), "serve", "s3", "--config", "/notfound", "--auth-key"]
    command += [",".join(KEYS.values()), "--addr", f"127.0.0.1:{port}", str(buckets)]
    with log.open("wb") as stream:
        server = subprocess.Popen(command, stdout=stream, stderr=stream)

    def answers() -> bool:
        assert server.poll() is None, log.read_text()
        with suppress(httpx.TransportError):
            return httpx.get(address).status_code == 400  # because it is not signed
        return False

    try:
        wait_until(answers)
        yield address
    finally:
        server.kill()
        server.wait()
