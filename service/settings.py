"""Settings. A flag beats DSS_* in the environment, which beats the TOML file and then the default.

In the environment a nested setting is spelled with two underscores: DSS_LIMITS__MAX_ROWS=512.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings import SettingsError as SourceError

from service.errors import DSSError


class SettingsError(DSSError):
    """A setting is unknown or has a value that cannot be."""


class Limits(BaseModel):
    """What one request may ask for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_body_bytes: PositiveInt = 8 * 2**20
    max_rows: PositiveInt = 4096
    max_k: PositiveInt = 1000
    max_answers: PositiveInt = 2**20  # rows times k: bounds the size of an answer
    body_seconds: PositiveFloat = 30.0  # how long a body may take to arrive


class Queue(BaseModel):
    """How much may wait for a model, and how much of it is joined into one engine call."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_rows: PositiveInt = 16_384
    max_batch_rows: PositiveInt = 1024
    # A call expected to take no longer is made on the event loop, others in the engine's thread.
    inline_seconds: NonNegativeFloat = 0.001


class EngineSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    threads: PositiveInt = 1
    # auto: compiled loops, or ONNX Runtime for bundles with approximated experts
    backend: Literal["auto", "compiled", "onnx"] = "auto"


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="DSS_", env_nested_delimiter="__", extra="forbid", frozen=True
    )

    models: Path = Path("models")
    default_model: str | None = None  # None: the first model by name
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    workers: PositiveInt = 1  # processes that answer, each with its own engines
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    access_log: bool = False
    # After SIGTERM: first /readyz fails while requests are still answered, so that load balancers
    # notice; then no connection is accepted and requests under way may take a while to finish.
    drain_seconds: NonNegativeFloat = 3.0
    stop_seconds: PositiveFloat = 20.0
    limits: Limits = Limits()
    queue: Queue = Queue()
    engine: EngineSettings = EngineSettings()

    @model_validator(mode="after")
    def _largest_request_fits_the_queue(self) -> Self:
        if self.queue.max_rows < self.limits.max_rows:
            raise ValueError("queue.max_rows must not be smaller than limits.max_rows")
        return self


def load(flags: Mapping[str, Any] | None = None, config: Path | None = None) -> Settings:
    """Settings from all sources; `flags` holds only what was given on the command line."""
    table = _read_toml(config) if config else {}

    class Sourced(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            del dotenv_settings, file_secret_settings
            return init_settings, env_settings, InitSettingsSource(settings_cls, table)

    try:
        return Sourced(**(flags or {}))
    except ValidationError as error:
        raise SettingsError(_sentence(error)) from error
    except SourceError as error:
        raise SettingsError("A DSS_* environment variable could not be parsed.") from error


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"The configuration file {path} cannot be read.") from error
    except ValueError as error:
        raise SettingsError(f"The configuration file {path} is not TOML: {error}.") from error


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"There is no setting {name!r}."
    if not name:
        return f"The settings do not fit together: {first['msg'].removeprefix('Value error, ')}."
    return f"The setting {name!r} is wrong: {first['msg']}."
