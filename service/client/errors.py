"""What may go wrong for a client. Each text is one sentence, with the fix if one is known."""

from dataclasses import dataclass

from service.errors import DSSError


@dataclass(frozen=True)
class Problem:
    """What a server says of a request that it did not answer (RFC 9457)."""

    status: int | None = None  # None: no server said anything
    type: str | None = None  # such as urn:dss:problem:wrong-width
    title: str | None = None
    detail: str | None = None
    request_id: str | None = None  # by which the server's log names the request


NO_PROBLEM = Problem()


class ClientError(DSSError):
    """Every failure of a client."""

    def __init__(self, text: str, problem: Problem = NO_PROBLEM) -> None:
        super().__init__(text)
        self.status = problem.status
        self.type = problem.type
        self.title = problem.title
        self.detail = problem.detail
        self.request_id = problem.request_id
        self.tries = 0  # how often the server was asked


class QueryRefused(ClientError):
    """The query is wrong, and would be refused again. Without a status nothing was sent."""


class PartTooLarge(QueryRefused):
    """413: fewer rows may be taken."""


class NotAuthorized(ClientError):
    """401 or 403: no API key, an unknown one, or one without the scope."""


class ModelNotFound(ClientError):
    """404: there is no such model, version or label."""


class WrongAddress(ClientError):
    """The URL is none, or what is there is not this service."""


class NotTrusted(ClientError):
    """TLS failed: a certificate that is not trusted, or a side that speaks no TLS."""


class Overloaded(ClientError):
    """429, also after the last try."""


class Unavailable(ClientError):
    """503, 502, or no connection, also after the last try."""


class Dropped(Unavailable):
    """The connection ended before the answer did."""

    def __init__(self, text: str, *, reused: bool) -> None:
        super().__init__(text)
        self.reused = reused  # it had been idle, and servers close those


class DeadlineExceeded(ClientError):
    """No answer in time, by the client's clock or the server's (504, 408)."""


class ServerFailed(ClientError):
    """Any other 5xx; the server's log says why."""


class AnswerMalformed(ClientError):
    """The answer is not one of this service."""


class ClientClosed(ClientError):
    """The client was closed and is asked all the same."""
