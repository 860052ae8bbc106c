"""What the routes share."""

from dataclasses import dataclass, field

from service.http.auth.access import Access
from service.http.body import ByteBudget
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
    load_failed: bool = False
    draining: bool = False

    def __post_init__(self) -> None:
        self.budget = ByteBudget(self.settings.limits.max_pending_bytes)
