"""What the Open Inference Protocol lets clients ask about the server and its models.

The statistics come from the counters that /metrics shows, so they too are sums over all workers.
"""

from collections.abc import Iterable

from fastapi import FastAPI

from service.http import health
from service.http.auth.access import needs
from service.http.inference.v2 import INPUT
from service.http.inference.v2_outputs import DATATYPES
from service.http.state import AppState
from service.http.v2.responses import v2_responses
from service.http.v2.schemas import (
    V2Batching,
    V2Config,
    V2ConfigParameter,
    V2ConfigTensor,
    V2Duration,
    V2InferenceStats,
    V2InstanceGroup,
    V2Latest,
    V2Live,
    V2Model,
    V2ModelReady,
    V2ModelStats,
    V2Policy,
    V2Ready,
    V2Server,
    V2Stats,
    V2Tensor,
)
from service.repository.model import Model
from service.settings import Settings
from service.topk import RUNGS

PLATFORM = "doubly_sparse_softmax"
EXTENSIONS = [
    "binary_tensor_data",
    "logging",
    "model_configuration",
    "model_repository",
    "parameters",
    "statistics",
]


def add_routes(app: FastAPI, state: AppState) -> None:
    _add_server(app, state)
    _add_statistics(app, state)  # before the models: none may be called "stats"
    _add_models(app, state)


def _add_server(app: FastAPI, state: AppState) -> None:
    not_ready = v2_responses(503)

    @app.get("/v2", tags=["v2"], responses=v2_responses())
    async def server() -> V2Server:
        """What this server is, and which of Triton's extensions it has."""
        return V2Server(name="doubly-sparse-softmax", version=app.version, extensions=EXTENSIONS)

    @app.get("/v2/health/live", tags=["v2"], responses=not_ready)
    @needs("nothing")
    async def live() -> V2Live:
        """Answered as long as the event loop runs."""
        return V2Live()

    @app.get("/v2/health/ready", tags=["v2"], responses=not_ready)
    @needs("nothing")
    async def ready() -> V2Ready:
        """Fails while requests should go elsewhere."""
        await health.check_ready(state)
        return V2Ready()


def _add_models(app: FastAPI, state: AppState) -> None:
    repository = state.repository
    not_found = v2_responses(404, 503)

    @app.get("/v2/models/{name}", tags=["v2"], responses=not_found)
    async def model(name: str) -> V2Model:
        """The tensors of the version of a model that answers when none is named."""
        return _metadata(state, repository.get(name))

    @app.get("/v2/models/{name}/versions/{version}", tags=["v2"], responses=not_found)
    async def model_version(name: str, version: str) -> V2Model:
        """The tensors of one version of a model."""
        return _metadata(state, repository.get(name, version))

    @app.get("/v2/models/{name}/ready", tags=["v2"], responses=not_found)
    async def model_ready(name: str) -> V2ModelReady:
        """Fails unless the version of a model answers that does when none is named."""
        return await _ready(repository.get(name))

    @app.get("/v2/models/{name}/versions/{version}/ready", tags=["v2"], responses=not_found)
    async def version_ready(name: str, version: str) -> V2ModelReady:
        """Fails unless one version of a model answers."""
        return await _ready(repository.get(name, version))

    @app.get(
        "/v2/models/{name}/config",
        tags=["v2"],
        responses=not_found,
        response_model_exclude_none=True,
    )
    async def config(name: str) -> V2Config:
        """Triton's configuration of the version of a model that answers when none is named."""
        return _config(state.settings, repository.get(name))

    @app.get(
        "/v2/models/{name}/versions/{version}/config",
        tags=["v2"],
        responses=not_found,
        response_model_exclude_none=True,
    )
    async def version_config(name: str, version: str) -> V2Config:
        """Triton's configuration of one version of a model."""
        return _config(state.settings, repository.get(name, version))


def _add_statistics(app: FastAPI, state: AppState) -> None:
    repository = state.repository
    not_found = v2_responses(404, 503)

    @app.get("/v2/models/stats", tags=["v2"], responses=v2_responses(503))
    def stats() -> V2Stats:
        """What has become of the requests for every version of every model."""
        return _statistics(repository.catalog.models())

    @app.get("/v2/models/{name}/stats", tags=["v2"], responses=not_found)
    def model_stats(name: str) -> V2Stats:
        """What has become of the requests for every version of a model."""
        return _statistics(repository.entry(name).versions.values())

    @app.get("/v2/models/{name}/versions/{version}/stats", tags=["v2"], responses=not_found)
    def version_stats(name: str, version: str) -> V2Stats:
        """What has become of the requests for one version of a model."""
        return _statistics([repository.get(name, version)])


def _metadata(state: AppState, model: Model) -> V2Model:
    return V2Model(
        name=model.name,
        versions=[str(number) for number in state.repository.entry(model.name).versions],
        platform=PLATFORM,
        inputs=[V2Tensor(name=INPUT, datatype="FP32", shape=[-1, model.manifest.hidden_size])],
        outputs=[
            V2Tensor(name=output, datatype=datatype, shape=[-1, *_dims(output)])
            for output, datatype in DATATYPES.items()
        ],
    )


def _dims(output: str) -> list[int]:
    """Of one row's share of an output: k values, or a single one."""
    return [-1] if output in ("classes", "log_probs") else []


async def _ready(model: Model) -> V2ModelReady:
    if not await model.batcher.healthy():
        raise health.NotReady(f"The engine of model {model.name}/{model.version} fails.")
    return V2ModelReady(name=model.name)


def _config(settings: Settings, model: Model) -> V2Config:
    manifest, engine = model.manifest, model.engine
    facts = {
        "version": model.version,
        "n_classes": manifest.n_classes,
        "n_experts": manifest.n_experts,
        "hidden_size": manifest.hidden_size,
        "n_reachable_classes": model.engine.n_reachable,
        "default_k": model.default_k,
        "max_k": min(settings.limits.max_k, model.engine.n_reachable),
        "max_answers": settings.limits.max_answers,
        "max_joined_rows": settings.queue.max_batch_rows,
        "max_queued_rows": settings.queue.max_rows,
        "objective": engine.objective,
        "can_exact": str(engine.can_exact).lower(),
        "recall_levels": ",".join(map(str, engine.contract.levels)) if engine.contract else "",
        "rungs": ",".join(RUNGS),
        "trained_flops_speedup": manifest.training.flops_speedup,
        "created": manifest.created,
        "format_version": manifest.format_version,
    }
    return V2Config(
        name=model.name,
        platform=PLATFORM,
        backend=PLATFORM,
        version_policy=_policy(settings.repository.keep_versions),
        max_batch_size=settings.limits.max_rows,
        input=[V2ConfigTensor(name=INPUT, data_type="TYPE_FP32", dims=[manifest.hidden_size])],
        output=[
            V2ConfigTensor(name=output, data_type=f"TYPE_{datatype}", dims=_dims(output))
            for output, datatype in DATATYPES.items()
        ],
        instance_group=[V2InstanceGroup(name=model.name, count=settings.workers)],
        dynamic_batching=V2Batching(),
        parameters={
            name: V2ConfigParameter(string_value=str(fact)) for name, fact in facts.items()
        },
    )


def _policy(keep_versions: int) -> V2Policy:
    if keep_versions == 0:
        return V2Policy(all={})
    return V2Policy(latest=V2Latest(num_versions=keep_versions))


def _statistics(models: Iterable[Model]) -> V2Stats:
    return V2Stats(model_stats=[_model_statistics(model) for model in models])


def _model_statistics(model: Model) -> V2ModelStats:
    counted = model.metrics.statistics
    spent = counted.queue_seconds + counted.request_seconds
    return V2ModelStats(
        name=model.name,
        version=str(model.version),
        last_inference=int(1000 * counted.last),
        inference_count=counted.rows,
        execution_count=counted.executions,
        inference_stats=V2InferenceStats(
            success=_duration(counted.requests, spent),
            fail=_duration(counted.failures, counted.failure_seconds),
            queue=_duration(counted.requests, counted.queue_seconds),
            compute_infer=_duration(counted.requests, counted.request_seconds),
        ),
    )


def _duration(count: int, seconds: float) -> V2Duration:
    return V2Duration(count=count, ns=round(1e9 * seconds))
