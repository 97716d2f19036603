from __future__ import annotations

import numpy as np
import pytest

from echo_hub.core.trust.judging import alarm
from echo_hub.core.trust.numerics import Numerics, NumericsClass
from echo_hub.core.trust.scorers import ScoringPairs
from echo_hub.core.trust.standing import Standings, StandingState
from echo_shared.wire.messages.fields import FIRST_TENANT_VERSION

Q8 = NumericsClass("llama_cpp", "q8_0", "cpu")


class World:
    def __init__(self) -> None:
        self.standings = Standings(Numerics())
        self.pairs = ScoringPairs(self.standings, alarm=alarm(1e-6))

    def join(self, node_id: str, *, kin: str = "", proven: bool = True, room: int = 1, version: int | None = 3) -> None:
        standing = self.standings.connected(node_id, (kin or node_id,))
        standing.numerics = self.standings.numerics.known(Q8)
        standing.state = StandingState.PROVEN if proven else StandingState.NEW
        self.pairs.reported(node_id, room, version)

    def all_pairs(self, version: int = 3) -> set[frozenset[str]]:
        found = (self.pairs.pair(str(lot), version) for lot in range(40))
        return {frozenset(pair) for pair in found if pair is not None}


def test_two_proven_nodes_of_different_owners_are_a_pair() -> None:
    world = World()
    world.join("a", kin="ada")
    world.join("b", kin="ada")
    world.join("new", proven=False)
    world.join("busy", room=0)
    assert world.all_pairs() == set()
    world.join("c")
    assert world.all_pairs() == {frozenset("ac"), frozenset("bc")}
    world.pairs.disconnected("c")
    assert world.all_pairs() == set()


def test_a_pair_may_have_the_version() -> None:
    """The hub knows which of the run's versions a node has. It does not know which tenants' versions the node has."""
    world = World()
    world.join("a")
    world.join("b", version=2)
    assert world.all_pairs(3) == set() and world.all_pairs(2) == world.all_pairs(0) == {frozenset("ab")}
    assert world.all_pairs(FIRST_TENANT_VERSION) == {frozenset("ab")}
    world.pairs.reported("b", 0, 2)
    assert world.all_pairs(0) == set()


@pytest.mark.parametrize(
    ("error", "lie", "agrees"),
    [(0.05, 0.0, True), (2.0, 0.0, False), (0.05, 12.0, False)],
    ids=["both round", "one invents", "one lies about one token"],
)
def test_figures_agree_if_rounding_explains_their_difference(error: float, lie: float, agrees: bool) -> None:
    world = World()
    world.join("a")
    world.join("b")
    odds = np.linspace(-6.0, 2.0, 400)
    wrong = odds + error * np.random.default_rng(3).standard_normal(400)
    wrong[7] += lie
    one, other = (-np.log1p(np.exp(-each)) for each in (odds, wrong))
    assert world.pairs.agree(("a", "b"), one, other, warmth=1.0) is agrees


def test_rounding_is_smaller_at_a_higher_temperature() -> None:
    world = World()
    world.join("a")
    world.join("b")
    odds = np.linspace(-2.0, 2.0, 400)
    noise = 0.35 * np.random.default_rng(3).standard_t(4, 400)
    one, other = (-np.log1p(np.exp(-each)) for each in (odds, odds + noise))
    assert world.pairs.agree(("a", "b"), one, other, warmth=1.0)
    assert not world.pairs.agree(("a", "b"), one, other, warmth=5.0)
