"""The Python client: `Client`, and `AsyncClient` for asyncio.

Imports nothing of the server but errors and the .npy format. `core.py` has the logic of both
clients, without I/O; `client.py` and `async_client.py` carry out its steps.
"""

from service.client.answers import Answer
from service.client.async_client import AsyncClient
from service.client.client import Client
from service.client.errors import (
    AnswerMalformed,
    AnswerTooLarge,
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
    ContractInfo,
    ExpertInfo,
    FoundVersion,
    ModelInfo,
    RefusedVersion,
    VersionInfo,
)

__all__ = [
    "Answer",
    "AnswerMalformed",
    "AnswerTooLarge",
    "AsyncClient",
    "Client",
    "ClientClosed",
    "ClientError",
    "ContractInfo",
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
