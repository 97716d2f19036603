"""Choice of the cheapest set of nodes: within the spending cap, sufficient for the learner if any set is, and near the
linear optimum.
"""

from __future__ import annotations

import time
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.core.activation.choice import Demand, cheapest

NODES = st.lists(
    st.tuples(st.floats(0, 50).map(lambda u: u if u > 1e-6 else 0.0), st.floats(0.01, 5)), max_size=40
).map(lambda rows: np.array(rows, dtype=np.float64).reshape(-1, 2))


def linear_optimum(useful: np.ndarray, cost: np.ndarray, need: float) -> float:
    """Return the optimum if nodes could be bought in fractions: nodes in order of price, the last one in part."""
    total, rows = 0.0, sorted((c / u, u) for u, c in zip(useful, cost, strict=True) if u > 0)
    for price, brings in rows:
        part = min(brings, need)
        total += price * part
        need -= part
    return total if need <= 1e-9 else inf


def test_the_examples_nodes() -> None:
    useful, cost = np.array([6.0, 5.0, 9.0]), np.array([0.3, 0.4, 0.9])
    assert cheapest(useful, cost, need=8, budget=inf).tolist() == [True, True, False]
    assert cheapest(useful, cost, need=9, budget=inf).tolist() == [True, True, False]
    assert cheapest(useful, cost, need=12, budget=inf).tolist() == [True, False, True]
    assert cheapest(useful, cost, need=99, budget=1.0).tolist() == [True, True, False], (
        "the set that brings most for the money"
    )
    assert not cheapest(useful, cost, need=0, budget=inf).any()
    assert not cheapest(np.zeros(0), np.zeros(0), need=5, budget=inf).any()


def test_a_large_expensive_node_is_not_chosen_for_a_small_remainder() -> None:
    useful, cost = np.array([10.0, 100.0, 1.0]), np.array([1.0, 11.0, 0.2])
    assert cheapest(useful, cost, need=11, budget=inf).tolist() == [True, False, True]


@given(NODES, st.floats(0, 400), st.floats(0, 60))
def test_the_choice_is_in_budget_and_sufficient_if_possible(nodes: np.ndarray, need: float, budget: float) -> None:
    useful, cost = nodes[:, 0], nodes[:, 1]
    chosen = cheapest(useful, cost, need=need, budget=budget)
    assert cost[chosen].sum() <= budget * (1 + 1e-9)
    assert (useful[chosen] > 0).all()
    if cost.sum() <= budget and useful.sum() >= need + 1e-9:
        assert useful[chosen].sum() >= need - 1e-6


@given(NODES, st.floats(0.1, 400))
def test_the_cost_exceeds_the_linear_optimum_by_at_most_one_node(nodes: np.ndarray, need: float) -> None:
    useful, cost = nodes[:, 0], nodes[:, 1]
    best = linear_optimum(useful, cost, need)
    if best < inf:
        chosen = cheapest(useful, cost, need=need, budget=inf)
        spent = cost[chosen].sum()
        assert spent <= best + cost[chosen].max() + 1e-9
        assert spent <= 1.05 * best + cost[useful > 0].max()


@given(st.integers(0, 2**32 - 1), st.integers(150, 400))
def test_where_nodes_are_many_the_cost_is_within_five_percent(seed: int, count: int) -> None:
    chance = np.random.default_rng(seed)
    useful = chance.lognormal(0, 0.5, count)
    cost = useful * np.exp(chance.uniform(0, np.log(4), count))
    need = chance.uniform(0.4, 0.9) * useful.sum()
    chosen = cheapest(useful, cost, need=need, budget=inf)
    assert useful[chosen].sum() >= need
    assert cost[chosen].sum() <= 1.05 * linear_optimum(useful, cost, need)


@pytest.mark.parametrize("budget", [inf, 1000.0])
def test_a_hundred_thousand_nodes_are_one_pass(budget: float) -> None:
    chance = np.random.default_rng(0)
    useful, cost = chance.lognormal(0, 1, 100_000), chance.lognormal(0, 1, 100_000)
    began_at = time.process_time()
    chosen = cheapest(useful, cost, need=20_000.0, budget=budget)
    assert time.process_time() - began_at < 2, "tens of milliseconds on an idle machine"
    assert chosen.any() and cost[chosen].sum() <= budget


@pytest.mark.parametrize(
    ("late_s", "staleness", "every", "expected"),
    [
        (3.0, 1, 1, 7.0),  # A step of 10 s, less 3 s for the broadcast and one rollout.
        (3.0, 2, 1, 10.0),  # A version is useful at most until the next one, 10 s later.
        (12.0, 1, 1, 0.0),
        (25.0, 4, 3, 5.0),  # A version serves three steps and is useful for 15 s in total: 5 s per step.
    ],
)
def test_useful_time_is_when_a_nodes_rollouts_can_be_used(
    late_s: float, staleness: int, every: int, expected: float
) -> None:
    demand = Demand(rollouts_per_step=8, step_s=10.0, max_staleness=staleness, publish_every=every)
    assert demand.useful(1.0, late_s) == pytest.approx(expected)
    assert demand.useful(np.array([1.0, 2.0]), np.array([late_s, late_s])) == pytest.approx([expected, 2 * expected])
    assert demand.need == 8


def test_without_staleness_no_number_of_nodes_is_enough() -> None:
    demand = Demand(rollouts_per_step=8, step_s=10.0, max_staleness=0, publish_every=1)
    assert demand.need == inf and demand.useful(2.0, 99.0) == 20.0
