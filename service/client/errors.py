"""The errors that clients raise. Each text is one sentence, with the fix if one is known."""

from dataclasses import dataclass

from service.errors import DSSError


@dataclass(frozen=True)
class Problem:
    """What a server says about a request that it refused (RFC 9457)."""

    status: int | None = None  # None: no server answered
    type: str | None = None  # such as urn:dss:problem:wrong-width
    title: str | None = None
    detail: str | None = None
    request_id: str | None = None  # the request's id in the server's log


NO_PROBLEM = Problem()


class ClientError(DSSError):
    """The base class of all of them."""

    def __init__(self, text: str, problem: Problem = NO_PROBLEM) -> None:
        super().__init__(text)
        self.status = problem.status
        self.type = problem.type
        self.title = problem.title
        self.detail = problem.detail
        self.request_id = problem.request_id
        self.tries = 0  # requests sent for this call


class QueryRefused(ClientError):
    """The query is wrong and would be refused again. If `status` is None, nothing was sent."""


class PartTooLarge(QueryRefused):
    """413: fewer rows may be accepted."""


class NotAuthorized(ClientError):
    """401 or 403: no API key, an unknown one, or one without the scope."""


class ModelNotFound(ClientError):
    """404: there is no such model, version or alias."""


class WrongAddress(ClientError):
    """The URL is malformed, or another service answers there."""


class NotTrusted(ClientError):
    """TLS failed: the certificate is not trusted, or the server speaks no TLS."""


class Overloaded(ClientError):
    """429, also after the last try."""


class Unavailable(ClientError):
    """503, 502, or no connection, also after the last try."""


class Dropped(Unavailable):
    """The connection ended before the answer did."""

    def __init__(self, text: str, *, reused: bool) -> None:
        super().__init__(text)
        self.reused = reused  # it had been idle; servers close idle connections


class DeadlineExceeded(ClientError):
    """No answer in time, by the client's clock or the server's (504, 408)."""


class ServerFailed(ClientError):
    """Any other 5xx; the server's log says why."""


class AnswerMalformed(ClientError):
    """What came is no answer of this service."""


class AnswerTooLarge(ClientError):
    """The head or the body of what came is larger than the client was told to read."""


class ClientClosed(ClientError):
    """The client was closed, or is used in another event loop."""
