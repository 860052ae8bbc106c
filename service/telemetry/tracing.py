"""Turns traces on if the standard OTEL_* variables ask for them.

The SDK is imported only then. It reads its variables itself, so the sampler, the endpoint, the
batch sizes and the service's name are set as for any other program.
"""

import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.telemetry.spans import Traces

logger = logging.getLogger(__name__)

EXTRA = "doubly-sparse-softmax[otel]"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
EXPORTERS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


def from_environment(scheme: str = "http") -> "Traces | None":
    """Traces, if they are asked for. If they cannot be made, a warning says why."""
    names = exporter_names()
    if not names:
        return None
    try:
        from service.telemetry import spans

        traces = spans.exported_by(names, scheme)
    except ImportError as error:
        logger.warning("Traces are asked for but need %s: install %s.", error.name, EXTRA)
        return None
    except Exception as error:
        logger.warning("Traces are asked for but cannot be made: %s", error)
        return None
    logger.info("Traces are exported by %s.", ", ".join(names))
    return traces


def exporter_names() -> list[str]:
    """The exporters that the environment asks for, by the names of their entry points."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    asked = os.environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if not asked and any(os.environ.get(name) for name in ENDPOINTS):
        asked = "otlp"
    names = [name.strip() for name in asked.split(",")]
    return [_otlp() if name == "otlp" else name for name in names if name not in ("", "none")]


def _otlp() -> str:
    given = next((os.environ[name] for name in PROTOCOLS if os.environ.get(name)), None)
    protocol = (given or "http/protobuf").strip()
    return EXPORTERS.get(protocol, f"otlp {protocol}")
