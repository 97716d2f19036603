from __future__ import annotations

from dataclasses import replace

import pytest

from echo_hub.commands import plan_text
from echo_hub.commands.plan import PlannedFleet, make_plan
from echo_hub.commands.plan_text import COLUMNS, SPENT, picture, plan_lines, seconds
from echo_hub.core.capacity.model import NodeClass, Workload
from echo_hub.core.capacity.timeline import TimeSpan
from echo_hub.views.learner_time import REASONS, LearnerTime

WORKLOAD = Workload(mode="async", rollouts_per_step=32, train_s=1.9, hand_off_s=0.1, broadcast_s=0.5, max_staleness=2)
FAST = NodeClass(name="fast", count=3, rollouts_per_s=4.0, latency_s=0.5, cost_per_h=0.5)
SLOW = NodeClass(name="a slow one", count=1, rollouts_per_s=0.1, latency_s=60.0)


def text(workload: Workload, *nodes: NodeClass) -> str:
    return "\n".join(plan_lines(make_plan(PlannedFleet(workload=workload, nodes=nodes, kinds=nodes), target=0.98)))


def test_a_whole_plan_as_text() -> None:
    lines = text(WORKLOAD, FAST, SLOW).splitlines()
    assert lines[:3] == [
        "Mode          async, staleness <= 2, a version every step",
        "A step takes  32 rollouts and 2 s: 1.9 s of training, 0.1 s of hand-off",
        "A version     reaches the nodes 0.5 s after its training",
    ]
    assert lines[4].split() == ["Nodes", "Number", "Rollouts/s", "Latency", "Cost/h", "To", "add"]
    assert lines[5].split() == ["fast", "3", "4", "0.5", "s", "0.50", "1"]
    assert lines[6].split() == ["a", "slow", "one", "1", "0.1", "60", "s", "0.00", "see", "below"]
    assert len(set(map(len, lines[4:7]))) == 1
    assert "  cheapest nodes to add   1 x fast, 0.50 an hour" in lines
    assert "  training.max_staleness  - (no value is enough)" in lines
    assert "  nodes of the same mix   6, now 4" in lines, "of three quick ones and a slow one"
    assert lines[-1].startswith("At this pace, the learner waits 25% of the time")


def test_where_the_time_of_a_run_went() -> None:
    spent = LearnerTime(window_s=64.0, training=0.7, idle=dict.fromkeys(REASONS, 0.0) | {"hand_off": 0.3})
    fleet = PlannedFleet(
        workload=WORKLOAD, nodes=(FAST,), kinds=(FAST,), scoring="2 processes beside the hub", spent=spent
    )
    plan = make_plan(fleet, target=0.98)
    assert "Scoring       2 processes beside the hub" in list(plan_lines(plan))
    assert "Measured      over 64 s: training 70.0%, hand-off 30.0%" in list(plan_lines(plan))
    assert tuple(SPENT) == REASONS


def test_a_reached_goal() -> None:
    said = text(replace(WORKLOAD, publish_every=2), replace(FAST, count=9))
    assert "a version every 2 steps" in said
    assert "cheapest nodes to add   nothing" in said
    assert "Cheapest subset of these nodes: 4 x fast, 2.00 an hour; staleness <= 2, a version every step" in said


def test_without_nodes_there_is_nothing_to_draw() -> None:
    said = text(replace(WORKLOAD, mode="sequential"))
    assert "A step every  never" in said
    assert "[12==]" not in said
    assert said.splitlines()[0] == "Mode          sequential"


def test_where_the_hub_samples_nothing_is_sent() -> None:
    said = text(replace(WORKLOAD, mode="colocated"), replace(FAST, name="the hub itself", count=1))
    assert "A version" not in said
    lines = [line.split()[0] for line in said.splitlines() if line.startswith(("learner ", "broadcast", "sampling"))]
    assert lines == ["learner", "sampling"]


def test_many_classes_are_not_all_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_text, "KINDS_SHOWN", 1)
    nodes = [replace(FAST, name=f"class {number}") for number in range(4)]
    assert "and 3 more classes; --json has all" in text(WORKLOAD, *nodes)


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, "0 s"), (1.25, "1.25 s"), (12_345.6, "12,346 s"), (float("inf"), "never")]
)
def test_seconds(value: float, shown: str) -> None:
    assert seconds(value) == shown


def test_the_picture_is_to_scale() -> None:
    spans = [
        TimeSpan(lane="waiting", begin_s=0.0, end_s=5.0, number=7),
        TimeSpan(lane="training", begin_s=5.0, end_s=10.0, number=7),
        TimeSpan(lane="broadcast", begin_s=0.0, end_s=0.3, number=123),
        TimeSpan(lane="sampling", begin_s=2.5, end_s=10.0, number=123),
    ]
    learner, broadcast, sampling, scale, _ = picture(spans)
    half = COLUMNS // 2
    assert learner == "learner   " + "." * half + "[7" + "=" * (half - 3) + "]"
    assert broadcast == "broadcast >>", "too short for its number"
    assert sampling == "sampling  " + " " * (half // 2) + "[123" + "-" * (3 * half // 2 - 5) + "]"
    assert scale.split() == ["0", "s", "10", "s"]
