"""The events of `test_coordinator_properties`, and its invariants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    invariant,
    precondition,
    rule,
)
from sqlalchemy import Connection

from echo_hub.actions.records import ActionOutcome
from echo_hub.actions.requests import Resume
from echo_hub.core.accounting.events import (
    AnswerCancelled,
    AnswerWanted,
    CheckAbandoned,
    CheckReturned,
    EvaluationAbandoned,
    EvaluationWanted,
    GroupPrepared,
    LearnerLost,
    LearnerReady,
    LeaseGivenBack,
    NodeConnected,
    NodeDisconnected,
    NodePardoned,
    NodeReported,
    NumericsMeasured,
    OperatorAsked,
    RolloutArrived,
    RolloutChecked,
    RolloutRejected,
    SlotsChanged,
    StepComputed,
    StepDone,
    Tick,
    VersionPublished,
)
from echo_hub.core.accounting.parameters import SamplingParameters
from echo_hub.core.answer_groups import AnswerGroup, AnswerMember, is_answer
from echo_hub.core.nodes.node import HUB_NODE_ID
from echo_hub.store.actions import find_action, note_action
from echo_hub.store.answers import read_next_answer_id
from echo_hub.store.reading import read_evaluated
from echo_hub.store.reports import read_accounting
from echo_hub.store.unfinished import read_snapshot
from echo_shared.records.rollout import DrawnSpan
from echo_shared.records.run import Evaluation, EvaluationKind
from echo_shared.wire.messages import (
    DropReason,
    rollout_id,
)
from echo_shared.wire.messages.fields import FIRST_TENANT_VERSION
from tests.echo_hub.core.modelled_world import (
    DEADLINE_S,
    FINDINGS,
    OPERATOR,
    PICK,
    PROMPTS,
    RELIABLE,
    USEFUL,
    Leased,
    ModelledWorld,
    SimNode,
    figures,
    finding,
    payload,
    screen,
)

T = TypeVar("T")


class World(ModelledWorld):
    """Rules for everything that can happen to the run, and invariants that must hold afterwards."""

    @precondition(lambda self: self.settings.evaluation_problems)
    @rule(pick=PICK)
    def evaluation_is_wanted(self, pick: int) -> None:
        due = sorted(set(range(self.published + 1)) - self.evaluated - self.evaluating)
        if due:
            self.evaluating.add(due[pick % len(due)])
            self._turn(EvaluationWanted(policy_version=due[pick % len(due)]))

    @rule(first=st.integers(1, 3), second=st.integers(0, 2), pick=PICK)
    def samples_are_wanted(self, first: int, second: int, pick: int) -> None:
        """A tenant asks for a group of one or two requests; co-located runs have no nodes for tenants."""
        number = self.store.read(read_next_answer_id)
        members = [AnswerMember(request_id=f"{number} a", num_samples=first, first_index=pick % 2)]
        if second:
            members.append(AnswerMember(request_id=f"{number} b", num_samples=second, first_index=4))
        if self.settings.mode != "colocated":
            self._turn(
                AnswerWanted(
                    group=AnswerGroup(
                        group_id=number,
                        tenant_id="t",
                        prompt_ids=np.array([1, 2], np.int32),
                        policy_version=(0, self.published, FIRST_TENANT_VERSION + pick % 3)[pick % 3],
                        seed=pick,
                        sampling=SamplingParameters(temperature=0.5, max_tokens=9),
                        is_checked=bool(pick % 2),
                        members=tuple(members),
                    )
                )
            )

    @precondition(lambda self: self.requests)
    @rule(pick=PICK)
    def samples_are_cancelled(self, pick: int) -> None:
        group = self.requests[sorted(self.requests)[pick % len(self.requests)]]
        member = group.members[pick % len(group.members)]
        self._turn(AnswerCancelled(group_id=group.group_id, request_id=member.request_id))

    @precondition(lambda self: self.settings.evaluation_problems)
    @rule(pick=PICK)
    def evaluation_is_abandoned(self, pick: int) -> None:
        """Abandon an evaluation; the hub then evaluates by itself."""
        if self.evaluating:
            version = sorted(self.evaluating)[pick % len(self.evaluating)]
            self._turn(EvaluationAbandoned(policy_version=version))
            if version in self.evaluating:  # The hub may have died in this turn and forgotten the request.
                self._record_evaluation(version, whole=False)

    def _record_evaluation(self, version: int, *, whole: bool = True) -> None:
        episodes = self.store.read(read_evaluated, version)
        problems, samples = self.settings.evaluation_problems, self.settings.evaluation_samples
        assert version in self.evaluating and all(one.about.policy_version == version for one in episodes)
        assert not whole or len(episodes) == problems * (1 + samples)
        for one in episodes:
            index_turns = {self._num_turns(one.about.group_id, index) for index in range(max(samples, 1))}
            assert one.reward in (None, 0.0, 1.0) and 1 <= one.num_tokens <= 5 * max(index_turns)
        self.evaluating.discard(version)
        self.evaluated.add(version)
        measured = dict.fromkeys(("accuracy", "accuracy_error", "mean_reward", "mean_tokens", "share_truncated"), 0.5)
        kind = EvaluationKind.GREEDY
        self.store.record_evaluations(
            [
                Evaluation(
                    policy_version=version,
                    kind=kind,
                    num_problems=problems,
                    samples=1,
                    num_unscored=0,
                    pass_at={},
                    seconds=1.0,
                    evaluated_at=self.now,
                    **measured,
                )
            ]
        )
        assert self.store.read(read_evaluated, version) == []

    @rule(when=st.sampled_from(["before commit", "after commit", "now"]), orphan_trains=st.integers(0, 2))
    def hub_dies(self, when: str, orphan_trains: int = 0) -> None:
        """Kill the hub; its learner may finish the steps that it holds."""
        self.orphan_trains = orphan_trains
        if when == "now":
            self._die()
        else:
            self.crash_at = when

    @rule(seconds=st.sampled_from([0.5, 4.0, DEADLINE_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self._parts_come()
        self.now += seconds
        self.ticked_at = self.now
        self._turn(Tick())

    @rule(backwards=st.booleans(), count=st.integers(1, 8))
    def prepare(self, backwards: bool, count: int) -> None:
        for _ in range(min(count, len(self.preparing))):
            if not self.preparing:  # The hub may have died in this turn.
                break
            group_id = self.preparing.pop(-1 if backwards else 0)
            self._turn(GroupPrepared(group_id=group_id, seed=2**64 - 1 - group_id, prompt=group_id % PROMPTS))

    @rule(verdict=st.sampled_from(["good"] * 6 + ["invalid", "failed"]), count=st.integers(1, 8))
    def score(self, verdict: str, count: int) -> None:
        for _ in range(min(count, len(self.scoring))):
            if not self.scoring:
                break
            scored = self.scoring.pop(0)
            if self.rows[scored].end:
                continue
            if verdict == "good":
                self._turn(self._verdict(scored))
            else:
                reason = DropReason.INVALID if verdict == "invalid" else DropReason.SCORER_FAILED
                self._turn(RolloutRejected(rollout_id=scored, reason=reason, detail="no"))

    @precondition(lambda self: self.sessions)
    @rule(
        lost=st.sampled_from(["lost", "diverged", "diverged", "lost by hub", "diverged by hub"]),
        count=st.integers(1, 3),
        pick=PICK,
    )
    def sessions_are_lost(self, lost: str, count: int, pick: int = 0) -> None:
        """Let a node send its rollouts, and lose the sessions of up to `count` rollouts that wait for their scores."""
        self.node_works("abc"[pick % 3], 0, send=True)
        for _ in range(min(count, len(self.scoring))):
            if not self.scoring:
                break
            name = self.scoring.pop(0)
            if not self.rows[name].end:
                is_session = not is_answer(self.rows[name].group_id)
                self._turn(self._loses_session(name, lost, pick) if is_session else self._verdict(name))

    @precondition(lambda self: self.sessions)
    @rule(slots=st.integers(0, 9))
    def slots_change(self, slots: int) -> None:
        self.sessions = slots or self.sessions
        self._turn(SlotsChanged(slots=slots))

    @rule(found=st.sampled_from(["honest"] * 6 + ["odd", "forged", "abandoned"]), count=st.integers(1, 8))
    def check(self, found: str, count: int) -> None:
        """Answer `count` of the open checks with the finding `found`. A forgery is attributed to the first node that
        sampled the rollout.
        """
        for _ in range(min(count, len(self.asked))):
            if not self.asked:
                break
            asked = self.asked.pop(0)
            row = self.rows[asked.rollout_id]
            said = None if found == "abandoned" else finding(found, row.drawers)
            self.num_opinions += said is not None
            self._turn(CheckReturned(node_id=asked.node_id, rollout_id=asked.rollout_id, finding=said))
        while self.measuring:
            asked_for = self.measuring.pop()
            measured = None if found == "abandoned" else FINDINGS["honest"]
            self._turn(
                NumericsMeasured(
                    rounding=asked_for.rounding, policy_version=asked_for.policy_version, evidence=measured
                )
            )
        for _ in range(min(count, len(self.checking))):
            if not self.checking:
                break
            name = self.checking.pop(0)
            row = self.rows[name]
            if found == "abandoned":
                row.waits = False
                self._turn(CheckAbandoned(rollout_id=name))
            else:
                drawers = (*row.drawn_by, row.node_id)
                shown = [FINDINGS[found], *[FINDINGS["honest"]] * (len(drawers) - 1)]
                self._turn(RolloutChecked(rollout_id=name, spans=tuple(zip(drawers, shown, strict=True))))

    @rule(node_id=st.sampled_from("abc"), found=st.sampled_from(["honest", "odd", "forged", "abandoned"]))
    def node_is_checked(self, node_id: str, found: str) -> None:
        """Let a node send rollouts, and let the verifier check some of these rollouts, before or after scoring."""
        self.node_works(node_id, 0, send=True)
        if found != "honest":
            self.score("good", 2)
        self.check(found, 2)

    @rule(node_id=st.sampled_from("abc"))
    def operator_pardons(self, node_id: str) -> None:
        if node_id in self.standings:
            self._turn(NodePardoned(node_id=node_id))

    @rule(
        wanted=st.one_of(
            st.tuples(st.just("leasing"), st.sampled_from(["open", "paused", "draining"])),
            st.tuples(st.just("max_staleness"), st.integers(0, 4)),
            st.tuples(st.just("publish_every"), st.integers(1, 4)),
            st.tuples(st.just("learning_rate"), st.sampled_from([1e-4, 1e-3])),
            st.tuples(st.just("spend_cap_per_hour"), st.sampled_from([0.0, 1.0])),
            st.tuples(st.just("publish_now"), st.just("")),
        )
    )
    def operator_asks(self, wanted: tuple[str, str | float]) -> None:
        """Request a change of settings; repeat the request if the hub dies before it answers."""
        what, value = wanted
        number = self.store.write(note_action, Resume(), OPERATOR, self.now).number
        while (found := self.store.read(find_action, number)) is not None and found.outcome is ActionOutcome.WANTED:
            self._turn(OperatorAsked(number=number, what=what, value=value))
        assert found is not None
        self.met_outcomes.add((what, found.outcome))

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
        if node.connected:  # The hub may have died in this turn.
            node.capacity, node.version = capacity, version
            checks = 2 if self.settings.trust.by_nodes and node_id != HUB_NODE_ID else 0
            self._turn(
                NodeReported(
                    node_id=node_id,
                    capacity=capacity,
                    policy_version=version,
                    tokens_per_s=(0.0, 1.0, 1e9)[capacity % 3],
                    checks=checks,
                )
            )

    def _finish(self, node_id: str, name: str) -> None:
        """Finish one rollout, and store it on the node's disk before sending it. With `interrupts`, the rollout begins
        with a newer version than its lease's, or changes to one.
        """
        node = self.nodes[node_id]
        lease = node.work.pop(name)
        drawn = payload(lease.group_id, int(name.partition("-")[2]), lease.turn)
        row = self.rows[name]
        start = end = row.oldest
        if self.settings.interrupts and lease.group_id in self.opened:
            end = max(self.published, row.version)
            start = end if lease.lease_id % 3 == 0 and not lease.goes_on else row.oldest
            counts = (1, len(drawn.completion_ids) - 1) if start < end and len(drawn.completion_ids) > 1 else (0, 0)
            end = end if counts[0] else start
            drawn = replace(
                drawn,
                spans=tuple(
                    DrawnSpan(node_id=node_id, policy_version=version, num_tokens=count or len(drawn.completion_ids))
                    for version, count in (((start, counts[0]), (end, counts[1])) if counts[0] else ((start, 0),))
                ),
            )
        elif len(row.drawn_by) < len(drawn.completion_ids):
            counts_of = dict.fromkeys(row.drawn_by, 1) | {node_id: 0}
            counts_of[node_id] = len(drawn.completion_ids) - len(row.drawn_by)
            spans = [DrawnSpan(node_id=who, policy_version=start, num_tokens=count) for who, count in counts_of.items()]
            drawn = replace(drawn, spans=tuple(spans)) if row.drawn_by else drawn
        else:
            row.drawn_by = ()
        node.spool[name] = RolloutArrived(
            node_id=node_id,
            rollout_id=name,
            lease_id=lease.lease_id,
            group_id=lease.group_id,
            index=int(name.partition("-")[2]),
            policy_version_start=start,
            policy_version_end=end,
            payload=drawn,
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
            self._parts_come()
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

    @rule(node_id=st.sampled_from("abc"), pick=PICK, unusable=st.sampled_from([None, None, "its own", 0, 1]))
    def node_gives_back(self, node_id: str, pick: int, unusable: str | int | None = None) -> None:
        self._parts_come()
        node = self.nodes.get(node_id)
        if node and node.connected and node.work:
            lease = node.work[sorted(node.work)[pick % len(node.work)]]
            for index in lease.indices:
                node.work.pop(rollout_id(lease.lease_id, index), None)
            version = lease.policy_version if unusable == "its own" else unusable
            assert not isinstance(version, str)
            self._turn(
                LeaseGivenBack(
                    node_id=node_id,
                    lease_id=lease.lease_id,
                    indices=lease.indices,
                    reason="owner",
                    unusable_version=version,
                )
            )

    @rule(node_id=st.sampled_from("abc"), pick=PICK, wrong=st.sampled_from(["lease", "group", "index", "version"]))
    def node_sends_garbage(self, node_id: str, pick: int, wrong: str) -> None:
        if node_id not in self.nodes or not self.nodes[node_id].connected:
            return
        names = ["999-1", "007-1", "99999999999999999999999-0", *reversed(self.rows)]
        name = names[pick % min(len(names), 20)]
        row = self.rows.get(name, Leased("", 0, 0, 0, 0, 0.0))
        lease_id, index = (int(part) for part in name.split("-"))
        self._turn(
            RolloutArrived(
                node_id=node_id,
                rollout_id=name,
                lease_id=lease_id + (wrong == "lease"),
                group_id=row.group_id + (wrong == "group"),
                index=index + (wrong == "index"),
                policy_version_start=row.version,
                policy_version_end=row.version + 99 * (wrong == "version"),
                payload=payload(row.group_id, index % 100, row.turn),
            )
        )

    # --- the learner

    @precondition(lambda self: self.learner is None)
    @rule()
    def learner_starts(self) -> None:
        self.learner = self.checkpoint
        self.most_unseen = max(self.most_unseen, self.checkpoint - self.trained_steps)
        kept = {step: figures(step) for step in (self.checkpoint - 1, self.checkpoint) if step > 0}
        screens = {step: screen(self.planned[step]) for step in kept}
        self._turn(LearnerReady(policy_version=self.checkpoint, metrics=kept, screens=screens))

    @precondition(lambda self: self.learner is not None)
    @rule(checkpointed=st.integers(0, 2))
    def learner_dies(self, checkpointed: int) -> None:
        """Let the learner checkpoint some steps without reporting them, then kill it."""
        self._checkpoint_some(checkpointed)
        self._kill_learner()
        self._turn(LearnerLost())

    def _checkpoint_some(self, count: int) -> None:
        self.checkpoint = max([self.checkpoint, *self.jobs[:count]])

    def _kill_learner(self) -> None:
        self.learner, self.jobs, self.num_computed = None, [], 0
        self.held.clear()
        if HUB_NODE_ID in self.nodes:
            self.nodes[HUB_NODE_ID].work.clear()

    @precondition(lambda self: self.num_computed < len(self.jobs))
    @rule()
    def learner_computes(self) -> None:
        """Let the learner compute a step, without writing its files yet."""
        step = self.jobs[self.num_computed]
        self.num_computed += 1
        self._turn(StepComputed(step=step))

    @precondition(lambda self: self.jobs)
    @rule(checkpointed=st.sampled_from([True, True, False]), pruned=st.booleans())
    def learner_trains(self, checkpointed: bool, pruned: bool) -> None:
        step = self.learner = self.jobs.pop(0)
        self.num_computed = max(0, self.num_computed - 1)
        if checkpointed:
            self.checkpoint = step
            if pruned:
                self.store.prune(step)
        self._turn(StepDone(step=step, metrics=figures(step), screen=screen(self.planned[step])))

    # --- progress, so that faults meet every stage of a run

    @rule(workers=st.sets(st.sampled_from("abc")), fetchers=st.sets(st.sampled_from("abc")), train=st.booleans())
    def much_goes_well(self, workers: set[str], fetchers: set[str], train: bool) -> None:
        """Let `workers` work and `fetchers` fetch versions, while other nodes fall behind."""
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
        self.check("honest", 99)
        self.score("good", 99)
        if train:
            if self.jobs:
                self.learner_trains(checkpointed=True, pruned=False)
            if self.publishing:
                self.publish(newest_first=False)

    # --- invariants

    def _stored(self, query: Callable[[Connection], T]) -> T:
        """Return the result of a query on the store. Run the query again only if a row has changed since its last
        run.
        """
        with self.store.engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            if query not in self.found or self.found[query][0] != driver.total_changes:
                self.found[query] = driver.total_changes, query(connection)
        found: T = self.found[query][1]
        return found

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "coordinator"):
            return
        status, books = self.coordinator.status(), self._stored(read_accounting)
        trained = sum(row.end == "trained" for row in self.rows.values())
        evaluated = sum(row.end == "evaluated" for row in self.rows.values())
        answered = sum(row.end == "answered" for row in self.rows.values())
        dropped = sum(bool(row.end) and row.end not in USEFUL for row in self.rows.values())
        assert books.leased == len(self.rows) == trained + evaluated + answered + dropped + status.in_flight
        assert (books.trained, books.evaluated, books.answered) == (trained, evaluated, answered)
        assert books.balanced
        assert (books.num_dropped, books.in_flight) == (dropped, status.in_flight)
        assert status.trained_steps == self.trained_steps
        assert status.training_step == next(iter(self.jobs[self.num_computed :]), None)

    @invariant()
    def admission_is_kept(self) -> None:
        if not hasattr(self, "coordinator"):
            return
        status = self.coordinator.status()
        live = len(self.opened - self.closed)
        assert live == status.groups_open + status.groups_buffered + status.groups_planned
        batch = self.settings.groups_per_step
        if self.settings.tokens_per_step:  # With a token budget, a step may need fewer groups than a full batch.
            assert live - status.groups_planned + status.groups_preparing <= (self.most_bound + 1) * batch
            return
        consumed = status.trained_steps * batch
        assert live + status.groups_preparing <= (self.most_bound + status.trained_steps + 1) * batch - consumed
        assert live + status.groups_preparing <= self.settings.steps * batch - consumed

    @invariant()
    def a_restart_changes_nothing(self) -> None:
        """Compare the unfinished work that a restarted hub would read from the store with the coordinator's."""
        if not hasattr(self, "coordinator"):
            return
        snapshot, status = self._stored(read_snapshot), self.coordinator.status()
        assert {row.node_id: row.state for row in snapshot.standings} == self.standings
        assert sum(map(self._is_quarantined, self.standings)) == status.trust.quarantined
        assert len(snapshot.rollouts) == status.in_flight
        assert {group.group_id for group in snapshot.groups} == self.opened - self.closed
        unfinished = [group_id for group_id in self.requests if self._wanted_samples(group_id)]
        assert status.requests_open == len(unfinished)
        assert {group.group_id for group in snapshot.answers} == set(self.requests)
        assert snapshot.answered == self._answered_samples() == self.delivered
        steps = range(self.trained_steps + 1, len(self.planned) + 1)
        assert [row.step for row in snapshot.planned] == list(steps)
        assert sum(len(row.group_ids) for row in snapshot.planned) == status.groups_planned

    def teardown(self) -> None:
        """Nothing fails from here on: one reliable node and one learner must finish the run, and leave nothing
        unfinished.
        """
        if not hasattr(self, "coordinator"):
            return
        self.crash_at = ""
        if self.settings.leasing != "open":
            self.operator_asks(("leasing", "open"))
        if self.sessions:
            self.slots_change(self.sessions)
        worker = HUB_NODE_ID if self.settings.mode == "colocated" else RELIABLE
        if worker == RELIABLE:
            self._connect(RELIABLE, 2, self.published)
        for _ in range(400 * self.settings.steps):
            if self.finished:
                break
            self._calm_round(worker)
        for _ in range(400 if self.settings.evaluation_problems else 0):
            if self.settings.steps in self.evaluated and not self.evaluating:
                break
            if not self.evaluating:
                self.evaluation_is_wanted(len(self.rows))
            self._calm_round(worker)
        for _ in range(400 if self.requests else 0):
            if not self.coordinator.status().requests_open:
                break
            self._calm_round(worker)
        if self.settings.trust.by_nodes:  # No other node is left to check samples, so tenants cancel.
            for group in list(self.requests.values()):
                for member in group.members:
                    self._turn(AnswerCancelled(group_id=group.group_id, request_id=member.request_id))
        assert not self.coordinator.status().requests_open, "one reliable node is enough for all requests"
        assert not self.settings.evaluation_problems or self.settings.steps in self.evaluated
        assert self.finished, f"the run does not finish: {self.coordinator.status()}"
        status = self.coordinator.status()
        assert status.finished and status.in_flight == 0
        assert self.trained_steps == self.settings.steps == self.coordinator.published_version
        assert not self.evaluating
        assert not self.open_sessions, "every session is closed once its episode has ended"
        books = self.store.read(read_accounting)
        used = books.trained + books.dropped.get(DropReason.SCREENED, 0)
        assert used == sum(len(plan.rollout_ids) for plan in self.planned.values())
        self.store.close()

    def _calm_round(self, worker: str) -> None:
        if self.learner is None:
            self.learner_starts()
        self.prepare(backwards=True, count=99)
        for name in list(self.nodes[worker].work):
            self._finish(worker, name)
        self._resend(worker)
        while self.checking or self.asked:
            self.check("honest", 99)
        while self.scoring:
            scored = self.scoring.pop(0)
            if not self.rows[scored].end:
                self._turn(self._verdict(scored))
        if self.jobs:
            self.learner_trains(checkpointed=True, pruned=False)
        if self.publishing:
            self.publish(newest_first=False)
        if worker == RELIABLE:
            self._report(RELIABLE, 2, self.published)
        self.time_passes(DEADLINE_S / 2)
        self.books_are_right()
        self.admission_is_kept()
