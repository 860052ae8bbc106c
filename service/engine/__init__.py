"""Rows in, top-k out. Knows arrays; knows no HTTP and no asyncio."""

from service.engine.engine import BackendName as BackendName
from service.engine.engine import Engine as Engine
