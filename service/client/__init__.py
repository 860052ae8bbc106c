"""A client of the service, for Python: `Client`, and `AsyncClient` for asyncio.

It imports nothing of the server. What both clients do is in `core.py`, as steps that wait for
nothing; `blocking.py` and `asynchronous.py` take the steps.
"""

from service.client.answers import Answer
from service.client.async_client import AsyncClient
from service.client.client import Client
from service.client.errors import (
    AnswerMalformed,
    ClientClosed,
    ClientError,
    DeadlineExceeded,
    ModelNotFound,
    NotAuthorized,
    NotTrusted,
    Overloaded,
    QueryRefused,
    ServerFailed,
    Unavailable,
    WrongAddress,
)
from service.client.model_info import (
    ExpertInfo,
    FoundVersion,
    ModelInfo,
    RefusedVersion,
    VersionInfo,
)

__all__ = [
    "Answer",
    "AnswerMalformed",
    "AsyncClient",
    "Client",
    "ClientClosed",
    "ClientError",
    "DeadlineExceeded",
    "ExpertInfo",
    "FoundVersion",
    "ModelInfo",
    "ModelNotFound",
    "NotAuthorized",
    "NotTrusted",
    "Overloaded",
    "QueryRefused",
    "RefusedVersion",
    "ServerFailed",
    "Unavailable",
    "VersionInfo",
    "WrongAddress",
]
