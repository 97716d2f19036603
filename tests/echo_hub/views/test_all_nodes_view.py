from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from echo_hub.core.accounting.effects import SendLease
from echo_hub.views.all_nodes import node_view
from echo_shared.records.run import Accounting, LiveNode, NodeTotals
from echo_shared.wire.messages import LeaseReturned


def totals(node_id: str) -> NodeTotals:
    return NodeTotals(node_id=node_id, name=node_id, backend="torch", device="cpu", first_seen=1.0, last_seen=2.0)


def test_a_node_that_is_away_may_still_owe_rollouts() -> None:
    view = node_view(totals("a"), None, in_flight=3)
    assert (view.connected, view.activity, view.capacity, view.in_flight) == (False, "", 0, 3)


def test_a_nodes_current_precision_overrides_that_of_its_last_check() -> None:
    known = replace(totals("a"), precision="q8_0")
    assert node_view(known, LiveNode(precision="bf16"), in_flight=0).precision == "bf16"
    assert node_view(known, None, in_flight=0).precision == "q8_0"


async def test_work_under_way(hub: Any) -> None:
    await hub.join("a", capacity=4)
    await hub.driven.until(lambda: sum(len(lease.indices) for lease in hub.driven.of(SendLease)) == 4)
    (node,) = await hub.pages.nodes()
    assert (node.totals.node_id, node.totals.name) == ("a", "a's laptop")
    assert (node.connected, node.activity) == (True, "sampling")
    assert (node.capacity, node.in_flight, node.tokens_per_s, node.policy_version) == (4, 4, 12.5, 0)
    assert (node.totals.received, node.totals.trained_rollouts, node.totals.dropped) == (0, 0, 0)
    assert node.totals.last_seen >= time.time() - 60
    view = await hub.pages.run_view()
    assert view.state_detail == "collecting rollouts"
    assert view.accounting == Accounting(leased=4, in_flight=4)
    lease = hub.driven.of(SendLease)[0]
    returned = LeaseReturned(lease_id=lease.lease_id, indices=lease.indices, reason="the owner plays")
    await hub.nodes.node_said("a", returned)
    await hub.nodes.node_left("a")
    await hub.join("b")
    await hub.driven.until(lambda: hub.driven.of(SendLease)[-1].node_id == "b")
    view = await hub.pages.run_view()
    assert view.accounting.dropped == {"returned": len(lease.indices)}
    assert view.accounting.balanced
    gone = next(node for node in await hub.pages.nodes() if node.totals.node_id == "a")
    assert (gone.connected, gone.activity, gone.capacity, gone.totals.last_seen) == (False, "", 0, 900.0)
