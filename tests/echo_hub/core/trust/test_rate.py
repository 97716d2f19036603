from __future__ import annotations

import pytest

from echo_hub.core.trust.rate import is_drawn, long_proven, share_checked, worth


@pytest.mark.parametrize(
    ("verified", "share"), [(0, 1.0), (63, 1.0), (64, 1.0), (128, 0.5), (256, 0.25), (640, 0.1), (10**6, 0.1)]
)
def test_the_more_were_verified_in_a_row_the_fewer_are_checked(verified: int, share: float) -> None:
    assert share_checked(verified, 64, 0.1) == share


def test_which_ones_follows_from_the_secret_and_the_id() -> None:
    ids = [f"{lease}-{index}" for lease in range(2_000) for index in range(4)]
    drawn = [name for name in ids if is_drawn(b"secret", name, 0.1)]
    assert drawn == [name for name in ids if is_drawn(b"secret", name, 0.1)]
    assert 700 < len(drawn) < 900
    assert drawn != [name for name in ids if is_drawn(b"another", name, 0.1)]


def test_rollouts_checked_at_a_lower_rate_are_checked_at_a_higher_one() -> None:
    ids = [f"{lease}-0" for lease in range(1_000)]
    assert {i for i in ids if is_drawn(b"s", i, 0.1)} < {i for i in ids if is_drawn(b"s", i, 0.5)}
    assert all(is_drawn(b"s", i, 1.0) for i in ids) and not any(is_drawn(b"s", i, 0.0) for i in ids)


@pytest.mark.parametrize(("num_tokens", "counts"), [(1, 1), (127, 1), (128, 2), (511, 7), (512, 8), (100_000, 8)])
def test_long_rollouts_count_for_several(num_tokens: int, counts: int) -> None:
    assert worth(num_tokens) == counts


@pytest.mark.parametrize(("first", "least"), [(64, 0.03), (1, 1.0), (4096, 0.5), (64, 0.0)])
def test_a_long_proven_node_is_checked_at_the_least_rate(first: int, least: float) -> None:
    verified = long_proven(first, least)
    assert verified > first and share_checked(verified, first, least) <= max(least, 0.001)
