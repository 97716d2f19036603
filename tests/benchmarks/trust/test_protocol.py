from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.trust import protocol
from benchmarks.trust.protocol import HONEST_WITHIN_S, Unnoticed


def test_what_is_held_at_once_is_what_overlaps() -> None:
    assert protocol._most_at_once([]) == 0
    assert protocol._most_at_once([(0.0, 2, 10.0), (5.0, 3, 1.0), (7.0, 1, 10.0)]) == 5
    assert protocol._most_at_once([(0.0, 2, 10.0), (10.0, 2, 10.0)]) == 2, "one ends as the other begins"


def test_fresh_keys_may_have_no_more_than_strangers_and_keep_nobody_out() -> None:
    joined = Counter(joined=2_000)
    noticed = protocol._stormed(joined, held=32, quota=32, honest_s=0.2)
    assert noticed.figures == {"held_at_once": 32, "honest_joined_s": 0.2}
    with pytest.raises(Unnoticed, match="33 rollouts at once"):
        protocol._stormed(joined, held=33, quota=32, honest_s=0.2)
    with pytest.raises(Unnoticed, match="joined after"):
        protocol._stormed(joined, held=32, quota=32, honest_s=HONEST_WITHIN_S + 0.1)
