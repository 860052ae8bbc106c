"""Three probes with three meanings: restart me, send me requests, I have finished starting."""

from service.errors import DSSError
from service.repository import Loading
from service.state import State


class NotReady(DSSError):
    pass


def check_live(state: State) -> None:
    """Fails when only a restart helps: an engine's thread has died."""
    if not state.repository.loaded:
        return
    for model in state.repository.catalog.models():
        if not model.batcher.alive:
            raise NotReady(f"The engine of model {model.name}/{model.version} has died.")


def check_started(state: State) -> None:
    """Fails until the models have been loaded; never again afterwards."""
    if state.load_failed:
        raise NotReady("Loading the models failed; the server's log says why.")
    if not state.repository.loaded:
        raise Loading("The models are still being loaded.")
    # Whoever sees one worker ready sends requests to all of them. One that takes a dead one's
    # place loads its models before it is given a connection, so it does not count again.
    if state.settings.workers > 1 and state.metrics.loaded_workers < state.settings.workers:
        raise Loading("A worker is still loading its models.")


async def check_ready(state: State) -> None:
    """Fails while requests should go elsewhere: loading, draining, or an engine that fails."""
    check_started(state)
    if state.draining:
        raise NotReady("The server is shutting down.")
    models = list(state.repository.catalog.models())
    if not models:
        raise NotReady("No model is loaded.")
    default = state.repository.default_name
    if not any(model.name == default for model in models):
        raise NotReady(f"The default model {default!r} is not loaded.")
    for model in models:
        if not await model.batcher.healthy():
            raise NotReady(f"The engine of model {model.name}/{model.version} fails.")
