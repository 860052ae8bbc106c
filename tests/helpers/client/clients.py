"""Both clients, so that a test can ask either in the same words."""

import asyncio
from collections.abc import Callable
from typing import Any

from service.client import AsyncClient, Client

Connect = Callable[..., Any]  # makes a client of one kind for a URL


class Waited:
    """The asynchronous client, each of whose calls is waited for."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self._client = AsyncClient(*given, **named)
        self._runner = asyncio.Runner()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *given, **named: self._runner.run(
            getattr(self._client, name)(*given, **named)
        )

    def run(self, ask: Callable[[AsyncClient], Any]) -> Any:  # noqa: ANN401
        """What a coroutine makes of the client."""
        return self._runner.run(ask(self._client))

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


KINDS: dict[str, Callable[..., Any]] = {"blocking": Client, "asynchronous": Waited}
