from __future__ import annotations

from itertools import pairwise

import pytest

from echo_shared.sampling.permutation import permuted


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 17, 64, 65, 1_000])
def test_every_place_has_another_number(size: int) -> None:
    assert sorted(permuted(place, size, "key") for place in range(size)) == list(range(size))


def test_another_key_is_another_order() -> None:
    one, other = ([permuted(place, 100, key) for place in range(100)] for key in (1, 2))
    assert one != other and one != sorted(one)
    assert sum(a == b for a, b in zip(one, other, strict=True)) < 10


def test_neighbours_are_spread() -> None:
    found = [permuted(place, 10**9, 0) for place in range(100)]
    assert max(found) > 9 * 10**8 and min(found) < 10**8
    assert sum(abs(a - b) < 10**6 for a, b in pairwise(found)) < 5
