"""A random world around the coordinator: whatever happens, the books are right and the run finishes.

Nodes connect, vanish, forget, resend, answer late, give back and send garbage; the learner dies before and after its
checkpoint; the hub dies before its commit, between commit and actions, and between turns, and is rebuilt from a real
store. After every turn the invariants are checked against a model of their own. At the end one reliable node and a
reliable learner must be enough to finish the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from echo_hub.core.coordinator import Coordinator
from echo_hub.core.effects import (
    RECORDS,
    AnnounceVersion,
    Effect,
    FinishRun,
    GroupDropped,
    GroupOpened,
    LookUpReceipt,
    PrepareGroup,
    PublishVersion,
    RevokeLease,
    RolloutReceived,
    RolloutsDropped,
    RolloutsLeased,
    ScoreRollout,
    SendLease,
    SendReceipts,
    StepPlanned,
    StepTrained,
    TrainStep,
)
from echo_hub.core.events import (
    Event,
    GroupPrepared,
    LearnerLost,
    LearnerReady,
    LeaseGivenBack,
    NodeConnected,
    NodeDisconnected,
    NodeReported,
    RolloutArrived,
    RolloutRejected,
    RolloutScored,
    StepDone,
    Tick,
    VersionPublished,
)
from echo_hub.core.payload import RolloutPayload
from echo_hub.core.settings import HUB_NODE_ID, CoordinatorSettings
from echo_hub.store.store import Store
from echo_shared.messages import DropReason, FinishReason, Receipt, ReceiptState, rollout_id

PAYLOAD = RolloutPayload(
    completion_ids=np.array([5, 7], np.int32),
    behavior_logprobs=np.array([-0.5, -1.25], np.float32),
    finish_reason=FinishReason.STOP,
    sampling_s=0.1,
)
DEADLINE_S = 10.0
RELIABLE = "reliable"
PICK = st.integers(0, 2**16)
FINAL = (ReceiptState.TRAINED, ReceiptState.DROPPED)


@dataclass
class SimNode:
    """A node as it is: what it works on, and what it has sent and not seen acked."""

    connected: bool = False
    capacity: int = 0
    version: int | None = None
    work: dict[str, SendLease] = field(default_factory=dict)
    spool: dict[str, RolloutArrived] = field(default_factory=dict)


@dataclass
class Leased:
    """The model's own row of one leased rollout."""

    node_id: str
    group_id: int
    version: int
    deadline: float
    received: bool = False
    end: str = ""


class World(RuleBasedStateMachine):
    """The shell and everything behind it. `_turn` is the hub's one turn: records to the store, then actions."""

    @initialize(
        mode=st.sampled_from(["colocated", "sequential", "async", "async"]),
        steps=st.integers(1, 6),
        groups_per_step=st.integers(1, 3),
        group_size=st.integers(2, 4),
        max_staleness=st.integers(0, 3),
        pick=PICK,
    )
    def begin(
        self, mode: Any, steps: int, groups_per_step: int, group_size: int, max_staleness: int, pick: int
    ) -> None:
        period = 1 + pick % (max_staleness + 1) if mode == "async" else 1
        self.settings = CoordinatorSettings(
            mode=mode,
            steps=steps,
            groups_per_step=groups_per_step,
            group_size=group_size,
            max_staleness=max_staleness,
            publish_every=period,
            deadline_s=DEADLINE_S,
        )
        self.bound = max_staleness if mode == "async" else 0
        self.store = Store.open("sqlite://")
        self.now = 1_000.0
        self.ticked_at = 0.0
        self.finished = 0
        self.nodes: dict[str, SimNode] = {}
        self.rows: dict[str, Leased] = {}
        self.opened: set[int] = set()
        self.closed: set[int] = set()
        self.planned: dict[int, StepPlanned] = {}
        self.trained_steps = 0
        self.learner: int | None = None
        self.checkpoint = 0
        self.batches_seen: dict[int, list[str]] = {}
        self.crash_at: str = ""
        self._boot()

    # --- the hub

    def _boot(self) -> None:
        self.preparing: list[int] = []
        self.scoring: list[str] = []
        self.publishing: list[int] = []
        self.job: int | None = None
        self.learner = None
        for node in self.nodes.values():
            node.connected = False
        self.published = self.store.snapshot().published_version
        self.coordinator = Coordinator(self.settings, self.store.snapshot())
        self._carry_out(self.coordinator.start(self.now))
        if self.settings.mode == "colocated":
            self._connect(HUB_NODE_ID, 8, 0)

    def _turn(self, event: Event) -> None:
        self._carry_out(self.coordinator.handle(event, self.now))

    def _carry_out(self, effects: list[Effect]) -> None:
        records = [effect for effect in effects if isinstance(effect, RECORDS)]
        assert effects[: len(records)] == records, "records come first"
        crash, self.crash_at = self.crash_at, ""
        if crash == "before commit":
            self._die()
            return
        for record in records:
            self._model(record)
        self.store.apply(records, self.now)
        if crash == "after commit":
            self._die()
            return
        for effect in effects[len(records) :]:
            self._act(effect)

    def _die(self) -> None:
        if HUB_NODE_ID in self.nodes:
            self.nodes[HUB_NODE_ID] = SimNode()
        self._boot()

    def _model(self, record: Any) -> None:
        match record:
            case GroupOpened():
                assert record.group_id == len(self.opened), "groups are opened in order, none is left out"
                self.opened.add(record.group_id)
            case GroupDropped():
                assert record.group_id not in self.closed
                self.closed.add(record.group_id)
            case RolloutsLeased():
                self._model_lease(record)
            case RolloutReceived():
                assert not self.rows[record.rollout_id].end
                self.rows[record.rollout_id].received = True
            case RolloutsDropped():
                for dropped_id in record.rollout_ids:
                    assert not self.rows[dropped_id].end, "a final state never changes"
                    self.rows[dropped_id].end = record.reason
            case StepPlanned():
                self._model_plan(record)
            case StepTrained():
                assert record.step == self.trained_steps + 1
                assert record.rollout_ids == self.planned[record.step].rollout_ids
                for trained_id in record.rollout_ids:
                    assert not self.rows[trained_id].end, "no rollout is trained twice"
                    self.rows[trained_id].end = "trained"
                self.trained_steps = record.step
                self.closed |= set(self.planned[record.step].group_ids)

    def _model_lease(self, record: RolloutsLeased) -> None:
        held = sum(
            row.node_id == record.node_id and not row.received and not row.end and row.deadline > self.ticked_at
            for row in self.rows.values()
        )
        node = self.nodes[record.node_id]
        assert node.connected and node.version is not None
        assert held + len(record.indices) <= node.capacity, "more leased than the node will hold"
        newest = self.trained_steps if self.settings.mode == "colocated" else self.coordinator.published_version
        if self.settings.mode == "async":
            assert record.policy_version == min(newest, node.version)
        else:
            assert record.policy_version == newest == self.trained_steps
        for index in record.indices:
            row = Leased(record.node_id, record.group_id, record.policy_version, record.deadline)
            assert self.rows.setdefault(rollout_id(record.lease_id, index), row) is row

    def _model_plan(self, record: StepPlanned) -> None:
        assert record.step == self.trained_steps + 1 and record.step not in self.planned
        assert len(record.group_ids) == self.settings.groups_per_step
        assert len(set(record.rollout_ids)) == self.settings.groups_per_step * self.settings.group_size
        assert list(record.group_ids) == sorted(record.group_ids)
        for planned_id in record.rollout_ids:
            assert record.step - 1 - self.rows[planned_id].version <= self.bound, "too stale at consumption"
        if self.settings.mode != "async":
            others = self.opened - self.closed - set(record.group_ids)
            assert not others, "a step takes all groups that are open, in their order"
        self.planned[record.step] = record

    def _act(self, action: Any) -> None:
        match action:
            case PrepareGroup():
                self.preparing.append(action.group_id)
            case SendLease():
                node = self.nodes[action.node_id]
                if node.connected:
                    for index in action.indices:
                        node.work[rollout_id(action.lease_id, index)] = action
            case RevokeLease():
                node = self.nodes[action.node_id]
                if node.connected:
                    for name in [name for name, lease in node.work.items() if lease.lease_id == action.lease_id]:
                        del node.work[name]
            case SendReceipts():
                self._receive(action.node_id, action.receipts)
            case LookUpReceipt():
                self._receive(action.node_id, (self.store.receipt(action.node_id, action.rollout_id),))
            case ScoreRollout():
                self.scoring.append(action.rollout_id)
            case TrainStep():
                assert self.job is None and self.learner == action.step - 1
                batch = [r.rollout_id for group in self.store.load_batch(action.step) for r in group.rollouts]
                assert self.batches_seen.setdefault(action.step, batch) == batch, "a repeated step has the same batch"
                self.job = action.step
            case PublishVersion():
                assert self.settings.is_due(action.policy_version)
                self.publishing.append(action.policy_version)
            case AnnounceVersion():
                self.published = action.policy_version
            case FinishRun():
                self.finished += 1

    def _receive(self, node_id: str, receipts: tuple[Receipt, ...]) -> None:
        for receipt in receipts:
            row = self.rows.get(receipt.rollout_id)
            if row is not None and row.node_id == node_id:
                expected = {"": (None,), "trained": (ReceiptState.TRAINED,)}.get(row.end, (ReceiptState.DROPPED,))
                assert receipt.state in expected or (not row.end and receipt.state not in FINAL)
            else:
                assert receipt.state is ReceiptState.DROPPED and receipt.drop_reason is DropReason.INVALID
            node = self.nodes[node_id]
            if node.connected:
                node.spool.pop(receipt.rollout_id, None)
                if receipt.state in FINAL:
                    node.work.pop(receipt.rollout_id, None)

    @rule(when=st.sampled_from(["before commit", "after commit", "now"]))
    def hub_dies(self, when: str) -> None:
        if when == "now":
            self._die()
        else:
            self.crash_at = when

    @rule(seconds=st.sampled_from([0.5, 4.0, DEADLINE_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.ticked_at = self.now
        self._turn(Tick())

    @rule(backwards=st.booleans(), count=st.integers(1, 8))
    def prepare(self, backwards: bool, count: int) -> None:
        for _ in range(min(count, len(self.preparing))):
            if not self.preparing:  # The hub died in between.
                break
            group_id = self.preparing.pop(-1 if backwards else 0)
            self._turn(GroupPrepared(group_id=group_id, seed=2**64 - 1 - group_id))

    @rule(verdict=st.sampled_from(["good"] * 6 + ["invalid", "failed"]), count=st.integers(1, 8))
    def score(self, verdict: str, count: int) -> None:
        for _ in range(min(count, len(self.scoring))):
            if not self.scoring:
                break
            scored = self.scoring.pop(0)
            if verdict == "good":
                self._turn(RolloutScored(rollout_id=scored, reward=1.0))
            else:
                reason = DropReason.INVALID if verdict == "invalid" else DropReason.SCORER_FAILED
                self._turn(RolloutRejected(rollout_id=scored, reason=reason, detail="no"))

    @precondition(lambda self: self.publishing)
    @rule(newest_first=st.booleans())
    def publish(self, newest_first: bool) -> None:
        self._turn(VersionPublished(policy_version=self.publishing.pop(-1 if newest_first else 0)))

    # --- nodes

    def _connect(self, node_id: str, capacity: int, version: int | None) -> None:
        node = self.nodes.setdefault(node_id, SimNode())
        node.connected, node.capacity, node.version = True, 0, None
        self._turn(NodeConnected(node_id=node_id))
        self._report(node_id, capacity, version)

    def _report(self, node_id: str, capacity: int, version: int | None) -> None:
        node = self.nodes[node_id]
        if node.connected:  # The hub may have died in between.
            node.capacity, node.version = capacity, version
            self._turn(NodeReported(node_id=node_id, capacity=capacity, policy_version=version))

    def _finish(self, node_id: str, name: str) -> None:
        """The node finishes one rollout; it is spooled before it is sent."""
        node = self.nodes[node_id]
        lease = node.work.pop(name)
        node.spool[name] = RolloutArrived(
            node_id=node_id,
            rollout_id=name,
            lease_id=lease.lease_id,
            group_id=lease.group_id,
            index=int(name.partition("-")[2]),
            policy_version_start=lease.policy_version,
            policy_version_end=lease.policy_version,
            payload=PAYLOAD,
        )

    def _resend(self, node_id: str) -> None:
        for event in list(self.nodes[node_id].spool.values()):
            if self.nodes[node_id].connected:
                self._turn(event)

    @rule(
        node_id=st.sampled_from("abc"),
        capacity=st.integers(0, 12),
        version=st.sampled_from([None, 0, 0, 1, 2, 99]),
        resend=st.booleans(),
    )
    def node_connects(self, node_id: str, capacity: int, version: int | None, resend: bool) -> None:
        self._connect(node_id, capacity, version)
        if resend:
            self._resend(node_id)

    @rule(node_id=st.sampled_from("abc"), capacity=st.integers(0, 9), fetch=st.booleans())
    def node_reports(self, node_id: str, capacity: int, fetch: bool) -> None:
        if node_id in self.nodes and self.nodes[node_id].connected:
            self._report(node_id, capacity, self.published if fetch else self.nodes[node_id].version)

    @rule(node_id=st.sampled_from("abc"), forget=st.booleans())
    def node_vanishes(self, node_id: str, forget: bool) -> None:
        if node_id in self.nodes and self.nodes[node_id].connected:
            node = self.nodes[node_id]
            node.connected = False
            if forget:
                node.work.clear()
            self._turn(NodeDisconnected(node_id=node_id))

    @rule(node_id=st.sampled_from(["a", "b", "c", HUB_NODE_ID]), pick=PICK, send=st.booleans())
    def node_works(self, node_id: str, pick: int, send: bool) -> None:
        node = self.nodes.get(node_id)
        if node and node.work:
            names = sorted(node.work)
            for name in names[pick % len(names) :]:
                self._finish(node_id, name)
            if send:
                self._resend(node_id)

    @rule(node_id=st.sampled_from("abc"), pick=PICK)
    def node_gives_back(self, node_id: str, pick: int) -> None:
        node = self.nodes.get(node_id)
        if node and node.connected and node.work:
            lease = node.work[sorted(node.work)[pick % len(node.work)]]
            for index in lease.indices:
                node.work.pop(rollout_id(lease.lease_id, index), None)
            self._turn(LeaseGivenBack(node_id=node_id, lease_id=lease.lease_id, indices=lease.indices, reason="owner"))

    @rule(node_id=st.sampled_from("abc"), pick=PICK, wrong=st.sampled_from(["lease", "group", "index", "version"]))
    def node_sends_garbage(self, node_id: str, pick: int, wrong: str) -> None:
        """About its own rollouts, about others' and about none."""
        if node_id not in self.nodes or not self.nodes[node_id].connected:
            return
        names = ["999-1", "007-1", "99999999999999999999999-0", *reversed(self.rows)]
        name = names[pick % min(len(names), 20)]
        row = self.rows.get(name, Leased("", 0, 0, 0.0))
        lease_id, index = (int(part) for part in name.split("-"))
        self._turn(
            RolloutArrived(
                node_id=node_id,
                rollout_id=name,
                lease_id=lease_id + (wrong == "lease"),
                group_id=row.group_id + (wrong == "group"),
                index=index + (wrong == "index"),
                policy_version_start=row.version,
                policy_version_end=row.version + (wrong == "version"),
                payload=PAYLOAD,
            )
        )

    # --- the learner

    @precondition(lambda self: self.learner is None)
    @rule()
    def learner_starts(self) -> None:
        self.learner = self.checkpoint
        self._turn(LearnerReady(policy_version=self.checkpoint))

    @precondition(lambda self: self.learner is not None)
    @rule(after_checkpoint=st.booleans())
    def learner_dies(self, after_checkpoint: bool) -> None:
        if after_checkpoint and self.job is not None:
            self.checkpoint = self.job
        self._kill_learner()
        self._turn(LearnerLost())

    def _kill_learner(self) -> None:
        self.learner = self.job = None
        if HUB_NODE_ID in self.nodes:
            self.nodes[HUB_NODE_ID].work.clear()

    @precondition(lambda self: self.job is not None)
    @rule(checkpointed=st.sampled_from([True, True, False]), pruned=st.booleans())
    def learner_trains(self, checkpointed: bool, pruned: bool) -> None:
        step, self.job = self.job, None
        assert step is not None
        self.learner = step
        if checkpointed:
            self.checkpoint = step
            if pruned:
                self.store.prune(step)
        self._turn(StepDone(step=step, metrics={"loss": 0.5}))

    # --- progress, so that faults meet every stage of a run

    @rule(workers=st.sets(st.sampled_from("abc")), fetchers=st.sets(st.sampled_from("abc")), train=st.booleans())
    def much_goes_well(self, workers: set[str], fetchers: set[str], train: bool) -> None:
        """Some nodes work and some fetch; the others fall behind."""
        if self.learner is None:
            self.learner_starts()
        for node_id in sorted(workers | fetchers):
            node = self.nodes.setdefault(node_id, SimNode())
            if not node.connected:
                self._connect(node_id, 6, 0)
            self._report(node_id, 6, self.published if node_id in fetchers else node.version)
        self.prepare(backwards=False, count=99)
        for node_id in (*sorted(workers), HUB_NODE_ID):
            for name in list(self.nodes[node_id].work) if node_id in self.nodes else ():
                if name in self.nodes[node_id].work:
                    self._finish(node_id, name)
            if node_id in self.nodes:
                self._resend(node_id)
        self.score("good", 99)
        if train:
            if self.job is not None:
                self.learner_trains(checkpointed=True, pruned=False)
            if self.publishing:
                self.publish(newest_first=False)

    # --- what must hold

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "coordinator"):
            return
        status, books = self.coordinator.status(), self.store.accounting()
        trained = sum(row.end == "trained" for row in self.rows.values())
        dropped = sum(bool(row.end) and row.end != "trained" for row in self.rows.values())
        assert books.leased == len(self.rows) == trained + dropped + status.in_flight
        assert (books.trained, books.dropped, books.in_flight) == (trained, dropped, status.in_flight)
        assert status.trained_steps == self.trained_steps

    @invariant()
    def admission_is_kept(self) -> None:
        if not hasattr(self, "coordinator"):
            return
        status = self.coordinator.status()
        live = len(self.opened - self.closed)
        assert live == status.groups_open + status.groups_buffered + status.groups_planned
        batch = self.settings.groups_per_step
        consumed = status.trained_steps * batch
        assert live + status.groups_preparing <= (self.bound + status.trained_steps + 1) * batch - consumed
        assert live + status.groups_preparing <= self.settings.steps * batch - consumed

    @invariant()
    def a_restart_changes_nothing(self) -> None:
        """Store and memory know the same unfinished work."""
        if not hasattr(self, "coordinator"):
            return
        snapshot, status = self.store.snapshot(), self.coordinator.status()
        assert len(snapshot.rollouts) == status.in_flight
        assert {group.group_id for group in snapshot.groups} == self.opened - self.closed
        assert (snapshot.planned is not None) == bool(status.groups_planned)

    def teardown(self) -> None:
        """From here on all goes well: one reliable node, one learner. The run must finish, with nothing left over."""
        if not hasattr(self, "coordinator"):
            return
        self.crash_at = ""
        worker = HUB_NODE_ID if self.settings.mode == "colocated" else RELIABLE
        if worker == RELIABLE:
            self._connect(RELIABLE, 2, self.published)
        for _ in range(80 * self.settings.steps):
            if self.finished:
                break
            self._calm_round(worker)
        assert self.finished, f"the run does not finish: {self.coordinator.status()}"
        status = self.coordinator.status()
        assert status.finished and status.in_flight == 0
        assert self.trained_steps == self.settings.steps == self.coordinator.published_version
        assert self.store.accounting().trained == self.settings.steps * self.settings.groups_per_step * (
            self.settings.group_size
        )
        self.store.close()

    def _calm_round(self, worker: str) -> None:
        if self.learner is None:
            self.learner_starts()
        self.prepare(backwards=True, count=99)
        for name in list(self.nodes[worker].work):
            self._finish(worker, name)
        self._resend(worker)
        while self.scoring:
            self._turn(RolloutScored(rollout_id=self.scoring.pop(0), reward=0.5))
        if self.job is not None:
            self.learner_trains(checkpointed=True, pruned=False)
        if self.publishing:
            self.publish(newest_first=False)
        if worker == RELIABLE:
            self._report(RELIABLE, 2, self.published)
        self.time_passes(DEADLINE_S / 2)
        self.books_are_right()
        self.admission_is_kept()


def _subset(chance: Random) -> set[str]:
    return {node_id for node_id in "abc" if chance.random() < 0.6}


MOVES: list[tuple[int, Callable[[World, Random], None]]] = [
    (12, lambda world, chance: world.much_goes_well(_subset(chance), _subset(chance), chance.random() < 0.5)),
    (6, lambda world, chance: world.node_works(chance.choice("abc"), chance.randrange(99), chance.random() < 0.7)),
    (5, lambda world, chance: world.node_reports(chance.choice("abc"), chance.randrange(13), chance.random() < 0.4)),
    (3, lambda world, chance: world.time_passes(chance.choice([0.5, 4.0, DEADLINE_S + 1]))),
    (2, lambda world, chance: world.prepare(chance.random() < 0.5, 3)),
    (3, lambda world, chance: world.score(chance.choice(["good", "good", "good", "invalid", "failed"]), 3)),
    (2, lambda world, chance: world.node_sends_garbage(chance.choice("abc"), chance.randrange(99), "version")),
    (1, lambda world, chance: world.node_sends_garbage(chance.choice("abc"), chance.randrange(99), "lease")),
    (1, lambda world, chance: world.node_gives_back(chance.choice("abc"), chance.randrange(99))),
    (1, lambda world, chance: world.node_vanishes(chance.choice("abc"), chance.random() < 0.5)),
    (
        1,
        lambda world, chance: world.node_connects(chance.choice("abc"), chance.randrange(13), 0, chance.random() < 0.7),
    ),
    (1, lambda world, chance: world.hub_dies(chance.choice(["before commit", "after commit", "now"]))),
    (3, lambda world, chance: world.learner_dies(chance.random() < 0.5) if world.learner is not None else None),
    (3, lambda world, chance: world.learner_trains(chance.random() < 0.4, True) if world.job is not None else None),
    (1, lambda world, chance: world.publish(chance.random() < 0.5) if world.publishing else None),
]


def walk(seed: int, moves: int) -> World:
    """A long random run, its moves weighted so that runs get far and faults meet every stage of them."""
    chance = Random(seed)
    world = World()
    world.begin(
        mode=("async", "async", "sequential", "colocated")[seed % 4],
        steps=chance.randint(3, 12),
        groups_per_step=chance.randint(1, 4),
        group_size=chance.randint(2, 4),
        max_staleness=chance.randint(0, 3),
        pick=chance.randrange(99),
    )
    for _ in range(moves):
        weights = [weight for weight, _ in MOVES]
        chance.choices(MOVES, weights)[0][1](world, chance)
        world.books_are_right()
        world.admission_is_kept()
        world.a_restart_changes_nothing()
    world.teardown()
    return world


def test_long_walks_meet_every_end() -> None:
    """The walks are not vacuous: rollouts end in every way that there is."""
    ends = {row.end for seed in range(24) for row in walk(seed, moves=60).rows.values()}
    assert ends == {"trained", *DropReason} - {DropReason.RUN_ENDED}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1060))
def test_longer_walks(seed: int) -> None:
    walk(seed, moves=250)


def _run(examples: int, steps: int, phases: tuple[Phase, ...]) -> None:
    run_state_machine_as_test(
        World,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            phases=phases,
            report_multiple_bugs=False,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        ),
    )


def test_any_world() -> None:
    _run(examples=25, steps=40, phases=(Phase.generate,))


@pytest.mark.slow
def test_many_worlds() -> None:
    _run(examples=600, steps=80, phases=(Phase.generate, Phase.shrink))
