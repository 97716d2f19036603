from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echo_hub.store.board import read_board, read_credited_node
from echo_hub.store.elsewhere import read_known_hubs, read_run_credit, take_in
from echo_hub.store.store import Store
from echo_shared.records.credit import BoardQuery, RunElsewhere
from echo_shared.records.run_credit import NodeCredit, RunCredit
from echo_shared.signing.identity import Identity
from echo_shared.signing.signed_document import moment

HUB = Identity.generate()


def said(at: float, *nodes: tuple[str, int], run: str = "1") -> RunCredit:
    return RunCredit(
        hub_key=HUB.public_key.hex(),
        run_id=f"{HUB.node_id}-{run}",
        run_name="other",
        issued_at=moment(at),
        nodes=tuple(NodeCredit(node_id=name, node_name=name.upper(), rollouts=n, tokens=10 * n) for name, n in nodes),
    )


def totals(books: Store) -> dict[str, tuple[int, int]]:
    return {row.node: (row.rollouts, row.all_rollouts) for row in books.read(read_board, BoardQuery(), 9.0).rows}


def test_credit_of_other_hubs_counts_once_for_each_run(store: Store, records: Any) -> None:
    store.apply(records.one_step(1, lease_id=1, group_id=0, node_id="a"), now=1.0)
    assert store.write(take_in, said(10.0, ("a", 5), ("b", 7)), 20.0) == "new"
    assert store.write(take_in, said(10.0, ("a", 5), ("b", 7)), 21.0) == "known"
    assert store.write(take_in, said(9.0, ("a", 99)), 21.0) == "known"
    assert totals(store) == {"a": (2, 7), "b": (0, 7)}
    assert store.write(take_in, said(11.0, ("a", 6), ("c", 1)), 22.0) == "newer"
    assert store.write(take_in, said(5.0, ("a", 100), run="2"), 22.0) == "new"
    assert totals(store) == {"a": (2, 108), "c": (0, 1)}, (
        "the newer statement no longer names b, so b has none of its credit"
    )
    store.apply(records.one_step(2, lease_id=2, group_id=1, node_id="a"), now=2.0)
    assert totals(store)["a"] == (4, 110)
    board = store.read(read_board, BoardQuery(order="elsewhere"), 9.0)
    assert (board.has_elsewhere and [row.name for row in board.rows] == ["a", "C"]) or board.rows[0].name == "A"
    assert store.read(read_known_hubs) == {HUB.public_key.hex()}
    found = store.read(read_credited_node, "a", 9.0)
    assert found is not None and found[1].elsewhere == (
        RunElsewhere(run_id=f"{HUB.node_id}-2", run_name="other", rollouts=100, tokens=1_000),
        RunElsewhere(run_id=f"{HUB.node_id}-1", run_name="other", rollouts=6, tokens=60),
    )


def test_a_hub_adds_another_hubs_credit(store: Store, records: Any, tmp_path: Path) -> None:
    store.apply(records.one_step(1, lease_id=1, group_id=0, node_id="b"), now=1.0)
    store.apply(records.one_step(2, lease_id=2, group_id=1, node_id="a"), now=1.0)
    about = {"run_id": f"{HUB.node_id}-7", "run_name": "this", "hub_key": HUB.public_key, "now": 50.0}
    mine = store.read(read_run_credit, **about)
    assert [(node.node_id, node.rollouts, node.tokens) for node in mine.nodes] == [("a", 2, 5), ("b", 2, 5)]
    there = Store.open(f"sqlite:///{tmp_path / 'there.db'}")
    books = there
    assert books.write(take_in, mine, 60.0) == "new"
    assert totals(books) == {"a": (0, 2), "b": (0, 2)}
    again = books.read(read_run_credit, **{**about, "run_id": f"{HUB.node_id}-8"})
    assert again.nodes == (), "credit from other hubs is not passed on as this run's"
    there.close()


@pytest.mark.parametrize("number", [0, 2_500])
def test_an_export_may_have_many_nodes(store: Store, number: int) -> None:
    store.write(take_in, said(1.0, *((f"{i:05d}", 1) for i in range(number))), 2.0)
    assert store.read(read_board, BoardQuery(limit=1), 9.0).num_ranked == number
