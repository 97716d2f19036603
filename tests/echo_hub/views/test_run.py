from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import event

from echo_hub.core.accounting.effects import (
    AnnounceVersion,
    CostAccrued,
    FinishRun,
    NodeCost,
    PublishVersion,
    TellOperator,
    TellStandby,
    TrainStep,
)
from echo_hub.core.accounting.events import LearnerReady, OperatorAsked, StepDone
from echo_hub.core.policy.curriculum import CurriculumSettings
from echo_hub.core.policy.mixture import TrainedTask
from echo_hub.core.trust.screening import StepScreen
from echo_hub.dashboard.model import Doing, Readiness, RunState
from echo_hub.dashboard.session_figures import SessionFigures
from echo_hub.operation.problems import ProblemKind, RunProblem
from echo_hub.store.reports import read_accounting
from echo_hub.store.tallies import TRANSPORTS
from echo_hub.views.run import (
    COMMON_FAULT,
    DATABASE_IS_AWAY,
    DETAILS,
    DISK_IS_FULL,
    EVALUATOR_IS_AWAY,
    JUDGE_IS_AWAY,
    LEARNER_IS_DOWN,
    NODE_LAGS,
    SCORERS_ARE_AWAY,
    VERIFIER_IS_AWAY,
    VERSION_IS_WITHDRAWN,
    broken_now,
    goes_on_with,
    waits_for,
)
from echo_shared.records.health import HubState
from echo_shared.records.node import NodeMismatch, TrustStatus
from echo_shared.records.run import Accounting


async def test_a_run_before_its_first_step(hub: Any) -> None:
    view = await hub.pages.run_view()
    assert (view.run_id, view.name, view.mode, view.task) == ("r", "spring", "async", "arithmetic")
    assert (view.state, view.state_detail, view.problems) == (RunState.RUNNING, "waiting for nodes", ())
    assert (view.started_at, view.finished_at, view.steps_total, view.trained_step) == (900.0, None, 2, 0)
    assert (view.group_size, view.max_staleness, view.join_command) == (2, 3, "echo-node join http://hub")
    assert (view.mean_reward, view.staleness_mean, view.staleness_max) == (None, None, None)
    assert (view.accounting, view.evaluations, view.versions) == (Accounting(), (), ())
    assert view.fetches_by_transport == dict.fromkeys(TRANSPORTS, 0)
    assert (view.dissemination, view.nodes_on_newest, view.nodes_connected, view.uplink_bytes_s) == (None, 0, 0, None)


async def test_the_stores_totals_are_shown(hub: Any) -> None:
    await hub.join("a")
    await hub.train_to_the_end()
    view = await hub.pages.run_view()
    assert (view.trained_step, view.published_version) == (2, 2)
    assert view.accounting == hub.driven.store.read(read_accounting)
    assert (view.mean_reward, view.accounting.trained, view.accounting.in_flight) == (0.5, 8, 0)
    assert view.accounting.balanced
    assert view.newest_step == (await hub.pages.steps(1))[0]


async def test_continued_rollouts_are_shown(hub: Any) -> None:
    hub.said = {"rollouts_gone_on": 3, "tokens_saved": 700}
    view = await hub.pages.run_view()
    assert (view.rollouts_gone_on, view.tokens_saved) == (3, 700)


async def test_a_run_is_over_when_the_hub_says_so(hub: Any, make_evaluations: Any) -> None:
    """Pages must not infer the run's end from store or coordinator, because the hub may still be evaluating."""
    await hub.join("a")
    await hub.train_to_the_end()
    view = await hub.pages.run_view()
    assert (view.state, view.finished_at) == (RunState.RUNNING, None)
    hub.said["last_is_published"] = True
    assert (await hub.pages.run_view()).state_detail == "evaluating"
    hub.driven.store.record_evaluations(make_evaluations(0, 0.25, at=1.0))
    hub.driven.store.record_evaluations(make_evaluations(2, 0.75, at=50.0))
    view = await hub.pages.run_view()
    assert (view.state, view.finished_at) == (RunState.RUNNING, None)
    hub.said["finished"] = True
    view = await hub.pages.run_view()
    assert (view.state, view.state_detail, view.finished_at) == (RunState.FINISHED, "", 50.0)
    assert (view.accuracy_before, view.accuracy_after) == (0.25, 0.75)


async def test_a_step_is_shown_once_it_is_committed(hub: Any) -> None:
    driven = hub.driven
    driven.answered.add(PublishVersion)
    await hub.join("a")
    await driven.queue.put(LearnerReady(policy_version=0))
    await driven.work(lambda: bool(driven.of(TrainStep)), hub.deliver)
    await driven.queue.put(StepDone(step=1, metrics={"loss": 0.5}))
    await driven.work(lambda: len(driven.of(TrainStep)) == 2 and bool(driven.of(AnnounceVersion)), hub.deliver)
    may_commit = threading.Event()
    event.listen(driven.store.engine, "commit", lambda connection: may_commit.wait(20))
    await driven.queue.put(StepDone(step=2, metrics={"loss": 0.25}))
    for _ in range(10):
        await asyncio.sleep(0)
    assert driven.driver.coordinator.status().trained_steps == 2, "its commit is in progress"
    view = await hub.pages.run_view()
    may_commit.set()
    assert view.newest_step is not None, "the figures of step 1 stay until those of step 2 are stored"
    assert (view.trained_step, view.newest_step.step, view.newest_step.figures["loss"]) == (1, 1, 0.5)
    assert (view.mean_reward, view.staleness_mean, view.staleness_max) == (0.5, 0.0, 0)
    await driven.until(lambda: bool(driven.of(FinishRun)))
    view = await hub.pages.run_view()
    assert view.newest_step is not None
    assert (view.trained_step, view.newest_step.step, view.newest_step.figures["loss"]) == (2, 2, 0.25)


async def test_an_alarm_about_the_newest_step_is_a_problem_that_makes_the_hub_no_less_ready(hub: Any) -> None:
    driven = hub.driven
    driven.answered.add(PublishVersion)
    await hub.join("a")
    await driven.queue.put(LearnerReady(policy_version=0))
    await driven.work(lambda: bool(driven.of(TrainStep)), hub.deliver)
    metrics = {"groups_left_out": 1.0}
    await driven.queue.put(StepDone(step=1, metrics=metrics, screen=StepScreen(left_out=(0,))))
    await driven.work(lambda: bool(driven.of(AnnounceVersion)), hub.deliver)
    view = await hub.pages.run_view()
    assert view.problems == view.alarms != () and view.readiness is Readiness.READY
    assert view.accounting.dropped["screened"] == 2 and view.accounting.balanced


async def test_a_dead_learner_is_a_problem_and_one_that_starts_is_not(hub: Any) -> None:
    view = await hub.pages.run_view()
    assert (view.problems, view.readiness) == ((), Readiness.READY)
    hub.said = {"learner_is_starting": True}
    view = await hub.pages.run_view()
    assert (view.problems, view.state_detail, view.readiness) == ((), "starting the learner", Readiness.STARTING)
    hub.said = {"learner_is_down": True}
    view = await hub.pages.run_view()
    (problem,) = view.problems
    assert "learner" in problem and view.readiness is Readiness.FAILING


async def test_without_a_curriculum_none_is_shown(hub: Any) -> None:
    assert (await hub.pages.run_view()).curriculum is None


async def test_a_curriculums_status_is_shown(make_hub: Any) -> None:
    settings = CurriculumSettings(rule="skip", by="problem")
    choosy = await make_hub(curriculum=settings, tasks=(TrainedTask(key="sums"),))
    await choosy.join("a")
    await choosy.train_to_the_end()
    known = (await choosy.pages.run_view()).curriculum
    assert known is not None and known.by == "problem"
    assert known.solved + known.hopeless + known.between > 0


async def test_costs_are_shown_once_a_node_costs_something(hub: Any) -> None:
    await hub.join("a")
    assert (await hub.pages.run_view()).cost is None
    await hub.train_to_the_end()
    hub.driven.store.apply([CostAccrued(nodes=(NodeCost("gone", 60.0, 0.4),))], now=1.0)
    cost = (await hub.pages.run_view()).cost
    assert cost is not None
    assert (cost.total, cost.active_s, cost.per_trained_rollout) == (0.4, 60.0, 0.05)
    assert (cost.spend_per_hour, cost.spend_cap_per_hour, cost.nodes_active, cost.nodes_standing_by) == (0, 0, 0, 0)


async def test_a_node_that_costs_something_stands_by_under_a_cap_of_nothing(hub: Any) -> None:
    await hub.driven.queue.put(LearnerReady(policy_version=0))
    await hub.join("dear", cost_per_hour=0.4)
    await hub.driven.until(lambda: bool(hub.driven.of(TellStandby)))
    (told,) = hub.driven.of(TellStandby)
    hub.live.told(told.node_id, told.reason, told.detail)
    cost = (await hub.pages.run_view()).cost
    assert cost is not None and (cost.nodes_active, cost.nodes_standing_by) == (0, 1)
    (node,) = await hub.pages.nodes()
    assert (node.costs_per_hour, node.standby) == (0.4, "spend cap. It costs $0.4 an hour; the hub spends nothing.")


@pytest.mark.parametrize("mode", ["sequential", "colocated"])
async def test_only_async_runs_have_a_staleness_bound(make_hub: Any, mode: str) -> None:
    view = await (await make_hub(mode)).pages.run_view()
    assert (view.mode, view.max_staleness) == (mode, 0)


@pytest.mark.parametrize(
    ("moment", "reason"),
    [
        ({}, "rollouts"),
        ({"learner_is_down": True}, "down"),
        ({"learner_is_starting": True}, "down"),
        ({"last_is_published": True}, None),
        ({"finished": True, "learner_is_down": True}, None),
    ],
)
async def test_the_reason_that_the_learner_waits(hub: Any, moment: dict[str, bool], reason: str | None) -> None:
    hub.said.update(moment)
    assert waits_for(hub.now()) == reason


async def test_a_learner_at_work_waits_for_nothing(hub: Any) -> None:
    hub.driven.answered -= {TrainStep}
    await hub.driven.queue.put(LearnerReady(policy_version=0))
    await hub.join("a")
    await hub.driven.work(lambda: bool(hub.driven.of(TrainStep)), hub.deliver)
    assert waits_for(hub.now()) is None


async def test_a_runs_activity_is_the_one_that_must_end_first(hub: Any, make_evaluations: Any) -> None:
    """Several activities may apply at once; pages show the one that must end first."""

    async def doing(**said: Any) -> Doing:
        hub.said = said
        view = await hub.pages.run_view()
        assert view.state_detail == DETAILS[view.doing]
        return Doing(view.doing)

    assert await doing(learner_is_starting=True) is Doing.STARTING
    assert await doing() is Doing.LACKS_NODES
    assert await doing(needs_nodes=False) is Doing.COLLECTING, "it samples for itself"
    hub.said = {"needs_nodes": False, "learner_evaluates": True}
    assert (await hub.pages.run_view()).state_detail == "collecting rollouts; the learner evaluates"
    assert await doing(learner_is_down=True) is Doing.LEARNER_DOWN
    assert await doing(last_is_published=True) is Doing.EVALUATING, "no node is needed any more"
    hub.driven.store.record_evaluations(make_evaluations(0, 0.25, at=1.0))
    assert await doing(last_is_published=True, finished=True) is Doing.FINISHED
    assert set(DETAILS) == set(Doing)


async def test_the_runs_page_shows_what_the_core_knows_of_trust(hub: Any) -> None:
    status = TrustStatus(
        mismatch=(NodeMismatch(node_id="a", kl=0.25, num_tokens=90),), suspended=("mlx/f32/metal on version 7",)
    )
    hub.said = {"status": replace(hub.now().status, trust=status)}
    view = await hub.pages.run_view()
    assert view.trust == status and COMMON_FAULT.format(what="mlx/f32/metal on version 7") in view.problems


async def test_watched_problems_are_shown_and_the_hub_stays_ready(hub: Any) -> None:
    disk = RunProblem(kind=ProblemKind.DISK, text="The disk is nearly full.", since=1.0)
    down = RunProblem(kind=ProblemKind.LEARNER_DOWN, text=LEARNER_IS_DOWN, since=1.0)
    hub.said = {"watched": (disk,)}
    view = await hub.pages.run_view()
    assert (view.problems, view.alarms, view.broken) == ((disk.text,), (disk.text,), False)
    assert (view.readiness, view.health.state) == (Readiness.READY, HubState.DEGRADED)
    assert view.problem_kinds == ("disk",)
    hub.said = {"watched": (down, disk), "learner_is_down": True}
    view = await hub.pages.run_view()
    assert (view.problems, view.broken) == ((LEARNER_IS_DOWN, disk.text), True), "each once"


async def test_a_judge_that_stays_away_is_broken_and_said_once(hub: Any) -> None:
    text = JUDGE_IS_AWAY.format(name="style", reason="status 503")
    watched = RunProblem(kind=ProblemKind.JUDGE_AWAY, text=text, since=1.0)
    counts = {"style": {"calls": 3}}
    hub.said = {"judges_away": {"style": "status 503"}, "watched": (watched,), "judged": counts}
    view = await hub.pages.run_view()
    assert (view.problems, view.broken, view.judged) == ((text,), True, counts)
    assert "The judge style does not answer (status 503)." in text


@pytest.mark.parametrize(
    ("kind", "said", "away"),
    [
        (ProblemKind.SCORERS_AWAY, SCORERS_ARE_AWAY, "scoring_away"),
        (ProblemKind.VERIFIER_AWAY, VERIFIER_IS_AWAY, "verifier_away"),
        (ProblemKind.EVALUATOR_AWAY, EVALUATOR_IS_AWAY, "evaluator_away"),
    ],
)
async def test_a_cluster_that_is_away_is_broken_and_said_once(
    hub: Any, kind: ProblemKind, said: str, away: str
) -> None:
    text = said.format(reason="connection refused")
    watched = RunProblem(kind=kind, text=text, since=1.0)
    hub.said = {away: "connection refused", "watched": (watched,)}
    view = await hub.pages.run_view()
    assert (view.problems, view.broken) == ((text,), True)
    assert "(connection refused)" in text


async def test_an_environment_that_is_away_is_broken_and_said_once(hub: Any) -> None:
    sessions = SessionFigures(open=0, slots=0, most=8, waiting=8, away="connection refused", away_since=34_200.0)
    hub.said = {"sessions": sessions}
    said = broken_now(hub.now())
    assert list(said) == [ProblemKind.ENVIRONMENT_AWAY], "slots are not short as well"
    (text,) = said.values()
    assert text.startswith("The environment has not answered since 09:30 UTC (connection refused).")
    hub.said |= {"watched": (RunProblem(kind=ProblemKind.ENVIRONMENT_AWAY, text=text, since=1.0),)}
    view = await hub.pages.run_view()
    assert (view.problems, view.broken, view.sessions) == ((text,), True, sessions)


@pytest.mark.parametrize(("slots", "most", "remedy"), [(8, 8, "raise sessions.most"), (1, 8, "let it take more")])
def test_short_slots_are_said_with_their_remedy(hub: Any, slots: int, most: int, remedy: str) -> None:
    hub.said = {"sessions": SessionFigures(open=slots, slots=slots, most=most, waiting=7, is_short=True)}
    text = goes_on_with(hub.now())[ProblemKind.SLOTS_SHORT]
    assert f"{slots} of {slots} are in use, and 7 turns wait and a new group waits for more" in text
    assert remedy in text
    hub.said = {"sessions": SessionFigures(open=slots, slots=slots, most=most, waiting=0)}
    assert not goes_on_with(hub.now())


async def test_degraded_parts_are_shown_and_the_hub_stays_ready(hub: Any) -> None:
    status = replace(hub.driven.driver.coordinator.status(), withdrawn={8: "not finite"})
    lagging = replace(status, trust=TrustStatus(lagging=(("a" * 32, "It lags."),)))
    hub.said = {"status": lagging}
    said = goes_on_with(hub.now())
    assert said == {
        ProblemKind.VERSION_WITHDRAWN: VERSION_IS_WITHDRAWN.format(version=8, reason="not finite"),
        ProblemKind.NODE_LAGS: NODE_LAGS.format(node_id="a" * 32, what="It lags."),
    }
    hub.said["watched"] = tuple(RunProblem(kind=kind, text=text, since=1.0) for kind, text in said.items())
    view = await hub.pages.run_view()
    assert view.problems == tuple(said.values()) and view.readiness is Readiness.READY


async def test_a_full_disk_is_broken_and_said_once(hub: Any) -> None:
    nearly = RunProblem(kind=ProblemKind.DISK, text="The disk is nearly full.", since=1.0)
    hub.said = {"lacks_room": "No space left on device", "watched": (nearly,)}
    view = await hub.pages.run_view()
    assert view.problems == (DISK_IS_FULL.format(said="No space left on device"),) and view.broken
    assert hub.pages.health().reasons == view.problems


async def test_a_database_that_is_away_is_broken_and_said_once(hub: Any) -> None:
    watched = RunProblem(kind=ProblemKind.DATABASE_AWAY, text="It is away.", since=1.0)
    hub.said = {"lacks_database": "connection failed:\n\tIs the server running?", "watched": (watched,)}
    view = await hub.pages.run_view()
    assert view.problems == (DATABASE_IS_AWAY.format(said="connection failed: Is the server running?"),)
    assert view.broken and hub.pages.health().reasons == view.problems


async def test_operators_changes_are_shown(make_hub: Any) -> None:
    hub = await make_hub(max_staleness=3)
    view = await hub.pages.run_view()
    assert (view.leasing, view.live["max_staleness"]) == ("open", 3)
    for number, (what, value) in enumerate((("leasing", "paused"), ("max_staleness", 2), ("learning_rate", 0.5))):
        await hub.driven.queue.put(OperatorAsked(number=number, what=what, value=value))
    await hub.driven.until(lambda: len(hub.driven.of(TellOperator)) == 3)
    view = await hub.pages.run_view()
    assert (view.leasing, view.max_staleness, view.live["learning_rate"]) == ("paused", 2, 0.5)
    assert view.state_detail == "paused by the operator: nothing is leased"
