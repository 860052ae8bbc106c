import resource
from collections.abc import Iterator

import pytest

from service.system import file_descriptors
from service.system.file_descriptors import RateLimited

INFINITY = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (1024, 4096, 4096),
        (1024, 1024, 1024),
        (1024, 1_000_000, 65_536),
        (1024, INFINITY, 65_536),
        (100_000, 1_000_000, 100_000),
        (INFINITY, INFINITY, INFINITY),
    ],
)
def test_the_limit_is_raised_as_far_as_it_may_be_and_never_lowered(
    soft: int, hard: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.append(both))
    assert file_descriptors.raise_limit() == expected
    assert limits[-1] == (expected, hard)


def test_this_process_can_take_its_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        assert file_descriptors.raise_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 512
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_line_is_written_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    times: Iterator[float] = iter([100.0, 100.0, 159.0, 160.0, 160.0, 161.0])
    monkeypatch.setattr(file_descriptors, "monotonic", lambda: next(times))
    limited = RateLimited(60.0)
    assert [limited.allow() for _ in range(4)] == [True, False, True, False]
