"""The world of `test_coordinator_properties`: a run, its nodes and its learner, and a model of what the hub records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
)

from echo_hub.actions.records import ActionOutcome, Actor
from echo_hub.core.accounting import effects
from echo_hub.core.accounting.effects import (
    RECORDS,
    AnnounceVersion,
    AnswerOpened,
    AnswerReplaced,
    AnswersCancelled,
    BeginStep,
    CheckRecorded,
    CheckRollout,
    CloseSession,
    DeliverAnswer,
    Effect,
    EvaluationDone,
    FinishRun,
    GroupDropped,
    GroupOpened,
    GroupsRated,
    HandOver,
    HastenChecks,
    LookUpReceipt,
    MeasureNumerics,
    PrepareGroup,
    PublishVersion,
    RevokeLease,
    RolloutReceived,
    RolloutsAnswered,
    RolloutsDropped,
    RolloutsEvaluated,
    RolloutsLeased,
    ScoreRecorded,
    ScoreRollout,
    SendCheck,
    SendLease,
    SendReceipts,
    SendTrained,
    SessionNoted,
    SettingRecorded,
    StandingRecorded,
    StepPlanned,
    StepTrained,
    TellStandby,
    TrainStep,
    TrustDecided,
)
from echo_hub.core.accounting.events import (
    Event,
    RolloutArrived,
    RolloutContinued,
    RolloutsBegun,
    RolloutScored,
    SessionDiverged,
    SessionLost,
    SlotsChanged,
)
from echo_hub.core.accounting.groups import turn_seed
from echo_hub.core.accounting.parameters import SessionRules
from echo_hub.core.answer_groups import AnswerGroup, is_answer
from echo_hub.core.coordinator import Coordinator
from echo_hub.core.evaluating import evaluation_seed
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.core.nodes.node import HUB_NODE_ID
from echo_hub.core.operating import restored
from echo_hub.core.policy.curriculum import CurriculumSettings
from echo_hub.core.policy.mixture import TrainedTask
from echo_hub.core.settings import CoordinatorSettings
from echo_hub.core.trust.pairs import PeerFinding
from echo_hub.core.trust.screening import StepScreen
from echo_hub.core.trust.settings import TrustSettings
from echo_hub.core.trust.standing import StandingState
from echo_hub.store.actions import read_settings
from echo_hub.store.reading import read_batch, read_groups, read_payloads, read_receipts, read_turns
from echo_hub.store.store import Store
from echo_hub.store.unfinished import read_snapshot
from echo_shared.records.rollout import RolloutPayload
from echo_shared.wire.messages import (
    Checked,
    DropReason,
    FinishReason,
    Receipt,
    ReceiptState,
    StandbyReason,
    rollout_id,
)
from tests.echo_hub.core.trust.simulated import evidence


def payload(group_id: int, index: int, turn: int) -> RolloutPayload:
    length = 1 + (7 * group_id + 3 * index + turn) % 5
    return RolloutPayload(
        completion_ids=np.full(length, 100 * index + turn, np.int32),
        behavior_logprobs=np.full(length, -0.5, np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=0.1,
    )


def figures(step: int) -> dict[str, float]:
    return {"loss": step / 8}


def screen(planned: StepPlanned) -> StepScreen:
    """Return the learner's findings about a step: the groups that it excludes (none, one, or all). The same step always
    gets the same findings.
    """
    num_left_out = (0, 1, 0, len(planned.group_ids))[planned.step % 4]
    return StepScreen(left_out=tuple(range(num_left_out)))


PROMPTS = 6
DEADLINE_S = 10.0
RELIABLE = "reliable"
OPERATOR = Actor(via="cli", who="test")
PICK = st.integers(0, 2**16)
FINAL = (ReceiptState.TRAINED, ReceiptState.EVALUATED, ReceiptState.ANSWERED, ReceiptState.DROPPED)
USEFUL = ("trained", "evaluated", "answered")
FINDINGS = {
    "honest": evidence(40),
    "odd": evidence(3, forged=2),
    "forged": evidence(forged=40, error=5.0),
}
"""The evidence for each finding that the verifier may report."""


def finding(found: str, drawers: Sequence[str]) -> PeerFinding:
    """Return the finding `found` as a checking node reports it. `drawers`: the nodes that sampled the rollout; a
    forgery is attributed to the first of them.
    """
    spans = tuple(
        (
            node_id,
            FINDINGS["honest" if number else found],
        )
        for number, node_id in enumerate(drawers)
    )
    below = np.full(40, {"honest": 0.0, "odd": 0.05, "forged": 0.5}[found])
    return PeerFinding(spans=spans, below=below, logprobs=-1.0 - 10 * below, num_tokens=50)


@dataclass
class SimNode:
    """A node: its current work, and the results that it sent without getting an acknowledgement."""

    connected: bool = False
    capacity: int = 0
    version: int | None = None
    work: dict[str, SendLease] = field(default_factory=dict)
    spool: dict[str, RolloutArrived] = field(default_factory=dict)


@dataclass
class Leased:
    """One leased rollout in the test's own records, which are kept independently of the coordinator."""

    node_id: str
    group_id: int
    index: int
    turn: int
    version: int
    deadline: float
    failures: int = 0
    """Number of times that the scorer failed on this turn before the lease."""
    oldest: int = -1
    """Version that sampled the oldest token. That token may come from an earlier lease (a prefix that this rollout
    continues); otherwise the lease's version or a newer one sampled it.
    """
    received: bool = False
    num_tokens: int = 0
    answered: bool = False
    drawn_by: tuple[str, ...] = ()
    """Nodes that sampled the prefix (tokens of an earlier lease that this rollout continues), except the node that now
    holds the lease.
    """
    drawers: tuple[str, ...] = ()
    """All nodes that sampled part of the received rollout."""
    waits: bool = False
    """True until the rollout's check is done; until then no step may train on the rollout."""
    checked: Checked = Checked.NO
    end: str = ""


class ModelledWorld(RuleBasedStateMachine):
    """Everything around the coordinator. `_turn` is one turn of the hub: records are committed to the store, then
    actions are carried out. An independent model follows the records.
    """

    @initialize(
        mode=st.sampled_from(["colocated", "sequential", "async", "async"]),
        steps=st.integers(1, 6),
        groups_per_step=st.integers(1, 3),
        group_size=st.integers(2, 4),
        max_staleness=st.integers(0, 3),
        pick=PICK,
        turns=st.integers(1, 3),
        dynamic_sampling=st.booleans(),
        tokens_per_step=st.sampled_from([0, 0, 5, 30]),
        evaluation=st.sampled_from([(0, 0), (2, 0), (1, 3)]),
        first_window=st.sampled_from([1, 4, 64]),
        interrupts=st.booleans(),
        first_checked=st.sampled_from([0, 0, 1, 3]),
        by_nodes=st.booleans(),
        curriculum=st.sampled_from([None, "skip", "learnability"]),
        sessions=st.sampled_from([0, 0, 1, 5, 99]),
        verify_first=st.booleans(),
    )
    def begin(
        self,
        mode: Any,
        steps: int,
        groups_per_step: int,
        group_size: int,
        max_staleness: int,
        pick: int,
        turns: int = 1,
        dynamic_sampling: bool = False,
        tokens_per_step: int = 0,
        evaluation: tuple[int, int] = (0, 0),
        first_window: int = 4,
        interrupts: bool = False,
        first_checked: int = 0,
        by_nodes: bool = False,
        curriculum: Any = None,
        sessions: int = 0,
        verify_first: bool = False,
    ) -> None:
        """Start a world; with `first_checked` 0 there is no verifier. `sessions`: number of sessions that may be open
        at once; 0: episodes are no sessions."""
        self.sessions = sessions
        # If nodes check each other, no node could check the turns of the last node that is left, so the run would stop.
        self.terms = SessionRules(verify_first=verify_first and not by_nodes) if sessions else None
        period = 1 + pick % (max_staleness + 1) if mode == "async" else 1
        self.settings = self.configured = CoordinatorSettings(
            mode=mode,
            steps=steps,
            groups_per_step=groups_per_step,
            group_size=group_size,
            max_staleness=max_staleness,
            publish_every=period,
            deadline_s=DEADLINE_S,
            multi_turn=turns > 1,
            dynamic_sampling=dynamic_sampling,
            curriculum=curriculum and CurriculumSettings(rule=curriculum, by="problem"),
            tasks=(TrainedTask(key="task"),),
            tokens_per_step=tokens_per_step,
            first_window=first_window,
            interrupts=interrupts and mode == "async",
            run_seed=11,
            evaluation_problems=0 if mode == "colocated" else evaluation[0],
            evaluation_samples=evaluation[1],
            session_rules=(lambda group_id: self.terms) if sessions else None,
            trust=TrustSettings(
                enabled=first_checked > 0,
                by_nodes=by_nodes and first_checked > 0,
                secret=b"hub",
                first_checked=first_checked,
                least_checked=0.3,
                check_deadline_s=DEADLINE_S,
            ),
        )
        self.standings: dict[str, StandingState] = {}
        self.evaluating: set[int] = set()
        """Versions whose evaluation was requested since the hub started."""
        self.evaluated: set[int] = set()
        """Versions with a recorded evaluation."""
        self.requests: dict[int, AnswerGroup] = {}
        """Tenants' groups of samples, by id, which the store should have."""
        self.cancelled: set[tuple[int, str]] = set()
        self.delivered: set[tuple[int, int]] = set()
        """Group and index of each sample that was delivered since the hub's start, or answered before it."""
        self.turns = turns
        self.observed: dict[tuple[int, int], list[list[int]]] = {}
        """Environment answers to each episode's turns, by group and index, which the store should have."""
        self.ended_at: dict[tuple[int, int], int] = {}
        """Number of turns of each ended episode."""
        self.noted: dict[tuple[int, int], SessionNoted] = {}
        """The last record of each episode's lost sessions, by group and index."""
        self.open_sessions: set[tuple[int, int, int]] = set()
        """Sessions that are open: they have answered a turn since the hub started. By group, index and attempt."""
        self.met_losses: set[str] = set()
        self.most_bound = self.settings.staleness_bound
        """The largest staleness bound since the run began."""
        self.store = Store.open("sqlite://")
        self.found: dict[Any, tuple[int, Any]] = {}
        """Result of each query that was run on the store, and the number of changed rows at that time."""
        self.now = 1_000.0
        self.ticked_at = 0.0
        self.finished = 0
        self.nodes: dict[str, SimNode] = {}
        self.rows: dict[str, Leased] = {}
        self.names: dict[tuple[int, int], list[str]] = {}
        """Ids of all rollouts that were leased for a group and index."""
        self.opened: set[int] = set()
        self.rated: set[int] = set()
        """Prompts with a recorded pass rate."""
        self.num_left_out = 0
        self.closed: set[int] = set()
        self.planned: dict[int, StepPlanned] = {}
        self.trained_steps = 0
        self.learner: int | None = None
        """Newest step that the learner has reported to hold; None while there is no learner."""
        self.jobs: list[int] = []
        """Steps given to the learner whose files are not written yet, in order."""
        self.num_computed = 0
        """Number of `jobs`, from the first, that the learner has computed."""
        self.checkpoint = 0
        self.orphan_trains = 0
        """Number of steps that the learner still trains after the hub was killed."""
        self.most_unseen = 0
        """Largest number of steps in the learner's checkpoints that the store did not know after the hub was killed."""
        self.batches_seen: dict[int, list[str]] = {}
        self.crash_at: str = ""
        self.met_outcomes: set[tuple[str, ActionOutcome]] = set()
        """Requests of the operator, each with its outcome, that occurred."""
        self.num_opinions = 0
        self.proven: set[str] = set()
        """Nodes that have returned a good rollout since the hub started, and so count as proven."""
        self.gone_on: set[tuple[str, bool]] = set()
        """For each continued rollout: its drop reason ("" while a node holds it), and True if its own node got the same
        lease again."""
        self.mixed: set[bool] = set()
        """Contains True if a lease of a newer version continued tokens of an earlier lease, False if a lease of the
        same version did.
        """
        self._boot()

    # --- the hub

    def _boot(self) -> None:
        self.evaluating.clear()
        self.proven.clear()
        self.delivered = self._answered_samples()
        self.preparing: list[int] = []
        self.scoring: list[str] = []
        self.checking: list[str] = []
        self.measuring: list[MeasureNumerics] = []
        self.asked: list[SendCheck] = []
        self.publishing: list[int] = []
        self.jobs, self.num_computed = [], 0
        self.held: dict[int, tuple[str, ...]] = {}
        """Groups that the hub handed to the learner, with their rollout ids."""
        self.begun: tuple[BeginStep, ...] = ()
        """Steps that the learner began while the store was still committing their records."""
        self.learner = None
        for row in self.rows.values():
            row.waits = False
        for node in self.nodes.values():
            node.connected = False
        self.open_sessions.clear()
        snapshot = self.store.read(read_snapshot)
        self.published = snapshot.published_version
        self.settings = restored(self.configured, self.store.read(read_settings))
        self.coordinator, self.twin = Coordinator(self.settings, snapshot), Coordinator(self.settings, snapshot)
        effects = self.coordinator.start(self.now)
        assert repr(self.twin.start(self.now)) == repr(effects)
        self._carry_out(effects)
        if self.sessions:
            self._turn(SlotsChanged(slots=self.sessions))
        if self.settings.mode == "colocated":
            self._connect(HUB_NODE_ID, 8, 0)

    def _turn(self, event: Event) -> None:
        effects = self.coordinator.handle(event, self.now)
        if self.settings.trust.by_nodes:
            assert repr(self.twin.handle(event, self.now)) == repr(effects), "the same events give the same effects"
        self._carry_out(effects)

    def _parts_come(self) -> None:
        """Send the hub the first tokens of all rollouts that nodes hold, so that another node can continue them."""
        names = [name for node in self.nodes.values() if node.connected for name in sorted(node.work)]
        if names and not self.crash_at:
            self._turn(RolloutsBegun(rollout_ids=(*names, "999-1")))

    def _carry_out(self, effects: list[Effect]) -> None:
        records = [effect for effect in effects if isinstance(effect, RECORDS)]
        assert effects[: len(records)] == records, "records come first"
        self.begun = tuple(effect for effect in effects if isinstance(effect, BeginStep))
        for begun in self.begun:
            self._look_for(begun.batch)
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
        self._checkpoint_some(self.orphan_trains)
        if HUB_NODE_ID in self.nodes:
            self.nodes[HUB_NODE_ID] = SimNode()
        self._boot()

    def _model(self, record: Any) -> None:
        match record:
            case GroupOpened():
                left_out = range(max(self.opened, default=-1) + 1, record.group_id)
                assert record.group_id not in self.opened and (not left_out or self.settings.curriculum), "in order"
                assert {group_id % PROMPTS for group_id in left_out} <= self.rated, "no unrated prompt is skipped"
                self.num_left_out += len(left_out)
                assert self.settings.leasing == "open"
                self.opened.add(record.group_id)
            case SettingRecorded():
                self.settings = restored(self.settings, {record.setting: record.stored})
                self.most_bound = max(self.most_bound, self.settings.staleness_bound)
            case GroupsRated():
                self.rated |= {group_id % PROMPTS for group_id, _ in record.pass_rates}
                for group_id, rate in record.pass_rates:
                    assert (rate == 0) == (group_id % 3 == 0)
            case GroupDropped():
                assert record.group_id not in self.closed
                self.closed.add(record.group_id)
            case RolloutsLeased():
                self._model_lease(record)
            case RolloutReceived():
                row = self.rows[record.rollout_id]
                assert not row.end
                failures = self._failures(row.group_id, row.index, row.turn)
                assert row.failures == failures, "a draw with a seed that has failed is not scored again"
                row.received, row.num_tokens = True, len(record.payload.completion_ids)
                row.drawers = tuple(dict.fromkeys((*(span.node_id for span in record.payload.spans), row.node_id)))
                if record.payload.spans:
                    row.oldest = record.payload.spans[0].policy_version
            case ScoreRecorded():
                row = self.rows[record.rollout_id]
                failed = record.reward is None and record.observation_ids is None
                assert not failed or EvaluationGroup.of(row.group_id), "a scorer's failure is not a reward"
                assert record.reward is None or record.observation_ids is None
                row.answered = record.observation_ids is not None
                self._model_answer(row, record.observation_ids)
                self.proven.add(row.node_id)
            case AnswerReplaced():
                row = self.rows[record.rollout_id]
                assert row.answered and not row.end and (record.reward is None) != (record.observation_ids is None)
                later = [self.rows[name] for name in self.names[row.group_id, row.index] if not self.rows[name].end]
                assert max(one.turn for one in later) == row.turn, "nothing follows an answer that never happened"
                row.answered = record.observation_ids is not None
                self._model_answer(row, record.observation_ids)
            case SessionNoted():
                before = self.noted.get((record.group_id, record.index))
                was = (0, 0, 0) if before is None else (before.attempt, before.losses, before.replaced)
                grown = (record.attempt - was[0], record.losses - was[1], record.replaced - was[2])
                assert grown in ((1, 0, 0), (1, 1, 0), (0, 0, 1), (0, 1, 1))
                assert self.terms is not None and record.losses < self.terms.losses, "the last loss ends the episode"
                self.noted[record.group_id, record.index] = record
            case RolloutsEvaluated():
                rows = [self.rows[name] for name in record.rollout_ids]
                (episode,) = {(row.group_id, row.index) for row in rows}
                assert EvaluationGroup.of(episode[0]) and [row.turn for row in rows] == list(range(len(rows)))
                ended = {(row.group_id, row.index) for row in self.rows.values() if row.end == "evaluated"}
                assert episode not in ended, "no episode is evaluated twice"
                for row in rows:
                    assert row.received and not row.end
                    row.end = "evaluated"
            case AnswerOpened():
                assert record.group.group_id not in self.requests
                self.requests[record.group.group_id] = record.group
            case AnswersCancelled():
                self.cancelled.add((record.group_id, record.request_id))
            case RolloutsAnswered():
                for name in record.rollout_ids:
                    row = self.rows[name]
                    assert is_answer(row.group_id) and row.received and not row.end and not row.waits
                    assert row.checked is not Checked.FAILED
                    assert (row.group_id, row.index) not in self._answered_samples(), "no sample is answered twice"
                    row.end = "answered"
                    self.proven.add(row.node_id)
            case RolloutsDropped():
                for dropped_id in record.rollout_ids:
                    assert not self.rows[dropped_id].end, "a final state never changes"
                    self.rows[dropped_id].end = record.reason
            case CheckRecorded():
                row = self.rows[record.rollout_id]
                assert row.checked is Checked.NO or record.checked is row.checked, "checked once"
                row.checked, row.waits = record.checked, False
            case StandingRecorded():
                self.standings[record.row.node_id] = record.row.state
            case TrustDecided():
                assert record.node_id in self.standings
            case StepPlanned():
                self._model_plan(record)
            case StepTrained():
                assert record.step == self.trained_steps + 1
                planned = self.planned[record.step]
                kept = set(planned.group_ids[len(screen(planned).left_out) :])
                names = tuple(name for name in planned.rollout_ids if self.rows[name].group_id in kept)
                assert record.rollout_ids == names, (
                    "a step has all rollouts but those that the learner left out, seen or unseen"
                )
                assert record.metrics == figures(record.step), "a step keeps its own metrics, seen or unseen"
                for trained_id in record.rollout_ids:
                    assert not self.rows[trained_id].end, "no rollout is trained twice"
                    self.rows[trained_id].end = "trained"
                self.trained_steps = record.step
                self.closed |= kept

    def _model_answer(self, row: Leased, observation_ids: Any) -> None:
        """Model the environment's answer to a turn of an episode; None: the turn ended it."""
        answers = self.observed.setdefault((row.group_id, row.index), [])
        assert len(answers) >= row.turn
        del answers[row.turn :]
        if observation_ids is None:
            self.ended_at[row.group_id, row.index] = row.turn + 1
        else:
            answers.append(observation_ids.tolist())

    def _model_lease(self, record: RolloutsLeased) -> None:
        held = [
            (row.group_id, row.index)
            for row in self.rows.values()
            if row.node_id == record.node_id and not row.received and not row.end and row.deadline > self.ticked_at
        ]
        node = self.nodes[record.node_id]
        assert node.connected and node.version is not None
        assert not self._is_quarantined(record.node_id), "a quarantined node gets no lease"
        assert self.settings.leasing != "paused"
        assert len(held) + len(record.indices) <= node.capacity, "more leased than the node can hold"
        again = set(held) & {(record.group_id, index) for index in record.indices}
        assert not again, "a node is never leased what it still holds"
        about = EvaluationGroup.of(record.group_id)
        newest = self.trained_steps if self.settings.mode == "colocated" else self.coordinator.published_version
        if is_answer(record.group_id):
            assert record.policy_version == self.requests[record.group_id].policy_version
            assert set(record.indices) <= self._wanted_samples(record.group_id), "answered or cancelled"
        elif about is not None:
            assert record.policy_version == about.policy_version in self.evaluating
            assert about.number < self.settings.evaluation_problems
        elif self.settings.mode == "async":
            usual = min(newest, node.version)
            assert record.policy_version == usual or self._was_begun_by(record, usual)
        else:
            assert record.policy_version == newest == self.trained_steps
        assert record.turn == 0 or len(record.indices) == 1
        for index in record.indices:
            assert record.turn == len(self._answered(record.group_id, index)), "turns are leased one after the other"
            row = Leased(record.node_id, record.group_id, index, record.turn, record.policy_version, record.deadline)
            row.failures, row.oldest = self._failures(record.group_id, index, record.turn), row.version
            name = rollout_id(record.lease_id, index)
            assert self.rows.setdefault(name, row) is row
            self.names.setdefault((record.group_id, index), []).append(name)

    def _was_begun_by(self, record: RolloutsLeased, newest: int) -> bool:
        """Return True if the lease names an older version than the newest one, because this version has sampled a
        rollout of the same group and is fresh enough for a coming step."""
        oldest = len(self.planned) - self.settings.staleness_bound
        return oldest <= record.policy_version < newest and any(
            row.group_id == record.group_id and row.version == record.policy_version for row in self.rows.values()
        )

    def _model_goes_on(self, lease: SendLease) -> None:
        """Check the tokens of earlier leases that this lease continues: the right tokens, sampled by this node or by
        proven nodes.
        """
        for index, earlier_id in lease.goes_on:
            earlier, own = (self.rows[rollout_id(each, index)] for each in (earlier_id, lease.lease_id))
            same = [(row.group_id, row.index, row.turn, row.failures) for row in (earlier, own)]
            assert same[0] == same[1] == (lease.group_id, index, lease.turn, own.failures)
            assert own.version == lease.policy_version
            if self.settings.interrupts and lease.group_id in self.opened:
                assert earlier.version <= own.version
                self.mixed.add(earlier.version < own.version)
            else:
                assert earlier.version == own.version
            own.oldest = earlier.oldest
            if earlier is not own:
                own.drawn_by = tuple(name for name in (*earlier.drawn_by, earlier.node_id) if name != own.node_id)
            assert not any(map(self._is_quarantined, own.drawn_by)), "no lease continues a quarantined node's prefix"
            assert HUB_NODE_ID not in (earlier.node_id, own.node_id)
            assert earlier_id <= lease.lease_id and earlier.node_id in {*self.proven, own.node_id}
            self.gone_on.add((earlier.end, earlier_id == lease.lease_id))

    def _model_plan(self, record: StepPlanned) -> None:
        assert record.step == len(self.planned) + 1 <= self.trained_steps + (2 if self.settings.mode == "async" else 1)
        most, budget = self.settings.groups_per_step, self.settings.tokens_per_step
        tokens = [self.rows[planned_id].num_tokens for planned_id in record.rollout_ids]
        last = [self.rows[i].num_tokens for i in record.rollout_ids if self.rows[i].group_id == record.group_ids[-1]]
        assert len(record.group_ids) == most or sum(tokens) >= budget > 0
        assert not budget or sum(tokens) - sum(last) < budget, "no group more than the budget needs"
        expected = [
            (group_id, index, turn)
            for group_id in sorted(record.group_ids)
            for index in range(self.settings.group_size)
            for turn in range(self.ended_at[group_id, index])
        ]
        rows = [self.rows[planned_id] for planned_id in record.rollout_ids]
        assert [(row.group_id, row.index, row.turn) for row in rows] == expected, "whole episodes, in order"
        for planned_id in record.rollout_ids:
            assert record.step - 1 - self.rows[planned_id].oldest <= self.settings.staleness_bound, (
                "too stale at consumption"
            )
            row = self.rows[planned_id]
            assert not row.waits and row.checked is not Checked.FAILED, "no step has an unchecked or forged rollout"
            assert not any(map(self._is_quarantined, (*row.drawn_by, row.node_id))), (
                "no step has a quarantined node's rollout"
            )
        if self.settings.mode != "async" and not budget:
            others = self.opened - self.closed - set(record.group_ids)
            assert not others, "a step takes all open groups, in their order"
        self.planned[record.step] = record

    def _answered_samples(self) -> set[tuple[int, int]]:
        return {(row.group_id, row.index) for row in self.rows.values() if row.end == "answered"}

    def _wanted_samples(self, group_id: int) -> set[int]:
        """Return the group's indices that are neither answered nor cancelled."""
        answered = {index for answered_id, index in self._answered_samples() if answered_id == group_id}
        return {
            index
            for member in self.requests[group_id].members
            if (group_id, member.request_id) not in self.cancelled
            for index in member.indices
        } - answered

    def _is_quarantined(self, node_id: str) -> bool:
        return self.standings.get(node_id) is StandingState.QUARANTINED

    def _answered(self, group_id: int, index: int) -> list[str]:
        """Return the episode's turns that the environment has answered, in order."""
        names = self.names.get((group_id, index), [])
        turns = {self.rows[name].turn: name for name in names if self.rows[name].answered and not self.rows[name].end}
        assert sorted(turns) == list(range(len(turns)))
        return [turns[turn] for turn in sorted(turns)]

    def _failures(self, group_id: int, index: int, turn: int) -> int:
        rows = [self.rows[name] for name in self.names.get((group_id, index), [])]
        return sum(row.turn == turn and row.end is DropReason.SCORER_FAILED for row in rows)

    def _num_turns(self, group_id: int, index: int) -> int:
        return 1 if is_answer(group_id) else 1 + (group_id + index) % self.turns

    def _verdict(self, name: str) -> RolloutScored | RolloutContinued:
        """Return the environment's answer to a rollout, given all stored turns of its episode."""
        row = self.rows[name]
        (stored,) = self.store.read(read_payloads, [name])
        drawn = [turn.completion_ids for turn in stored.earlier_turns] + [stored.payload.completion_ids]
        assert [ids.tolist() for ids in drawn] == [
            payload(row.group_id, row.index, turn).completion_ids.tolist() for turn in range(row.turn + 1)
        ]
        answers = self.observed.get((row.group_id, row.index), [])
        assert [turn.observation_ids.tolist() for turn in stored.earlier_turns] == answers[: row.turn]
        self._note_session(row)
        if row.turn + 1 < self._num_turns(row.group_id, row.index):
            return RolloutContinued(rollout_id=name, observation_ids=np.array([row.index, row.turn], np.int32))
        return self._end(name)

    def _end(self, name: str) -> RolloutScored:
        """Return the reward of an episode that ends with this rollout, also if its session is lost."""
        row = self.rows[name]
        return RolloutScored(rollout_id=name, reward=float(row.index % 2 and row.group_id % 3 > 0))

    def _note_session(self, row: Leased) -> None:
        if self.terms is not None and not is_answer(row.group_id):
            noted = self.noted.get((row.group_id, row.index))
            self.open_sessions.add((row.group_id, row.index, noted.attempt if noted else 0))

    def _loses_session(self, name: str, lost: str, pick: int) -> SessionDiverged | SessionLost:
        """Return how the rollout's session is lost: `lost` ends with "by hub" if the hub restarted. A session whose
        episode has no earlier turn cannot diverge."""
        row, is_loss = self.rows[name], not lost.endswith("by hub")
        self.met_losses.add(lost)
        if not lost.startswith("diverged") or not row.turn:
            return SessionLost(rollout_id=name, if_lost=self._end(name), is_loss=is_loss, detail="died")
        turn = pick % row.turn
        self._note_session(row)
        if pick % 3 == 0:
            reward = self._end(name).reward
            return SessionDiverged(rollout_id=name, turn=turn, reward=reward, if_lost=self._end(name), is_loss=is_loss)
        new = np.array([row.index, turn, 7 + pick], np.int32)
        return SessionDiverged(
            rollout_id=name, turn=turn, observation_ids=new, if_lost=self._end(name), is_loss=is_loss
        )

    def _act(self, action: Any) -> None:
        match action:
            case PrepareGroup():
                self.preparing.append(action.group_id)
            case SendLease():
                about = EvaluationGroup.of(action.group_id)
                seed = evaluation_seed(11, about.number) if about else 2**64 - 1 - action.group_id
                if is_answer(action.group_id):
                    seed = self.requests[action.group_id].seed
                    assert action.sampling == self.requests[action.group_id].sampling and not action.may_move_on
                else:
                    assert action.sampling is None
                for index in action.indices:
                    failures = self._failures(action.group_id, index, action.turn)
                    assert action.seed == turn_seed(seed, action.turn, failures)
                self._model_goes_on(action)
                played = self.store.read(read_turns, {(action.group_id, action.indices[0])})
                assert len(played.get((action.group_id, action.indices[0]), ())) == action.turn
                node = self.nodes[action.node_id]
                if node.connected:
                    for name in (rollout_id(action.lease_id, index) for index in action.indices):
                        if name not in node.spool:  # The node has already finished this rollout of a repeated lease.
                            node.work[name] = action
            case RevokeLease():
                node = self.nodes[action.node_id]
                if node.connected:
                    for name in [name for name, lease in node.work.items() if lease.lease_id == action.lease_id]:
                        del node.work[name]
            case SendReceipts():
                self._receive(action.node_id, action.receipts)
            case SendTrained():
                for node_id, name in zip(action.node_ids, action.rollout_ids, strict=True):
                    self._receive(node_id, (effects.RolloutReceipt(name, ReceiptState.TRAINED),))
            case LookUpReceipt():
                self._receive(
                    action.node_id, tuple(self.store.read(read_receipts, action.node_id, [action.rollout_id]))
                )
            case ScoreRollout():
                row = self.rows[action.rollout_id]
                noted = self.noted.get((row.group_id, row.index))
                assert action.attempt == (noted.attempt if noted else 0), "the store remembers lost sessions"
                if self.terms is not None and self.terms.verify_first and not is_answer(row.group_id):
                    is_checkable = self.settings.trust.enabled and row.node_id != HUB_NODE_ID
                    assert not is_checkable or row.checked is Checked.PASSED, "the environment gets checked turns only"
                self.scoring.append(action.rollout_id)
            case CloseSession():
                assert self.terms is not None
                self.open_sessions.discard((action.group_id, action.index, action.attempt))
            case DeliverAnswer():
                row = self.rows[action.rollout_id]
                assert (row.end, row.group_id, row.index) == ("answered", action.group_id, action.index)
                assert (row.group_id, row.index) not in self.delivered, "delivered once"
                self.delivered.add((row.group_id, row.index))
                (stored,) = self.store.read(read_payloads, [action.rollout_id])
                ids = payload(row.group_id, row.index, 0).completion_ids.tolist()
                assert stored.payload.completion_ids.tolist() == ids
                assert action.payload is None or action.payload.completion_ids.tolist() == ids
            case CheckRollout():
                row = self.rows[action.rollout_id]
                assert action.rollout_id not in self.checking
                self.checking.append(action.rollout_id)
                drawers = (*row.drawn_by, row.node_id)
                row.waits = any(self.standings.get(name) is not StandingState.PROVEN for name in drawers)
            case SendCheck():
                row = self.rows[action.rollout_id]
                assert self.nodes[action.node_id].connected and action.node_id not in row.drawers
                assert self.standings.get(action.node_id) in (None, StandingState.NEW, StandingState.PROVEN)
                self.asked.append(action)
            case MeasureNumerics():
                self.measuring.append(action)
            case HastenChecks():
                assert self.checking
            case TellStandby(reason=StandbyReason.QUARANTINED):
                assert self._is_quarantined(action.node_id)
            case TrainStep():
                assert self.learner is not None and action.step == self.learner + len(self.jobs) + 1
                assert len(self.jobs) < 2
                batch = [
                    turn.rollout_id
                    for group in self.store.read(read_batch, action.step)
                    for episode in group.episodes
                    for turn in episode.turns
                ]
                assert self.batches_seen.setdefault(action.step, batch) == batch, "a repeated step has the same batch"
                self.jobs.append(action.step)
                self._check_what_was_begun(action.step)
            case HandOver():
                self.held[action.group_id] = action.rollout_ids
            case PublishVersion():
                assert self.settings.is_due(action.policy_version)
                self.publishing.append(action.policy_version)
            case AnnounceVersion():
                self.published = action.policy_version
            case EvaluationDone():
                self._record_evaluation(action.policy_version)
            case FinishRun():
                self.finished += 1

    def _look_for(self, batch: Sequence[effects.PlannedGroup]) -> None:
        """Check before the commit that the store can read the groups that the learner lacks."""
        lacking = {
            group.group_id: group.rollout_ids for group in batch if self.held.get(group.group_id) != group.rollout_ids
        }
        assert {group.group_id for group in self.store.read(read_groups, lacking)} == lacking.keys()

    def _check_what_was_begun(self, step: int) -> None:
        """Check, after the commit, that the store has the batch of the step that the learner began early."""
        for begun in (begun for begun in self.begun if begun.step == step):
            planned = self.store.read(read_batch, step)
            assert [group.group_id for group in begun.batch] == [group.group_id for group in planned]
            for said, group in zip(begun.batch, planned, strict=True):
                turns = [turn.rollout_id for episode in group.episodes for turn in episode.turns]
                assert (list(said.rollout_ids), list(said.rewards)) == (turns, [each.reward for each in group.episodes])

    def _receive(self, node_id: str, receipts: Sequence[Receipt | effects.RolloutReceipt]) -> None:
        latest = {receipt.rollout_id: receipt for receipt in receipts}  # One turn may score a rollout and then drop it.
        for receipt in latest.values():
            row = self.rows.get(receipt.rollout_id)
            if row is not None and row.node_id == node_id:
                expected = ReceiptState(row.end) if row.end in USEFUL else ReceiptState.DROPPED if row.end else None
                assert receipt.state is expected or (not row.end and receipt.state not in FINAL)
            else:
                assert receipt.state is ReceiptState.DROPPED and receipt.drop_reason is DropReason.INVALID
            node = self.nodes[node_id]
            if node.connected:
                node.spool.pop(receipt.rollout_id, None)
                if receipt.state in FINAL:
                    node.work.pop(receipt.rollout_id, None)

    # --- evaluations
