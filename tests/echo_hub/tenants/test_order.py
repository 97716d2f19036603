from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo_hub.tenants.order import GAP_S, ModelOrder, ModelOrders

SEQ_IDS = st.permutations(range(1, 9))


@given(SEQ_IDS, st.data())
def test_each_request_runs_once_and_in_order(arrivals: list[int], data: st.DataObject) -> None:
    """Requests arrive and run in any order of events. A request must run once all requests before it have run."""
    order, ran, waiting = ModelOrder(1), [], list(arrivals)
    while waiting or order.is_ready:
        if waiting and (not order.is_ready or data.draw(st.booleans())):
            order.arrive(waiting.pop(), now=0.0)
        else:
            ran.append(order.next_seq)
            order.finish(order.next_seq, now=0.0)
    assert ran == sorted(arrivals)
    assert order.num_waiting == 0 and order.gap_ends_at is None


@given(st.sets(st.integers(1, 12), min_size=1), st.floats(0, 1_000))
def test_requests_behind_a_gap_fail_when_it_has_lasted_long(there: set[int], at: float) -> None:
    order, ran = ModelOrder(1), []
    for seq_id in there:
        order.arrive(seq_id, now=0.0)
    while order.is_ready:
        ran.append(order.next_seq)
        order.finish(order.next_seq, now=at)
    behind = sorted(there - set(ran))
    since = at if ran else 0.0
    assert order.gap_ends_at == (since + GAP_S if behind else None)
    assert order.give_up(since + GAP_S - 1e-3) == ()
    assert order.give_up(since + GAP_S) == tuple(behind)
    assert order.next_seq == max(there) + 1 and order.gap_ends_at is None
    assert all(order.is_late(seq_id) for seq_id in range(1, max(there) + 1))


def test_the_clock_of_a_gap_starts_with_each_gap() -> None:
    order = ModelOrder(1)
    order.arrive(2, now=0.0)
    order.arrive(4, now=100.0)
    assert order.gap_ends_at == GAP_S
    order.arrive(1, now=200.0)
    assert order.gap_ends_at is None
    order.finish(1, now=200.0)
    order.finish(2, now=250.0)
    assert order.gap_ends_at == 250.0 + GAP_S


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=30))
def test_models_take_turns(arrivals: list[str]) -> None:
    """A model with many requests must never be served before a model that has waited longer since its last turn."""
    orders = ModelOrders()
    for model_id in "abc":
        orders.add(model_id, ModelOrder(0), tenant_id=model_id)
    numbers = dict.fromkeys("abc", 0)
    for model_id in arrivals:
        order = orders.of(model_id)
        assert order is not None
        order.arrive(numbers[model_id], now=0.0)
        numbers[model_id] += 1
    served: list[str] = []
    while (turn := orders.take()) is not None:
        model_id, seq_id = turn
        left = [each for each in "abc" if (one := orders.of(each)) is not None and one.is_ready]
        last = {each: max((i for i, name in enumerate(served) if name == each), default=-1) for each in left}
        assert last[model_id] == min(last.values())
        served.append(model_id)
        order = orders.of(model_id)
        assert order is not None
        order.finish(seq_id, now=0.0)
    assert sorted(served) == sorted(arrivals)


def test_a_gap_of_one_model_leaves_the_others_alone() -> None:
    orders = ModelOrders()
    for model_id in "ab":
        orders.add(model_id, ModelOrder(1), tenant_id=model_id)
    (first, second) = (orders.of("a"), orders.of("b"))
    assert first is not None and second is not None
    first.arrive(3, now=0.0)
    second.arrive(1, now=0.0)
    assert orders.take() == ("b", 1)
    assert orders.next_gap_end() == GAP_S
    (gap,) = orders.give_up(GAP_S)
    assert (gap.model_id, gap.missing, gap.failed) == ("a", 1, (3,))
    orders.remove("b")
    assert orders.take() is None and orders.of("b") is None


def test_tenants_take_turns_however_many_models_they_have() -> None:
    orders, served = ModelOrders(), []
    for tenant_id, model_id in (("ada", "a"), ("ada", "b"), ("ada", "c"), ("eve", "d")):
        order = ModelOrder(0)
        for seq_id in range(4):
            order.arrive(seq_id, now=0.0)
        orders.add(model_id, order, tenant_id=tenant_id)
    for _ in range(8):
        turn = orders.take()
        assert turn is not None
        order_of = orders.of(turn[0])
        assert order_of is not None
        order_of.finish(turn[1], now=0.0)
        served.append(turn[0])
    assert served == ["a", "d", "b", "d", "c", "d", "a", "d"]


def test_a_tenant_with_a_running_request_does_not_hold_up_others() -> None:
    orders = ModelOrders()
    for model_id, tenant_id in (("a1", "ada"), ("a2", "ada"), ("b1", "bob")):
        order = ModelOrder(1)
        orders.add(model_id, order, tenant_id=tenant_id)
        order.arrive(1, now=0.0)
    assert orders.take() == ("a1", 1)
    assert orders.take({"ada": "a1"}) == ("b1", 1)
    assert orders.take({"ada": "a1", "bob": "b1"}) is None
    assert orders.take(among={"a2"}) == ("a2", 1) and orders.take(among={"c"}) is None
