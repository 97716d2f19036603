"""Each token of a completion counts once as sampled, however often nodes sampled a token at its position."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo_hub.simulator.fleet import TokenCounts
from echo_hub.simulator.node import HeldLease, Sampling, SimulatedNode
from echo_hub.simulator.population import Traits
from echo_shared.records.rollout import DrawnSpan

TRAITS = Traits(width=1, capacity=2, s_per_token=1.0, prefill_s=0.0, fetch_s=0.0, phase=0.0, price_per_hour=0.0)
NODE = SimulatedNode("node-0", 0, TRAITS)


def sampling(index: int, given: int, drawn: int) -> Sampling:
    """Return the sampling of a completion of 100 tokens that began after `given` tokens and stopped after `drawn`."""
    lease = HeldLease(node=NODE, lease_id=1, group_id=0, policy_version=0)
    before = (DrawnSpan(node_id="another", policy_version=0, num_tokens=given),) if given else ()
    one = Sampling(lease, index, 100, before)
    one.draws_from, one.ends_at, one.stopped_at = 0.0, 100.0 - given, drawn - given + 0.5
    return one


def test_tokens_at_known_places_count_as_sampled_again() -> None:
    counts = TokenCounts()
    counts.count([sampling(0, 0, 40), sampling(0, 30, 100), sampling(1, 0, 100)], now=1e6)
    assert (counts.drawn, counts.given, counts.again) == (40 + 70 + 100, 30, 10)


def test_a_node_that_vanishes_with_nothing_is_no_failure() -> None:
    counts = TokenCounts()
    counts.lose([])
    counts.lose([3, 4])
    assert (counts.failures, counts.lost) == (1, 7)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(0, 50)), max_size=8))
def test_sampled_tokens_are_counted_once_or_as_repeated(begun: list[tuple[int, int, int]]) -> None:
    """Samplings may begin after the known tokens of their completion, or sample known tokens again. Each token must be
    counted once, as new or as repeated.
    """
    there: dict[int, int] = {}
    samplings = []
    for index, given_tokens, more in begun:
        start = min(given_tokens, there.get(index, 0))
        samplings.append(sampling(index, start, start + more))
        there[index] = max(there.get(index, 0), start + more)
    counts = TokenCounts()
    counts.count(samplings, now=1e6)
    assert counts.drawn - counts.again == sum(there.values()) and counts.again >= 0
