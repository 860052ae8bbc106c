"""The bundle format on disk: read, write, check."""

from service.bundle.bundle import Bundle as Bundle
from service.bundle.bundle import flops_speedup as flops_speedup
from service.bundle.format import FORMAT_VERSION as FORMAT_VERSION
from service.bundle.format import Precision as Precision
from service.bundle.manifest import Manifest as Manifest
from service.bundle.manifest import TrainingFacts as TrainingFacts
from service.bundle.reader import read as read
from service.bundle.writer import write as write
