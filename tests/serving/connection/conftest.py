import pytest
from helpers.serving.connection_ways import WAYS, Way


@pytest.fixture(params=WAYS, ids=lambda way: f"{way.loop}-{'cache' if way.head_cache else 'none'}")
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found
