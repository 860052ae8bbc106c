"""What the routes share."""

from dataclasses import dataclass

from service.metrics import Metrics
from service.repository import Repository
from service.settings import Settings


@dataclass
class State:
    settings: Settings
    metrics: Metrics
    repository: Repository
    load_failed: bool = False
    draining: bool = False
