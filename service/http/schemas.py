"""The JSON documents of the API, as pydantic models for OpenAPI and the small answers.

Top-k bodies are described here too, but codecs.py reads and writes them without pydantic.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema


class Problem(BaseModel):
    """RFC 9457."""

    type: str = Field(examples=["urn:dss:problem:wrong-width"])
    title: str = Field(examples=["Wrong width"])
    status: int = Field(examples=[422])
    detail: str = Field(examples=["Inputs have shape [1, 3]; [rows, 100] is expected."])
    instance: str = Field(examples=["/topk"])


class TopKRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    inputs: Annotated[list[list[float]], Field(min_length=1)] = Field(
        description="Hidden vectors, one row for each query, all as wide as the model's hidden size"
    )
    k: int = Field(default=10, ge=1, description="How many classes to answer for each row")
    experts: int = Field(
        default=1, ge=1, description="How many experts to search: more find more, at a higher cost"
    )
    exact: bool = Field(
        default=False, description="Answer the k best of the whole output layer, proven"
    )
    recall: Annotated[float, Field(gt=0, le=1)] | SkipJsonSchema[None] = Field(
        default=None,
        description="The share of the output layer's k best that must be found, on average: rows"
        " that might miss more are answered exactly",
    )
    rescore: bool = Field(
        default=False, description="Rank what is found by the output layer's own scores"
    )


class TopKAnswer(BaseModel):
    model: str
    version: int
    classes: list[list[int]] = Field(description="Class ids, the most probable first")
    log_probs: list[list[float]] = Field(description="Their log-probabilities")
    labels: list[list[str]] | None = Field(
        default=None, description="Their names; absent if the model has none"
    )
    experts: list[int] = Field(description="The expert that the gate chose for each row")
    gates: list[float] = Field(description="The gate's value for it")
    searched: list[int] | None = Field(
        default=None,
        description="How many experts were searched for each row: 0 if all classes were scanned"
        " from the start; only if exact, recall or rescore is asked for",
    )
    rungs: list[Literal["sparse", "escalated", "exact"]] | None = Field(
        default=None,
        description="How each row was answered: from its experts, by a scan because these might"
        " not have kept the recall, or by a scan from the start; as searched",
    )
    promise: Literal["kept", "withdrawn"] | None = Field(
        default=None,
        description="Of a recall: withdrawn while the traffic is not what it was calibrated on",
    )


class ContractInfo(BaseModel):
    """What recall was calibrated for."""

    rows: int = Field(description="It was calibrated with")
    levels: list[float] = Field(description="Recalls; above the last one all rows are scanned")
    ks: list[int] = Field(description="Numbers of answers; above the last one likewise")
    exact_only: list[float] = Field(
        description="Those of the recalls that only a scan of all rows keeps, for any number of"
        " answers: mostly because the calibration had too few rows for them"
    )


class VersionInfo(BaseModel):
    version: int
    n_classes: int
    hidden_size: int
    n_experts: int
    labels: bool
    created: str
    accuracy: float | None = Field(description="On the test rows of training")
    trained_flops_speedup: float
    flops_speedup: float | None = Field(description="Of the rows answered so far; null before any")
    objective: Literal["accuracy", "fidelity"] = Field(
        description="Whether its rows were learned, or are the output layer's own"
    )
    can_exact: bool = Field(description="Whether it ships the output layer that exact needs")
    contract: ContractInfo | None = Field(description="Null if recall was not calibrated")


class FoundVersion(BaseModel):
    version: int
    state: Literal["loaded", "loading", "refused", "not loaded"]
    reason: str | None = Field(
        default=None, description="Why its bundle is refused, or what is unusual about it"
    )


class LabelRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    version: int = Field(ge=1, description="Where the label shall point")


class RefusedVersion(BaseModel):
    version: int
    reason: str


class ModelInfo(BaseModel):
    name: str
    default: bool = Field(description="Whether POST /topk asks this model")
    version: int | None = Field(description="The version that answers when none is named")
    versions: list[VersionInfo]
    refused: list[RefusedVersion] = Field(description="Bundles that could not be loaded")
    found: list[FoundVersion] = Field(description="All versions, newest first")
    labels: dict[str, int] = Field(description="Where each label points; always a loaded version")
    label_problems: dict[str, str] = Field(description="Why a label is not where it should be")


class ModelList(BaseModel):
    models: list[ModelInfo]


class ExpertInfo(BaseModel):
    expert: int
    classes: int
    trained_utilization: float = Field(description="Share of training's test rows")
    rows: int = Field(description="Rows scored since the start")
    utilization: float | None = Field(description="Rows scored per row answered; null before any")
    mean_seconds: float | None = Field(description="Of one execution; null before any")


class ExpertList(BaseModel):
    model: str
    version: int
    experts: list[ExpertInfo]


class Samples(BaseModel):
    model: str
    version: int
    total: int = Field(description="How many the bundle carries")
    offset: int
    samples: list[list[float]] = Field(description="Hidden vectors, as top-k takes them")


class ExpertClasses(BaseModel):
    model: str
    version: int
    expert: int
    total: int = Field(description="How many classes the expert holds")
    offset: int
    classes: list[int] = Field(description="Class ids, ascending")
    labels: list[str] | None = Field(description="Their names; null if the model has none")


class ClassInfo(BaseModel):
    id: int
    label: str | None = Field(description="Null if the model has none")
    experts: list[int] = Field(description="Those that hold the class")


class OneClass(BaseModel):
    model: str
    version: int
    id: int
    label: str | None = Field(description="Null if the model has none")
    experts: list[int] = Field(description="Those that hold the class")


class ClassList(BaseModel):
    model: str
    version: int
    classes: list[ClassInfo] = Field(
        description="The class with the id asked for, those called just so, those whose names begin"
        " so, and then the others; by id"
    )
    more: bool = Field(description="Whether there are more than were asked for")


class Matrix(BaseModel):
    model: str
    version: int
    experts: list[int] = Field(description="In the order of the rows")
    expert_edges: list[int] = Field(
        description="Row r stands for experts[expert_edges[r]:expert_edges[r + 1]]"
    )
    class_edges: list[int] = Field(
        description="Column c stands for the classes from class_edges[c] to class_edges[c + 1] - 1"
    )
    counts: list[list[int]] = Field(
        description="By row and column: how many classes of the range its experts hold, together"
    )


class Health(BaseModel):
    status: str = Field(default="ok", examples=["ok"])


# Of bodies that routes read by themselves, so that FastAPI does not find them.
DESCRIBED = (TopKRequest, TopKAnswer, Problem, LabelRequest)
