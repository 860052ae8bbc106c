"""Settings. A flag beats DSS_* in the environment, which beats the TOML file and then the default.

In the environment a nested setting is spelled with two underscores: DSS_LIMITS__MAX_ROWS=512.
"""

import re
import tomllib
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    SerializationInfo,
    ValidationError,
    field_serializer,
    field_validator,
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
from service.system import cpu_quota

Scope = Literal["query", "admin"]
# What may stand after "Bearer" (RFC 6750), and not so short that it could be guessed.
TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{16,256}={0,2}")

WITH_SECRETS = {"secrets": True}  # the context in which a dump of settings shows them


class SettingsError(DSSError):
    """A setting is unknown or has an impossible value."""


def _share(value: object) -> object:
    """In the environment a share may be given as true or false."""
    if isinstance(value, str):
        return {"true": 1.0, "false": 0.0}.get(value.lower(), value)
    return value


Share = Annotated[float, BeforeValidator(_share), Field(ge=0.0, le=1.0)]


class Limits(BaseModel):
    """What one request may ask for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_body_bytes: PositiveInt = 8 * 2**20
    max_rows: PositiveInt = 4096
    max_k: PositiveInt = 1000
    max_answers: PositiveInt = 2**20  # rows times k
    max_answer_bytes: PositiveInt = 64 * 2**20  # as large as an answer could get, labels included
    # Rows times the classes that are searched for each: bounds the time of a request.
    max_scores: PositiveInt = 2**29
    # How many times its own size a compressed body may grow to, beyond a megabyte.
    max_expansion: PositiveInt = 100
    # From the arrival of the request head to the answer; the header DSS-Timeout may ask for less.
    request_seconds: PositiveFloat = 30.0
    # Limits of a connection; those of clients that are slower are closed.
    max_connections: PositiveInt = 10_000  # of each worker, and not more than its descriptors allow
    max_headers: PositiveInt = 100
    max_head_bytes: PositiveInt = 65_536
    head_seconds: PositiveFloat = 10.0  # how long a request head may take to arrive
    body_seconds: PositiveFloat = 30.0  # ... and a body
    read_seconds: PositiveFloat = 30.0  # how long a client may leave an answer unread
    # Bodies on their way in and answers not yet read, of all connections together.
    max_pending_bytes: PositiveInt = 256 * 2**20


class Queue(BaseModel):
    """How much may wait for a model, and how much of it is joined into one engine call."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_rows: PositiveInt = 16_384
    max_bytes: PositiveInt = 64 * 2**20
    # A request that would have to wait longer than this is refused at once.
    max_seconds: PositiveFloat = 0.05
    # Once the queue has not been empty for so long, no more may wait than one call answers: more
    # would make every answer late, and none sooner.
    max_burst_seconds: PositiveFloat = 0.2
    # What is joined into one call. A long one gains little and makes its first request wait.
    max_batch_rows: PositiveInt = 1024
    max_batch_seconds: PositiveFloat = 0.01
    # A call expected to take no longer is made on the event loop, others in the engine's thread.
    inline_seconds: NonNegativeFloat = 0.001


class Drift(BaseModel):
    """How live traffic is compared with training's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    window_seconds: PositiveFloat = 300.0


class Shadow(BaseModel):
    """A sample of query rows is also answered by the full softmax, and the answers compared."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rate: Share = 0.0
    max_waiting_rows: PositiveInt = 256  # further rows are not compared


class MetricsSettings(BaseModel):
    """How much /metrics shows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # How many experts of each version have series of their own, those that training used most; the
    # others share one. all: each has its own.
    experts: NonNegativeInt | Literal["all"] = 100

    @property
    def own_series(self) -> int | None:
        return None if self.experts == "all" else self.experts


class EngineSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    # Of each worker's engines. None: compiled loops take one, ONNX Runtime the worker's share of
    # the CPUs that the container may use.
    threads: PositiveInt | None = None
    # auto: compiled loops, or ONNX Runtime for bundles with approximated experts
    backend: Literal["auto", "compiled", "onnx"] = "auto"
    # A call that takes so much longer than expected is abandoned, and waiting requests fail.
    stuck_seconds: PositiveFloat = 0.8


class RepositorySettings(BaseModel):
    """How the models folder is followed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    poll_seconds: NonNegativeFloat = 2.0  # how often it is scanned; 0: only on request
    # How many of a model's newest good versions stay loaded, besides those with aliases; 0: all.
    keep_versions: NonNegativeInt = 2
    # Refuse a version, until there is room, that needs more memory than is left to load it.
    check_memory: bool = True
    # Read the output layers that accuracy bundles ship, for exact answers; false saves memory.
    # Fidelity bundles answer from theirs in any case.
    load_heads: bool = True


class Key(BaseModel):
    """An API key. `key` may be given in place of `sha256`; only its hash is kept."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", repr=False)]
    scopes: Annotated[frozenset[Scope], Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _hash(cls, given: Any) -> Any:  # noqa: ANN401
        if not isinstance(given, dict) or "key" not in given:
            return given
        rest = {name: value for name, value in given.items() if name != "key"}
        if "sha256" in rest:
            raise ValueError("either key or sha256 may be given")
        if not isinstance(given["key"], str) or not TOKEN.fullmatch(given["key"]):
            raise ValueError("key must be 16 to 256 of the letters A-Z a-z 0-9 . _ ~ + / -")
        return {**rest, "sha256": sha256(given["key"].encode()).hexdigest()}

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or "admin" in self.scopes


class AccessSettings(BaseModel):
    """What clients may do. Without keys, all may query and none may change the server."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    keys_file: Path | None = None  # see http/auth/keys.py; read again when it changes
    keys: tuple[Key, ...] = ()  # besides the file's, for containers: DSS_ACCESS__KEYS='[{...}]'
    metrics: Literal["open", "query", "admin"] = "query"  # what /metrics needs if there are keys
    open_admin: bool = False  # without keys, all clients may change the server


class TlsSettings(BaseModel):
    """With a certificate and its key, the server speaks only TLS."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    cert: Path | None = None  # PEM, the server's own certificate first
    key: Path | None = None
    ca: Path | None = None  # clients must show a certificate that one of these has signed
    key_password: SecretStr | None = None
    key_password_file: Path | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("tls.cert and tls.key need each other")
        if self.cert is None and (self.ca or self.key_password or self.key_password_file):
            raise ValueError("tls.cert and tls.key are missing")
        if self.key_password and self.key_password_file:
            raise ValueError("either tls.key_password or tls.key_password_file may be given")
        return self

    @field_serializer("key_password", when_used="json-unless-none")
    def _hide(self, password: SecretStr, info: SerializationInfo) -> str:
        return password.get_secret_value() if info.context == WITH_SECRETS else str(password)


class CorsSettings(BaseModel):
    """Which pages of other origins may ask from a browser: https://example.org, or * for all."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    origins: tuple[str, ...] = ()


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="DSS_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    models: Path = Path("models")
    default_model: str | None = None  # None: the first model by name
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    # Hosts that requests may name in their Host header, *.example.org for all below; empty: any.
    hosts: tuple[str, ...] = ()
    workers: PositiveInt = 1  # processes that answer, each with its own engines; auto: one a CPU
    # Answers requests whose head is known byte for byte without parsing it; off: as uvicorn does.
    head_cache: bool = True
    stuck_seconds: PositiveFloat = 10.0  # a process whose event loop is blocked so long is ended
    workers_folder: Path | None = None  # of the counts that workers share; None: in memory
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    # What share of the requests is logged, 0 to 1; failures with status 5xx and requests that took
    # at least slow_seconds always are.
    access_log: Share = 0.0
    slow_seconds: PositiveFloat | None = None
    # After SIGTERM: first /readyz fails while requests are still answered, so that load balancers
    # notice; then no connection is accepted and requests under way may take a while to finish.
    drain_seconds: NonNegativeFloat = 3.0
    stop_seconds: PositiveFloat = 20.0
    limits: Limits = Limits()
    queue: Queue = Queue()
    engine: EngineSettings = EngineSettings()
    metrics: MetricsSettings = MetricsSettings()
    drift: Drift = Drift()
    shadow: Shadow = Shadow()
    repository: RepositorySettings = RepositorySettings()
    access: AccessSettings = AccessSettings()
    tls: TlsSettings = TlsSettings()
    cors: CorsSettings = CorsSettings()

    @field_validator("workers", mode="before")
    @classmethod
    def _one_a_cpu(cls, asked: object) -> object:
        return cpu_quota.whole_cpus() if asked == "auto" else asked

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
    """pydantic-settings' own source would ignore a missing file, and a pipe, without an error."""
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
    return f"The setting {name!r} is wrong: {first['msg'].removeprefix('Value error, ')}."
