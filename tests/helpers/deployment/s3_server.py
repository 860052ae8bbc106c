"""An S3 server of files on this machine: rclone's own."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.deployment.manifests import tool

from service.bench.server import HOST, ServerProcess, free_port, running

# It opens a server of a test and nothing else.
KEYS = {"AWS_ACCESS_KEY_ID": "access", "AWS_SECRET_ACCESS_KEY": "secret"}


@contextmanager
def s3(buckets: Path, log: Path) -> Iterator[str]:
    """Its address; each folder of `buckets` is one."""
    port = free_port()
    command = [tool("rclone"), "serve", "s3", "--config", "/notfound", "--auth-key"]
    command += [",".join(KEYS.values()), "--addr", f"{HOST}:{port}", str(buckets)]
    with running(command, log, stop_signal=signal.SIGKILL) as process:
        server = ServerProcess(HOST, port, process=process, log=log)
        server.wait_for("/", 400)  # because the request is not signed
        yield server.url
