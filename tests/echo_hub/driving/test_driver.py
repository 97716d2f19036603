from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from echo_hub.core.accounting.effects import (
    Action,
    AnnounceVersion,
    BeginStep,
    FinishRun,
    LookUpReceipt,
    PrepareGroup,
    PublishVersion,
    ScoreRollout,
    SendLease,
    SendReceipts,
    TrainStep,
    TrustDecided,
)
from echo_hub.core.accounting.events import (
    GroupPrepared,
    LearnerReady,
    NodeConnected,
    NodeReported,
    RolloutScored,
)
from echo_hub.core.trust.standing import Decision
from echo_hub.driving import driver as driver_module
from echo_hub.driving import event_queue
from echo_hub.driving.driver import Driver
from echo_hub.operation.log_lines import EventLog
from echo_hub.scoring.backlog import FAR_BEHIND
from echo_hub.store import database
from echo_hub.store.database import read_meta
from echo_hub.store.events import read_events
from echo_hub.store.reading import read_payloads, read_receipts
from echo_hub.store.reports import read_accounting
from echo_hub.store.unfinished import read_snapshot
from echo_shared.errors import LocalProtocolError, StorageError
from echo_shared.records.run import EventFilter, RunEvent
from echo_shared.wire.messages import ReceiptState

Drive = Callable[..., Awaitable[Any]]


async def test_a_run_from_its_first_lease_to_its_end(drive: Drive) -> None:
    driven = await drive()
    driven.answered |= {TrainStep, PublishVersion}
    await driven.queue.put(LearnerReady(policy_version=0))
    await driven.node("a")
    await driven.work(lambda: bool(driven.of(FinishRun)))
    assert [action.step for action in driven.of(TrainStep)] == [1, 2]
    assert [action.policy_version for action in driven.of(AnnounceVersion)] == [1, 2]
    assert driven.progress.num_received == sum(len(lease.indices) for lease in driven.of(SendLease))
    assert driven.driver.coordinator.status().finished
    books = driven.store.read(read_accounting)
    assert (books.trained, books.in_flight, books.leased) == (8, 0, books.trained + books.num_dropped)


async def test_records_are_committed_before_any_action(drive: Drive) -> None:
    driven = await drive()
    seen: set[str] = set()

    def look(action: Action) -> None:
        snapshot = driven.store.read(read_snapshot)
        states = {row.rollout_id: row.state for row in snapshot.rollouts}
        match action:
            case SendLease():
                ids = [f"{action.lease_id}-{index}" for index in action.indices]
                assert [states[each] for each in ids] == [ReceiptState.LEASED] * len(ids)
            case SendReceipts():
                for receipt in action.receipts:
                    (stored,) = driven.store.read(read_receipts, action.node_id, [receipt.rollout_id])
                    assert (stored.rollout_id, stored.state, stored.drop_reason, stored.checked) == receipt
            case ScoreRollout():
                assert len(driven.store.read(read_payloads, [action.rollout_id])) == 1
            case TrainStep():
                assert action.step in [planned.step for planned in snapshot.planned]
            case AnnounceVersion():
                assert snapshot.published_version >= action.policy_version
            case _:
                return
        seen.add(type(action).__name__)

    driven.look = look
    driven.answered |= {TrainStep, PublishVersion}
    await driven.queue.put(LearnerReady(policy_version=0))
    await driven.node("a")
    await driven.work(lambda: "AnnounceVersion" in seen)
    assert seen == {"SendLease", "SendReceipts", "ScoreRollout", "TrainStep", "AnnounceVersion"}


async def test_waiting_events_are_handled_in_order_with_one_commit(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "HANDLING_S", 60.0)
    driven = await drive(running=False)
    commits: list[str] = []
    event.listen(driven.store.engine, "commit", lambda connection: commits.append(threading.current_thread().name))
    reported = [
        NodeConnected(node_id="a"),
        NodeReported(node_id="a", capacity=100, policy_version=0),
        *(GroupPrepared(group_id=group_id, seed=group_id) for group_id in range(4)),
    ]
    for each in reported:
        await driven.queue.put(each)
    running = asyncio.create_task(driven.driver.run(driven))
    await driven.until(lambda: len(driven.of(SendLease)) == 4)
    assert len(commits) == 1 and commits[0].startswith("store"), commits
    kinds = [type(action) for action in driven.actions]
    assert kinds[: kinds.index(SendLease)] == [PrepareGroup] * len(driven.of(PrepareGroup)), "in the order of effects"
    assert [lease.group_id for lease in driven.of(SendLease)] == [0, 1, 2, 3]
    running.cancel()
    await asyncio.wait([running])


async def test_only_frequent_events_are_gathered(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "HANDLING_S", 1e6)
    driven = await drive()
    driven.answered.clear()
    turns: list[int] = []
    handle_all = driven.driver.coordinator.handle_all
    driven.driver.coordinator.handle_all = lambda events, now: (turns.append(len(events)), handle_all(events, now))[1]
    await driven.queue.put(NodeConnected(node_id="a"))
    await driven.async_store.read(read_meta)
    for capacity in (1, 2, 3):
        await driven.queue.put(NodeReported(node_id="a", capacity=capacity, policy_version=0))
        await asyncio.sleep(0)
    await driven.async_store.read(read_meta)  # A second turn, which would be wrong, would start during this read.
    assert turns == [1]
    await driven.queue.put(NodeConnected(node_id="b"))
    for _ in range(100):
        if len(turns) < 3:
            await driven.async_store.read(read_meta)
    assert turns == [1, 3, 1]


async def test_while_scoring_is_behind_nodes_wait_and_verdicts_do_not(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "BEHIND_S", 1e6)
    driven = await drive()
    scores = await about_to_plan(driven)
    driven.backlog.num_open = FAR_BEHIND + 1
    handled: list[object] = []
    handle_all = driven.driver.coordinator.handle_all
    driven.driver.coordinator.handle_all = lambda events, now: (handled.extend(events), handle_all(events, now))[1]
    told = NodeConnected(node_id="b")
    await driven.queue.put(told)
    await driven.queue.put(scores[0])
    for _ in range(100):
        if not handled:
            await driven.async_store.read(read_meta)
    assert handled == [scores[0]]
    driven.backlog.num_open = FAR_BEHIND
    await driven.queue.put(scores[1])
    async with asyncio.timeout(60):
        await driven.driver.settled()
    assert handled == [scores[0], scores[1], told]


async def test_events_that_wait_for_a_stalled_scorer_are_handled_eventually(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "BEHIND_S", 0.001)
    driven = await drive()
    driven.backlog.num_open = FAR_BEHIND + 1
    await driven.node("a")
    async with asyncio.timeout(60):
        await driven.driver.settled()
    assert driven.driver.coordinator.status().nodes_connected == 1


async def test_in_lock_step_no_event_waits_for_scoring(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "BEHIND_S", 1e6)
    driven = await drive(mode="sequential", max_staleness=0)
    driven.backlog.num_open = FAR_BEHIND + 1
    await driven.node("a")
    async with asyncio.timeout(60):
        await driven.driver.settled()


async def about_to_plan(driven: Any) -> list[RolloutScored]:
    """Store everything that the first step needs except its scores, and return the scores."""
    driven.answered -= {ScoreRollout}
    await driven.queue.put(LearnerReady(policy_version=0))
    await driven.node("a")
    await driven.until(lambda: len(driven.of(SendLease)) == 4)
    for lease in driven.of(SendLease)[:2]:
        await driven.deliver(lease)
    await driven.until(lambda: len(driven.of(ScoreRollout)) == 4)
    return [RolloutScored(rollout_id=scored.rollout_id, reward=1.0) for scored in driven.of(ScoreRollout)]


async def test_the_learner_may_begin_a_step_during_its_plans_commit(
    drive: Drive,
) -> None:
    driven = await drive()
    scores = await about_to_plan(driven)
    seen: list[tuple[type, list[int], bool]] = []

    def look(action: Action) -> None:
        if isinstance(action, BeginStep | TrainStep):
            planned = [step.step for step in driven.store.read(read_snapshot).planned]
            seen.append((type(action), planned, driven.driver.coordinator.status().nodes_connected > 1))

    driven.look = look
    for each in (*scores, NodeConnected(node_id="b")):
        await driven.queue.put(each)
    await driven.until(lambda: bool(driven.of(TrainStep)))
    assert seen == [(BeginStep, [], False), (TrainStep, [1], True)]
    (begun,) = driven.of(BeginStep)
    assert [(group.rollout_ids, group.rewards) for group in begun.batch] == [
        (tuple(f"{lease.lease_id}-{index}" for index in lease.indices), (1.0, 1.0))
        for lease in driven.of(SendLease)[:2]
    ]


async def test_commits_are_spaced_except_for_those_the_learner_needs(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = await drive()
    scores = await about_to_plan(driven)
    monkeypatch.setattr(driver_module, "COMMIT_S", 1e6)

    def told() -> set[str]:
        receipts = [receipt for sent in driven.of(SendReceipts) for receipt in sent.receipts]
        return {receipt.rollout_id for receipt in receipts if receipt.state is ReceiptState.SCORED}

    await driven.queue.put(scores[0])
    await driven.until(lambda: scores[0].rollout_id in told())
    await driven.queue.put(scores[1])
    await driven.async_store.read(read_meta)  # A second commit, which would be wrong, would come during this read.
    assert told() == {scores[0].rollout_id}
    for each in scores[2:]:
        await driven.queue.put(each)
    await driven.until(lambda: bool(driven.of(TrainStep)))
    assert told() == {each.rollout_id for each in scores}


async def test_a_step_that_was_begun_and_could_not_be_committed_is_planned_again(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MS", 1)
    driven = await drive(running=False)
    running = asyncio.create_task(driven.driver.run(driven))
    answering = asyncio.create_task(driven.answer())
    scores = await about_to_plan(driven)
    other = sqlite3.connect(tmp_path / "echo.db")
    other.execute("BEGIN IMMEDIATE")
    for scored in scores:
        await driven.queue.put(scored)
    with pytest.raises(StorageError, match="cannot be written"):
        await running
    answering.cancel()
    other.close()
    assert [begun.step for begun in driven.of(BeginStep)] == [1] and driven.of(TrainStep) == []
    again = await drive()
    assert again.store.read(read_snapshot).planned == ()
    await again.queue.put(LearnerReady(policy_version=0))
    await again.until(lambda: bool(again.of(TrainStep)))
    first, second = ([group.rollout_ids for group in each.of(BeginStep)[0].batch] for each in (driven, again))
    assert first == second, "both steps have the same batch, scored again"
    assert again.store.read(read_snapshot).planned[0].step == 1


async def test_a_failed_commit_causes_no_action(drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MS", 1)
    driven = await drive(running=False)
    other = sqlite3.connect(tmp_path / "echo.db")
    other.execute("BEGIN IMMEDIATE")
    for each in (
        NodeConnected(node_id="a"),
        NodeReported(node_id="a", capacity=100, policy_version=0),
        GroupPrepared(group_id=0, seed=1),
    ):
        await driven.queue.put(each)
    with pytest.raises(StorageError, match="cannot be written"):
        await driven.driver.run(driven)
    other.close()
    assert driven.of(SendLease) == []
    assert driven.store.read(read_accounting).leased == 0
    again = await drive()
    await again.node("a")
    await again.until(lambda: again.of(SendLease) != [])
    assert again.of(SendLease)[0].group_id == 0


async def test_a_restarted_hub_resumes_from_the_store(drive: Drive) -> None:
    first = await drive(running=False)
    running = [asyncio.create_task(work) for work in (first.driver.run(first), first.answer())]
    first.answered.discard(ScoreRollout)
    await first.node("a")
    await first.until(lambda: first.of(SendLease) != [])
    lease = first.of(SendLease)[0]
    await first.queue.put(first.arrival(lease, 0))
    await first.until(lambda: first.of(ScoreRollout) != [])
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    second = await drive()
    await second.until(lambda: second.of(ScoreRollout) != [])
    assert second.of(ScoreRollout) == first.of(ScoreRollout)
    await second.queue.put(second.arrival(lease, 1))
    await second.until(lambda: len(second.of(ScoreRollout)) == 2)
    assert second.progress.num_received == 1, "counted from this hub's start"


async def test_the_coordinator_is_told_the_time_when_it_is_due(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "TICK_S", 0.001)
    driven = await drive(deadline_s=60.0)
    await driven.node("a")
    await driven.until(lambda: len(driven.of(SendLease)) == 4)
    await driven.node("b")
    await driven.queue.put(replace(driven.arrival(driven.of(SendLease)[0], 0), node_id="b"))
    # After this look-up the hub knows node b; only then does the lease's time pass.
    await driven.until(lambda: driven.of(LookUpReceipt) != [])
    driven.now += 61.0
    await driven.until(lambda: any(lease.node_id == "b" for lease in driven.of(SendLease)))
    assert {lease.node_id for lease in driven.of(SendLease)[:4]} == {"a"}, "all that may be leased"


async def test_senders_wait_while_the_queue_is_full(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_queue, "QUEUED_EVENTS", 2)
    driven = await drive(running=False)
    for node_id in ("a", "b"):
        await driven.queue.put(NodeConnected(node_id=node_id))
    waiting = asyncio.create_task(driven.queue.put(NodeConnected(node_id="c")))
    await asyncio.sleep(0)
    assert not waiting.done()
    running = asyncio.create_task(driven.driver.run(driven))
    await waiting
    await driven.queue.put(NodeReported(node_id="c", capacity=1, policy_version=0))
    await driven.queue.put(GroupPrepared(group_id=0, seed=1))
    await driven.until(lambda: driven.of(SendLease) != [])
    assert driven.driver.coordinator.status().nodes_connected == 3
    running.cancel()
    await asyncio.wait([running])


async def test_an_impossible_event_ends_the_driver(drive: Drive) -> None:
    driven = await drive(running=False)
    driver: Driver = driven.driver
    await driven.queue.put(LearnerReady(policy_version=9))
    with pytest.raises(LocalProtocolError, match="do not fit together"):
        await driver.run(driven)


async def test_when_the_driver_has_ended_nobody_waits_for_it(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_queue, "QUEUED_EVENTS", 1)
    driven = await drive(running=False)
    driver: Driver = driven.driver
    await driven.queue.put(LearnerReady(policy_version=9))
    waiting = asyncio.create_task(driven.queue.put(NodeConnected(node_id="a")))
    await asyncio.sleep(0)
    with pytest.raises(LocalProtocolError):
        await driver.run(driven)
    async with asyncio.timeout(60):
        await waiting
        for _ in range(3):
            await driven.queue.put(NodeConnected(node_id="b"))


class Told:
    def __init__(self) -> None:
        self.events: list[RunEvent] = []
        self.seen = asyncio.Event()

    def note_threadsafe(self, event: RunEvent) -> None:
        self.events.append(event)
        self.seen.set()


def noted(text: str) -> RunEvent:
    return RunEvent(at=1.0, text=text)


def stored(driven: Any) -> list[str]:
    return [one.text for one in driven.store.read(read_events, EventFilter(), 99)][::-1]


async def test_noted_events_are_stored_with_and_without_a_turn(drive: Drive) -> None:
    driven = await drive(running=False)
    driver, pages = driven.driver, driven.pages
    driver.note(noted("before it runs"))
    running = asyncio.create_task(driver.run(driven))
    async with asyncio.timeout(60):
        seen = await pages.wait(0)
        driver.note(noted("alone"))
        await pages.wait(seen)
    running.cancel()
    await asyncio.wait([running])
    driver.note(noted("last"))
    await driver.commit_noted()
    assert stored(driven) == ["before it runs", "alone", "last"]


async def test_a_store_that_refuses_events_gets_the_newest_later(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "MOST_NOTED", 3)
    driven = await drive(running=False)
    driver: Driver = driven.driver
    with driven.store.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA busy_timeout = 0")
    other = sqlite3.connect(driven.store.engine.url.database, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MS", 0)
    driven.store.engine.dispose()
    for number in range(5):
        driver.note(noted(str(number)))
        await driver.commit_noted()
    other.rollback()
    other.close()
    assert stored(driven) == []
    driver.note(noted("5"))
    await driver.commit_noted()
    assert stored(driven) == ["2", "3", "4", "5"]


async def test_a_decision_on_a_node_is_logged(drive: Drive) -> None:
    driven = await drive(running=False)
    decided = TrustDecided(node_id="n1", decision=Decision.QUARANTINED, reason="It forges.", decided_at=1.0)
    coordinator = driven.driver.coordinator
    start = coordinator.start
    coordinator.start = lambda now: [*start(now), decided]
    told = Told()
    handler = EventLog(told)
    driver_module.log.addHandler(handler)
    running = asyncio.create_task(driven.driver.run(driven))
    async with asyncio.timeout(60):
        await told.seen.wait()
    driver_module.log.removeHandler(handler)
    running.cancel()
    await asyncio.wait([running])
    assert [(one.kind, one.subject, one.text) for one in told.events] == [
        ("node_quarantined", "n1", "node n1 is in quarantine: It forges.")
    ]


async def test_a_write_in_progress_at_cancellation_is_done_once(drive: Drive) -> None:
    driven = await drive(running=False)
    driver: Driver = driven.driver
    inside, go_on = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        inside.set()
        go_on.wait(60)

    event.listen(driven.store.engine, "commit", hold, once=True)
    driver.note(noted("begun"))
    running = asyncio.create_task(driver.run(driven))
    await asyncio.to_thread(inside.wait, 60)
    running.cancel()
    await asyncio.wait([running])
    driver.note(noted("last"))
    go_on.set()
    await driver.commit_noted()
    assert stored(driven) == ["begun", "last"]


async def test_node_messages_are_settled_after_their_commit(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = await drive()
    await driven.driver.settled()
    await driven.queue.put(LearnerReady(policy_version=0))
    await driven.node("a")
    await driven.until(lambda: bool(driven.of(SendLease)))
    lease = driven.of(SendLease)[0]
    may_commit, is_asked, commit = asyncio.Event(), asyncio.Event(), driven.async_store.apply

    async def held_back(*content: Any, **ahead: Any) -> None:
        is_asked.set()
        await may_commit.wait()
        await commit(*content, **ahead)

    monkeypatch.setattr(driven.async_store, "apply", held_back)
    await driven.queue.put(driven.arrival(lease, lease.indices[0]))
    settling = asyncio.create_task(driven.driver.settled())
    await is_asked.wait()
    assert not settling.done(), "the message is not in the store yet"
    may_commit.set()
    async with asyncio.timeout(60):
        await settling
    states = {row.rollout_id: row.state for row in driven.store.read(read_snapshot).rollouts}
    assert states[f"{lease.lease_id}-{lease.indices[0]}"] is not ReceiptState.LEASED
    await driven.queue.put(NodeReported(node_id="a", capacity=1, policy_version=0))
    async with asyncio.timeout(60):
        await driven.driver.settled()


async def test_messages_after_the_end_are_never_settled(drive: Drive) -> None:
    driven = await drive(running=False)
    work = asyncio.create_task(driven.driver.run(driven))
    await asyncio.sleep(0)
    work.cancel()
    await asyncio.wait([work])
    await driven.queue.put(NodeConnected(node_id="a"))
    settling = asyncio.create_task(driven.driver.settled())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not settling.done()
    settling.cancel()
