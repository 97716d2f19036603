from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from echo_hub.core.capacity.model import NodeClass, Workload
from echo_hub.dashboard.model import AdvisedNodes, CapacityView
from echo_hub.views import beside
from echo_hub.views import capacity as capacity_module
from echo_hub.views import pace as pace_module
from echo_hub.views.capacity import CapacityViews, expect, verdict
from echo_hub.views.pace import RunPace, kinds_of
from tests.echo_hub.written_books import BEGAN, PERIOD_S, write_books

FAST = NodeClass(name="torch · RTX", count=4, rollouts_per_s=4.0, latency_s=0.5)
WORKLOAD = Workload(mode="async", rollouts_per_step=32, train_s=1.9, hand_off_s=0.1, broadcast_s=0.5, max_staleness=3)


def said(workload: Workload, *nodes: NodeClass) -> str:
    expected, advice = expect(RunPace(workload=workload, nodes=nodes, kinds=kinds_of(nodes)))
    return verdict(workload, nodes, expected, advice)


@pytest.fixture
async def written(make_hub: Any) -> Any:
    hub = await make_hub(running=False)
    write_books(hub.driven.store)
    return hub


def test_a_learner_that_is_fed() -> None:
    assert said(WORKLOAD, replace(FAST, count=5)) == (
        "The learner can train 95% of the time. The rest, 5%, is its own hand-off. "
        "The nodes could return 25% more than the learner needs."
    )


def test_nodes_that_are_too_few() -> None:
    assert said(WORKLOAD, replace(FAST, count=3)) == (
        "At this pace, the learner waits 25% of the time: it needs 16 rollouts/s, the nodes return 12. "
        "Add 1 node like torch · RTX."
    )
    assert "Add 2 nodes like" in said(WORKLOAD, replace(FAST, count=2))


def test_nodes_whose_rollouts_are_too_late() -> None:
    text = said(replace(WORKLOAD, max_staleness=0), replace(FAST, count=6))
    assert text.startswith("At this pace, the learner waits ")
    assert "too old for a staleness of 0: version and slowest rollout take up to 1 s, a step 2 s." in text
    assert text.endswith("Set training.max_staleness = 2.")


def test_versions_that_follow_each_other_too_fast() -> None:
    text = said(replace(WORKLOAD, broadcast_s=3.0, max_staleness=4), replace(FAST, count=8))
    assert "a version takes 3 s to reach the nodes, and a new one comes every 2 s." in text
    assert text.endswith("Set training.publish_every = 2.")
    both = said(replace(WORKLOAD, broadcast_s=3.0, max_staleness=1), replace(FAST, count=8))
    assert both.endswith("Set training.publish_every = 2 and training.max_staleness = 4.")


SLOW = NodeClass(name="llama_cpp · cpu", count=2, rollouts_per_s=0.3, latency_s=150.0)
HOME = Workload(mode="async", rollouts_per_step=128, train_s=60.0, hand_off_s=1.0, broadcast_s=3.0, max_staleness=2)


def test_if_nothing_is_enough_the_advice_says_how_far_each_change_gets() -> None:
    text = said(HOME, SLOW)
    assert text.endswith(
        "From 29%, it could reach: 5 more nodes like llama_cpp · cpu to 86%. "
        "5 more nodes like llama_cpp · cpu and training.max_staleness = 3 together are enough."
    )
    late = said(HOME, replace(SLOW, latency_s=700.0, count=9))
    assert "training.max_staleness = 6 to 56%; leases half as long" in late and "to 44%" in late
    assert "llama_cpp" not in late, "more of these nodes would not help"


def test_a_fleet_that_is_far_too_slow_is_told_how_much_helps() -> None:
    gpu = NodeClass(name="torch · H200", count=2, rollouts_per_s=10.5, latency_s=0.5)
    workload = Workload(
        mode="async", rollouts_per_step=256, train_s=0.6, hand_off_s=0.01, broadcast_s=0.5, max_staleness=2
    )
    slow = "At this pace, the learner waits 95% of the time: it needs 420 rollouts/s, the nodes return 21: "
    slow += "20 times too slow. "
    assert said(workload, gpu) == f"{slow}Add 47 nodes like torch · H200."
    assert said(workload, replace(gpu, latency_s=4.0)) == (
        f"{slow}No single change keeps it busy all of the time. From 5%, it could reach: 38 more nodes like "
        "torch · H200 to 36%. 38 more nodes like torch · H200 and batches 4 times as large (training.group_size or "
        "training.groups_per_step) together are enough."
    )
    assert said(replace(workload, mode="sequential"), gpu).endswith(
        "With a staleness of 2, in async mode, it could train 5% of the time, "
        "and with 47 more nodes like torch · H200 98%."
    )


def test_the_advice_reports_that_nothing_helps() -> None:
    text = said(replace(HOME, broadcast_s=3_000.0), replace(SLOW, count=99, latency_s=1.0))
    assert text.endswith("Neither more such nodes nor shorter leases get it beyond 2%: versions must arrive sooner.")


def test_advice_that_needs_another_mode() -> None:
    text = said(replace(WORKLOAD, mode="sequential"), FAST)
    assert "in sequential mode the learner always waits" in text
    assert text.endswith("With a staleness of 2, in async mode, it could train 95% of the time.")
    assert said(replace(WORKLOAD, mode="colocated"), FAST).endswith(
        "In async mode, nodes would sample while it trains."
    )


def test_without_nodes_the_advice_names_none() -> None:
    assert "enough rollouts recently" in said(WORKLOAD)


async def test_the_view_of_a_run_with_handmade_records(written: Any) -> None:
    """Steps are planned every 4 s and train for 2 s. In between, the learner waits for
    1.9 s, and 0.1 s are hand-off (from a step's plan to its start)."""
    views = CapacityViews(store=written.driven.store, started_at=BEGAN)
    view = views.read(written.config, None, waits_for=None)
    assert view is not None
    seconds = 5 * PERIOD_S + 5.1
    assert view.window_s == pytest.approx(seconds)
    assert view.idle_by_reason["rollouts"] == pytest.approx(5 * 1.9 / seconds)
    assert view.idle_by_reason["hand_off"] == pytest.approx(6 * 0.1 / seconds)
    assert view.idle_by_reason["start"] == pytest.approx(3 / seconds)
    assert view.idle_share == pytest.approx(1 - 12 / seconds)
    assert (view.rollouts_per_s, view.needed_per_s) == pytest.approx((4 + 2 / 3, 8 / 2.1))
    assert (view.step_s, view.broadcast_s, view.missing_per_s) == pytest.approx((2.1, 0.5, 0.0))
    assert view.advised_nodes == (
        AdvisedNodes(kind="torch · RTX 4070", count=0),
        AdvisedNodes(kind="llama_cpp · Old laptop", count=0),
    )
    assert view.verdict.startswith("The learner can train 95% of the time.")


async def test_the_current_wait_counts(written: Any) -> None:
    views = CapacityViews(store=written.driven.store, started_at=BEGAN)
    view = views.read(written.config, None, waits_for="down")
    assert view is not None
    assert view.idle_by_reason["down"] > 0.99, "its last step was decades ago"


async def test_capacity_is_read_now_and_then(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, asked = written.driven.store, []
    read = pace_module.read_recent_rollouts
    monkeypatch.setattr(
        pace_module, "read_recent_rollouts", lambda connection, newest: asked.append(newest) or read(connection, newest)
    )
    views = CapacityViews(store=store, started_at=BEGAN)
    first = views.read(written.config, {"fast0"}, waits_for=None)
    assert views.read(written.config, {"fast0"}, waits_for=None) is first
    assert len(asked) == 1
    later = time.monotonic() + capacity_module.READ_EVERY_S
    monkeypatch.setattr(beside, "QUICK_S", 1e9)
    monkeypatch.setattr(beside, "REST", 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: later)
    second = views.read(written.config, {"fast0", "slow0"}, waits_for=None)
    assert second is not None and first is not None
    assert second.rollouts_per_s == pytest.approx(first.rollouts_per_s + 2 / 3)


async def test_capacity_is_shown_after_the_first_step(make_hub: Any) -> None:
    hub = await make_hub(running=False)
    assert (await hub.pages.run_view()).capacity is None
    write_books(hub.driven.store)
    view = (await hub.pages.run_view()).capacity
    assert isinstance(view, CapacityView)
    assert "No node" in view.verdict, "no node is connected"


async def test_in_a_finished_run_all_nodes_that_worked_count(make_hub: Any, make_evaluations: Any) -> None:
    hub = await make_hub(running=False, max_staleness=3)
    write_books(hub.driven.store)
    hub.driven.store.record_evaluations(make_evaluations(2, 0.75))
    hub.said["finished"] = True
    view = (await hub.pages.run_view()).capacity
    assert view is not None and view.verdict.startswith("The learner can train 95%")
