"""PyTorch uses one thread, and commands are run as a user runs them."""

from collections.abc import Callable, Iterator

import pytest
import torch
from click.testing import CliRunner, Result

from service.cli.main import cli


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def head() -> Callable[..., Result]:
    """`dss task head` with these arguments."""

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(cli, ["task", "head", *map(str, arguments)])

    return run
