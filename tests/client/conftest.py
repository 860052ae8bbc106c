"""Makers of clients for tests that ask both kinds in the same words."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from helpers.client.clients import KINDS, Connect


@contextmanager
def _clients(kind: str, **defaults: Any) -> Iterator[Connect]:
    made: list[Any] = []

    def made_for(url: str, **named: Any) -> Any:  # noqa: ANN401
        made.append(KINDS[kind](url, **{**defaults, **named}))
        return made[-1]

    yield made_for
    for client in made:
        client.close()


@pytest.fixture(params=list(KINDS))
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes a client of either kind, which is closed at the end."""
    with _clients(request.param) as make:
        yield make


@pytest.fixture(params=list(KINDS))
def connect_once(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """The same, but the clients retry nothing unless told to."""
    with _clients(request.param, retries=0) as make:
        yield make
