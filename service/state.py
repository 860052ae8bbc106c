"""What the routes share."""

from dataclasses import dataclass, field

from service.access import Access
from service.journal import Journal, NoJournal
from service.keeper import Keeper
from service.limits import Budget
from service.metrics import Metrics
from service.repository import Repository
from service.settings import Settings


@dataclass
class State:
    settings: Settings
    metrics: Metrics
    repository: Repository
    keeper: Keeper
    access: Access = field(default_factory=Access)
    journal: Journal = field(default_factory=NoJournal)
    budget: Budget = field(init=False)
    load_failed: bool = False
    draining: bool = False

    def __post_init__(self) -> None:
        self.budget = Budget(self.settings.limits.max_pending_bytes)
