"""Pipes that nobody reads until a test does."""

import fcntl
import os
import select


class Pipe:
    """A small pipe that nobody reads until the test does."""

    def __init__(self) -> None:
        self.out, self.into = os.pipe()
        fcntl.fcntl(self.into, fcntl.F_SETPIPE_SZ, select.PIPE_BUF)

    def is_full(self) -> bool:
        return not select.select([], [self.into], [], 0)[1]

    def read_lines(self, count: int) -> list[str]:
        text = b""
        while text.count(b"\n") < count:
            text += os.read(self.out, 65_536)
        return text.decode().splitlines()

    def close(self) -> None:
        for end in (self.out, self.into):
            os.close(end)
