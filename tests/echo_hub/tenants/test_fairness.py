from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from echo_hub.tenants.fairness import QUANTUM, FairOrder

COST = st.floats(1.0, 40_000.0)
MOST_COST = 40_000.0


def taken(order: FairOrder[str], number: int) -> list[str]:
    return [key for _ in range(number) if (key := order.take()) is not None]


def test_a_tenant_with_many_requests_does_not_delay_another() -> None:
    order = FairOrder[str]()
    for number in range(1_000):
        order.add("many", f"many{number}", QUANTUM)
    order.add("one", "one0", QUANTUM)
    assert "one0" in taken(order, 2)


def test_requests_of_one_tenant_keep_their_order() -> None:
    order = FairOrder[str]()
    for key, cost in (("a", 9_000.0), ("b", 1.0), ("c", 500.0)):
        order.add("Ada", key, cost)
    assert order.waiting("Ada") == len(order) == 3
    assert taken(order, 4) == ["a", "b", "c"] and order.take() is None and len(order) == 0


def test_a_cancelled_request_is_never_taken() -> None:
    order = FairOrder[str]()
    order.add("Ada", "a", 1.0)
    order.add("Ada", "a", 1.0)
    order.add("Bob", "b", 1.0)
    order.remove("a")
    order.remove("a")
    order.remove("unknown")
    assert order.waiting("Ada") == 0 and taken(order, 3) == ["b"]


def test_requests_that_go_early_are_paid_for_later() -> None:
    order = FairOrder[str]()
    for number in range(9):
        order.add("Ada", f"Ada{number}", QUANTUM)
    assert order.take() == "Ada0"
    for number in range(1, 9):
        order.take_early(f"Ada{number}")
    assert len(order) == 0
    for number in range(20):
        order.add("Ada", f"more{number}", QUANTUM)
        order.add("Bob", f"Bob{number}", QUANTUM)
    assert sum(key.startswith("Bob") for key in taken(order, 8)) == 8, "Bob gets what Ada had"
    assert 3 <= sum(key.startswith("Bob") for key in taken(order, 8)) <= 5


def test_tokens_that_a_request_did_not_need_are_given_back() -> None:
    """Ada's requests are expected to cost ten times what they really cost. The estimates for Bob's requests are
    right.
    """
    order, real, used = FairOrder[str](), {"Ada": 1_000.0, "Bob": 1_000.0}, Counter[str]()
    for number in range(2_000):
        order.add("Ada", f"Ada{number}", 10_000.0)
        order.add("Bob", f"Bob{number}", 1_000.0)
    for key in taken(order, 1_000):
        tenant = key[:3]
        used[tenant] += int(real[tenant])
    unpaid = used["Bob"] / used["Ada"]
    used.clear()
    for _ in range(1_000):
        tenant = (order.take() or "")[:3]
        used[tenant] += int(real[tenant])
        order.settle(tenant, 9_000.0 if tenant == "Ada" else 0.0)
    assert unpaid > 8 and 0.8 < used["Bob"] / used["Ada"] < 1.25
    order.settle("nobody", 1e9)
    assert order.waiting("nobody") == 0


def test_tokens_above_the_expected_ones_are_paid_for() -> None:
    """Ada's requests are expected to cost a tenth of what they really cost. Sometimes none of her requests waits."""
    order, real, used = FairOrder[str](), {"Ada": 10_000.0, "Bob": 1_000.0}, Counter[str]()
    for number in range(2_000):
        if number % 3:
            order.add("Ada", f"Ada{number}", 1_000.0)
        order.add("Bob", f"Bob{number}", 1_000.0)
        tenant = (order.take() or "")[:3]
        used[tenant] += int(real[tenant])
        order.settle(tenant, 1_000.0 - real[tenant])
    assert 0.8 < used["Bob"] / used["Ada"] < 1.25


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(COST, min_size=1, max_size=8), min_size=2, max_size=5),
    st.integers(20, 200),
)
def test_waiting_tenants_get_equal_shares_within_the_bound(costs: list[list[float]], turns: int) -> None:
    order, given, sent = FairOrder[tuple[int, int]](), Counter[int](), Counter[int]()

    def refill(tenant: int) -> None:
        number = sent[tenant]
        order.add(str(tenant), (tenant, number), costs[tenant][number % len(costs[tenant])])
        sent[tenant] += 1

    for tenant in range(len(costs)):
        refill(tenant)
        refill(tenant)
    for _ in range(turns):
        key = order.take()
        assert key is not None
        tenant, number = key
        given[tenant] += int(costs[tenant][number % len(costs[tenant])])
        refill(tenant)
        shares = [given[each] for each in range(len(costs))]
        assert max(shares) - min(shares) <= 2 * QUANTUM + MOST_COST + turns, "one token a turn is lost by rounding"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_tenant_is_starved_whatever_the_others_do(data: st.DataObject) -> None:
    """Others come, go, cancel and get tokens back at will. A request that waits is still taken in bounded time."""
    order, number = FairOrder[str](), 0
    order.add("mine", "mine", MOST_COST)
    spent = 0.0
    costs: dict[str, float] = {}
    while True:
        for _ in range(data.draw(st.integers(1, 3))):
            tenant, cost = data.draw(st.sampled_from("abc")), data.draw(COST)
            number += 1
            costs[f"{tenant}{number}"] = cost
            order.add(tenant, f"{tenant}{number}", cost)
        if costs and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(costs)))
            order.remove(gone)
        key = order.take()
        assert key is not None
        if key == "mine":
            return
        spent += costs.pop(key)
        assert spent <= 3 * (2 * MOST_COST + 2 * QUANTUM), "each of the three others got its share and no more"
