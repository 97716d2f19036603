"""In the chaos benchmark's random sequence of failures, each kind is as frequent as its weight says."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice

from benchmarks.chaos.blows import DATABASE_RESTARTED, OF_GATEWAYS, decks, kinds


def names(seed: int, count: int, **where: bool) -> list[str]:
    return [kind.name for kind in islice(decks(random.Random(seed), **where), count)]


def test_faults_occur_by_their_weights_in_an_order_set_by_the_seed() -> None:
    possible = [kind for kind in kinds() if not kind.lacks]
    one_deck = sum(kind.weight for kind in possible)
    assert Counter(names(1, 2 * one_deck)) == {kind.name: 2 * kind.weight for kind in possible}
    assert names(1, 20) == names(1, 20) != names(2, 20)


def test_a_database_is_restarted_only_if_there_is_a_server() -> None:
    assert DATABASE_RESTARTED.name not in names(1, 200)
    assert DATABASE_RESTARTED.name in names(1, 200, on_postgresql=True)


def test_gateways_and_their_broker_are_killed_only_if_there_are_any() -> None:
    of_gateways = {kind.name for kind in OF_GATEWAYS}
    assert of_gateways.isdisjoint(names(1, 200))
    assert of_gateways <= set(names(1, 200, by_gateways=True))
