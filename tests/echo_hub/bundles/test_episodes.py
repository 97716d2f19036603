from __future__ import annotations

from echo_hub.bundles.episodes import turns_of
from tests.echo_hub.bundles.made import group, lease, payload_of


def test_a_turn_is_used_only_behind_all_its_earlier_turns() -> None:
    observed = payload_of(5, 6, 1, observed=(8, 9))
    leases = [lease(number, turn=turn, payload=observed) for number, turn in ((1, 0), (2, 1), (3, 3), (4, 2**32 - 1))]
    turns = list(turns_of(group(1, *leases)))
    assert [(one.rollout.turn, len(one.earlier)) for one in turns] == [(0, 0), (1, 1)]
