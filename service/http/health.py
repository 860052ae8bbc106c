"""Three probes: /livez (the event loop runs), /readyz (send requests), /startupz (models loaded).

A process that answers is alive, so /livez checks nothing more: one that needs a restart ends itself
(see `server/server.py`).
"""

from service.errors import DSSError, Kind
from service.http.state import AppState
from service.repository.catalog import Loading, ModelNotFound, VersionNotFound

PROBES = {"/livez", "/readyz", "/startupz", "/v2/health/live", "/v2/health/ready"}


class NotReady(DSSError):
    kind = Kind.UNAVAILABLE


def check_started(state: AppState) -> None:
    """Fails until the models have been loaded; never again afterwards."""
    if state.load_failed:
        raise NotReady("Loading the models failed; the server's log says why.")
    if not state.repository.loaded:
        raise Loading("The models are still being loaded.")
    # Whoever sees one worker ready sends requests to all of them. One that takes a dead one's
    # place loads its models before it is given a connection, so it does not count again.
    if state.settings.workers > 1 and state.metrics.loaded_workers < state.settings.workers:
        raise Loading("A worker is still loading its models.")


async def check_ready(state: AppState) -> None:
    """Fails while requests should go elsewhere: loading, draining, or a default model that does
    not answer a row. Other models are asked by /v2/models/{name}/ready."""
    check_started(state)
    if state.draining:
        raise NotReady("The server is shutting down.")
    try:
        model = state.repository.get()
    except (ModelNotFound, VersionNotFound) as error:
        raise NotReady(str(error)) from None
    if not await model.batcher.healthy():
        raise NotReady(f"The engine of model {model.name}/{model.version} fails.")


def needs_restart(state: AppState) -> str | None:
    """Why only a restart helps, if so: the default model has lost thread after thread."""
    if not state.repository.loaded:
        return None
    try:
        model = state.repository.get()
    except (ModelNotFound, VersionNotFound):
        return None
    if model.batcher.alive:
        return None
    name = f"{model.name}/{model.version}"
    return f"The engine of model {name} fails again and again; only a restart helps."
