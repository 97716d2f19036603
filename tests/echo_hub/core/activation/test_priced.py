"""Arrays of priced nodes: each row stays assigned to its node while others are added and removed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo_hub.core.activation.priced import Priced


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60), st.integers(0, 150))
def test_each_row_stays_its_nodes(changes: list[tuple[int, bool]], many: int) -> None:
    priced, costs = Priced(), {}
    for number in range(many):
        priced.add(f"more-{number}", 1.0 + number, 0.0)
        costs[f"more-{number}"] = 1.0 + number
    for at, (number, comes) in enumerate(changes):
        node_id = str(number)
        if comes and node_id not in costs:
            priced.add(node_id, float(at + 1), float(at))
            costs[node_id] = float(at + 1)
        elif not comes and node_id in costs:
            priced.remove(node_id)
            del costs[node_id]
    assert {node_id: float(priced.cost[row]) for node_id, row in priced.row_of.items()} == costs
    assert [priced.row_of[node_id] for node_id in priced.node_ids] == list(range(len(priced)))
    assert not priced.active.any() and len(priced.rate) == len(costs)
