import sys
from collections.abc import Iterator

import pytest

from echo_hub.net.descriptors import RESERVED, room_for

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sockets are no descriptors there")


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield the list [soft limit, hard limit], which replaces the system's limits on the process's open files."""
    import resource

    limits = [1_024, 4_096]

    def set_limits(_: int, new: tuple[int, int]) -> None:
        if new[0] > limits[1]:
            raise ValueError("not allowed to raise maximum limit")
        limits[:] = new

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    yield limits


def test_the_limit_is_raised_as_far_as_it_is_needed(limit: list[int]) -> None:
    assert room_for(2_000) == 2_000
    assert limit == [2_000 + RESERVED, 4_096]
    assert room_for(500) == 500 and limit[0] == 2_000 + RESERVED, "the limit is never lowered"


def test_a_refused_limit_is_not_an_error(limit: list[int]) -> None:
    assert room_for(10_000) == 4_096 - RESERVED
    assert limit == [4_096, 4_096]


def test_a_process_that_may_open_hardly_anything_keeps_half_for_itself(limit: list[int]) -> None:
    limit[:] = [300, 300]
    assert room_for(10_000) == 150


def test_an_infinite_limit_leaves_room_for_all(limit: list[int]) -> None:
    import resource

    limit[:] = [resource.RLIM_INFINITY, resource.RLIM_INFINITY]
    assert room_for(1_000_000) == 1_000_000
