"""What the routes share."""

from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from service.http.auth.access import Access
from service.http.body import ByteBudget, read_object
from service.http.pieces import PieceQueue
from service.repository.catalog import Repository
from service.repository.manager import ModelManager
from service.settings import Settings
from service.telemetry.metrics.registry import Metrics
from service.telemetry.request_events import NoRecorder, RequestRecorder


@dataclass
class AppState:
    settings: Settings
    metrics: Metrics
    repository: Repository
    manager: ModelManager
    access: Access = field(default_factory=Access)
    recorder: RequestRecorder = field(default_factory=NoRecorder)
    budget: ByteBudget = field(init=False)
    pieces: PieceQueue = field(init=False)
    load_failed: bool = False
    draining: bool = False

    async def read_object(self, request: Request, *, optional: bool = False) -> dict[str, Any]:
        """A small JSON body, within the limits."""
        return await read_object(request, self.settings.limits, self.budget, optional=optional)

    def __post_init__(self) -> None:
        self.budget = ByteBudget(self.settings.limits.max_pending_bytes)
        self.pieces = PieceQueue(self.settings.queue.max_seconds)
