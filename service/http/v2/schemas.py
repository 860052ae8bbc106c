"""The JSON documents of the Open Inference Protocol, with Triton's extensions."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt


class V2Problem(BaseModel):
    error: str = Field(examples=["There is no model 'other'."])


class V2Server(BaseModel):
    name: str
    version: str
    extensions: list[str]


class V2Live(BaseModel):
    live: bool = True


class V2Ready(BaseModel):
    ready: bool = True


class V2ModelReady(BaseModel):
    name: str
    ready: bool = True


class V2Tensor(BaseModel):
    name: str
    datatype: str
    shape: list[int] = Field(description="-1 where a request decides")


class V2Model(BaseModel):
    name: str
    versions: list[str] = Field(description="The good ones, newest first")
    platform: str
    inputs: list[V2Tensor]
    outputs: list[V2Tensor]


class V2Input(BaseModel):
    name: Literal["hidden"]
    shape: Annotated[list[int], Field(min_length=2, max_length=2)] = Field(
        description="Rows and the model's hidden size"
    )
    datatype: Literal["FP32", "FP64", "FP16"] = Field(
        description="What the numbers are; FP16 only if they follow the JSON part"
    )
    data: list[float] | list[list[float]] | None = Field(
        default=None, description="Absent if the tensor follows the JSON part"
    )
    parameters: dict[str, int] = Field(
        default={}, description="binary_data_size, if the tensor follows the JSON part"
    )


class V2RequestedOutput(BaseModel):
    name: Literal["classes", "log_probs", "experts", "gates", "searched", "rungs"] = Field(
        description="The last two only if exact, recall or rescore is asked for"
    )
    parameters: dict[str, bool] = Field(
        default={}, description="binary_data: whether it shall follow the JSON part"
    )


class V2Request(BaseModel):
    id: str | None = None
    parameters: dict[str, int | float | bool] = Field(
        default={},
        description="k, experts, exact, recall, rescore, timeout (microseconds) and"
        " binary_data_output; others are ignored",
    )
    inputs: Annotated[list[V2Input], Field(min_length=1, max_length=1)]
    outputs: list[V2RequestedOutput] = Field(default=[], description="All of them if empty")


class V2Output(BaseModel):
    name: str
    datatype: str
    shape: list[int]
    data: list[int] | list[float] | None = None
    parameters: dict[str, int] | None = None


class V2Answer(BaseModel):
    model_name: str
    model_version: str
    id: str | None = None
    parameters: dict[str, str] | None = Field(
        default=None, description="promise: kept or withdrawn, if a recall is asked for or usual"
    )
    outputs: list[V2Output]


# --- Triton's model configuration ------------------------------------------------------------


class V2ConfigTensor(BaseModel):
    name: str
    data_type: str = Field(examples=["TYPE_FP32"])
    dims: list[int] = Field(description="Without the rows; -1 where a request decides")


class V2Latest(BaseModel):
    num_versions: int = Field(description="Besides those that labels point at")


class V2Policy(BaseModel):
    """Which good versions are loaded: the latest, or all."""

    latest: V2Latest | None = None
    all: dict[str, str] | None = None


class V2InstanceGroup(BaseModel):
    name: str
    kind: Literal["KIND_CPU"] = "KIND_CPU"
    count: int = Field(description="Workers, each with an engine of its own")


class V2Batching(BaseModel):
    preferred_batch_size: list[int] = []
    max_queue_delay_microseconds: int = Field(default=0, description="No timer delays anything")


class V2ConfigParameter(BaseModel):
    string_value: str


class V2Config(BaseModel):
    name: str
    platform: str
    backend: str
    version_policy: V2Policy
    max_batch_size: int = Field(description="Rows of one request")
    input: list[V2ConfigTensor]
    output: list[V2ConfigTensor]
    instance_group: list[V2InstanceGroup]
    dynamic_batching: V2Batching
    parameters: dict[str, V2ConfigParameter] = Field(description="Facts about the layer, as text")


# --- Triton's statistics ---------------------------------------------------------------------


class V2Duration(BaseModel):
    count: int = 0
    ns: int = 0


class V2InferenceStats(BaseModel):
    success: V2Duration
    fail: V2Duration
    queue: V2Duration
    compute_infer: V2Duration
    compute_input: V2Duration = Field(default=V2Duration(), description="Not measured: 0")
    compute_output: V2Duration = Field(default=V2Duration(), description="Not measured: 0")
    cache_hit: V2Duration = Field(default=V2Duration(), description="There is no cache: 0")
    cache_miss: V2Duration = Field(default=V2Duration(), description="There is no cache: 0")


class V2ModelStats(BaseModel):
    name: str
    version: str
    last_inference: int = Field(description="Milliseconds since the epoch; 0 before any")
    inference_count: int = Field(description="Rows answered")
    execution_count: int = Field(description="Engine calls")
    inference_stats: V2InferenceStats
    batch_stats: list[V2Duration] = Field(default=[], description="Not kept by size: empty")
    memory_usage: list[V2Duration] = Field(default=[], description="Not kept by model: empty")


class V2Stats(BaseModel):
    model_stats: list[V2ModelStats]


# --- Triton's settings -----------------------------------------------------------------------


class V2LogSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    log_file: str
    log_info: bool
    log_warning: bool
    log_error: bool
    log_verbose_level: NonNegativeInt
    log_format: str


class V2LogUpdate(BaseModel):
    """What is absent stays. A level shows the graver ones too."""

    model_config = ConfigDict(extra="forbid", strict=True)

    log_file: Literal[""] | None = Field(default=None, description="The log goes to stderr")
    log_info: bool | None = None
    log_warning: bool | None = None
    log_error: bool | None = None
    log_verbose_level: NonNegativeInt | None = Field(default=None, description="0, or debug")
    log_format: Literal["ISO8601"] | None = None


class V2TraceSettings(BaseModel):
    trace_level: list[Literal["OFF", "TIMESTAMPS"]]
    trace_mode: Literal["opentelemetry"] = "opentelemetry"


class V2TraceUpdate(BaseModel):
    """Only what would change nothing is accepted."""

    trace_level: list[Literal["OFF", "TIMESTAMPS"]] | None = None
    trace_mode: Literal["opentelemetry"] | None = None


class V2Region(BaseModel):
    name: str


class V2Done(BaseModel):
    """Nothing to say."""


class V2IndexRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    ready: bool = Field(default=False, description="Only versions that answer")


class V2IndexEntry(BaseModel):
    name: str
    version: str
    state: Literal["READY", "LOADING", "UNAVAILABLE"]
    reason: str | None = Field(default=None, description="Why it does not answer")


class V2LoadRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    parameters: dict[str, str] = Field(default={}, max_length=0, description="None are known")


class V2UnloadParameters(BaseModel):
    model_config = ConfigDict(extra="forbid")

    unload_dependents: bool = Field(default=False, description="No model has any")


class V2UnloadRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    parameters: V2UnloadParameters = V2UnloadParameters()


# Of bodies that routes read by themselves, so that FastAPI does not find them.
DESCRIBED = (
    V2IndexRequest,
    V2LoadRequest,
    V2LogUpdate,
    V2Request,
    V2TraceUpdate,
    V2UnloadRequest,
    V2Answer,
    V2Problem,
)
