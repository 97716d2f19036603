"""What the coordinator wants done: records to commit, then actions to carry out, in this order.

The shell commits all records of one turn in one transaction before it carries out any of the turn's actions. So an ack
or a lease that a node has seen is always in the store, and a crash between the two loses only actions, which the
coordinator repeats when it is rebuilt from the store. `BeginStep` alone does not wait for the commit: nobody sees
anything of what it sets off before the TrainStep that does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.numerics import CoarseClass
from echo_hub.core.trust.standing import Decision, StandingRow
from echo_shared.books import TaskFigures
from echo_shared.messages import Checked, DropReason, ReceiptState, StandbyReason
from echo_shared.rollout_books import RolloutPayload

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def _effect(kind: type[T]) -> type[T]:
    """Frozen to the type checker. While the program runs it is a plain dataclass, which is made in half the time: for
    each event there are several."""
    return dataclass(slots=True, kw_only=True)(kind)


@_effect
class GroupOpened:
    """Record: the group exists; its problem is number `group_id` of the task's training stream."""

    group_id: int
    seed: int
    prompt: int | None = None
    """The key of its prompt; None: not known."""


@_effect
class GroupsRated:
    """Record: how well complete groups did, where later problems are chosen by it."""

    pass_rates: tuple[tuple[int, float], ...]
    """Group and rate, 0 .. 1."""


@_effect
class GroupDropped:
    """Record: the group will never be trained; its rollouts that were not final are dropped by records of their own."""

    group_id: int
    reason: DropReason


@_effect
class RolloutsLeased:
    """Record: one row for each index, in state `leased`. `deadline` is in seconds since the epoch."""

    lease_id: int
    node_id: str
    group_id: int
    indices: tuple[int, ...]
    turn: int = 0
    """The turn of the episode. From 1 on there is one index: each has a prompt of its own."""
    policy_version: int
    deadline: float


@_effect
class RolloutReceived:
    """Record: leased → received, with its payload."""

    rollout_id: str
    received_at: float
    payload: RolloutPayload


@_effect
class ScoreRecorded:
    """Record: received → scored, with the reward of the episode that it ended or with what was answered to it; with
    neither where the scorer failed on an evaluation."""

    rollout_id: str
    reward: float | None
    observation_ids: NDArray[np.int32] | None = None
    components: Mapping[str, float] | None = None
    turn_reward: float = 0.0
    """Of a turn that was answered."""


@_effect
class RolloutsEvaluated:
    """Record: scored → evaluated, for all turns of one episode of an evaluation."""

    rollout_ids: tuple[str, ...]


@_effect
class RolloutsDropped:
    """Record: any state that is not final → dropped."""

    rollout_ids: tuple[str, ...]
    reason: DropReason
    detail: str = ""


@_effect
class StepPlanned:
    """Record: the batch of step `step`, written before it is trained. `rollout_ids` in the order of training."""

    step: int
    group_ids: tuple[int, ...]
    rollout_ids: tuple[str, ...]
    staleness: tuple[int, ...]
    """Staleness of each group, in order: `step` - 1 minus the version of its oldest rollout."""
    planned_at: float
    by_task: Mapping[str, TaskFigures] = field(default_factory=dict)
    """Where the run has several tasks."""


@_effect
class StepTrained:
    """Record: the step is in a checkpoint; its rollouts scored → trained. `metrics` are the learner's."""

    step: int
    rollout_ids: tuple[str, ...]
    metrics: Mapping[str, float]
    trained_at: float
    node_ids: tuple[str, ...] = ()
    """The node that each was leased to, for who writes them down; empty: to be found by their leases."""
    drawn_by_several: tuple[str, ...] = ()
    """Those of which some tokens are other nodes' than the one that the rollout was leased to."""


@_effect
class VersionRecorded:
    """Record: the version is published; a rebuilt hub announces this one."""

    policy_version: int
    published_at: float


class NodeCost(NamedTuple):
    """What one node cost for a time in which it was active."""

    node_id: str
    active_s: float
    dollars: float


@_effect
class CostAccrued:
    """Record: what nodes have cost since the last one that speaks of them."""

    nodes: tuple[NodeCost, ...]


@_effect
class CheckRecorded:
    """Record: the rollout was checked; whatever state it is in, that stays."""

    rollout_id: str
    checked: Checked


@_effect
class StandingRecorded:
    """Record: what the hub thinks of a node from now on."""

    row: StandingRow


@_effect
class CoarseClassesRecorded:
    """Record: all classes of numerics that unlike nodes have shown to be coarser than was measured."""

    classes: tuple[CoarseClass, ...]


@_effect
class CheckingCredited:
    """Record: the node has computed a rollout of others again, so many tokens of it, and its finding stands."""

    node_id: str
    num_tokens: int


@_effect
class TrustDecided:
    """Record: a decision on a node, for the log."""

    node_id: str
    decision: Decision
    reason: str
    rollout_id: str = ""
    """The rollout that led to it; empty = none."""
    evidence: Evidence | None = None
    """What that showed."""
    decided_at: float


@_effect
class SettingRecorded:
    """Record: an operator has changed this setting; a rebuilt hub goes on with it. `stored` is in JSON's types."""

    setting: str
    stored: Any


@_effect
class ActionSettled:
    """Record: what has become of an operator's action, if nothing has yet. `before` and `after` are in JSON's types."""

    number: int
    done: bool
    before: Any = None
    after: Any = None
    detail: str = ""
    """Why it was refused."""


Record = (
    GroupOpened
    | GroupsRated
    | GroupDropped
    | RolloutsLeased
    | RolloutReceived
    | ScoreRecorded
    | RolloutsEvaluated
    | RolloutsDropped
    | StepPlanned
    | StepTrained
    | VersionRecorded
    | CostAccrued
    | CheckRecorded
    | StandingRecorded
    | CoarseClassesRecorded
    | CheckingCredited
    | TrustDecided
    | SettingRecorded
    | ActionSettled
)


@_effect
class PrepareGroup:
    """Action: sample and tokenise problem number `group_id`, then answer GroupPrepared."""

    group_id: int


@_effect
class SendLease:
    """Action: send the work to the node. `deadline_s` is relative to now.

    The prompt of turn 0 is the group's; that of a later turn is the whole conversation so far of its one index.
    """

    node_id: str
    lease_id: int
    group_id: int
    indices: tuple[int, ...]
    turn: int = 0
    seed: int
    policy_version: int
    deadline_s: float
    may_move_on: bool = False
    """Its completions may go on by newer versions."""
    goes_on: tuple[tuple[int, int], ...] = ()
    """Index and earlier lease: of the same index, turn, seed and version, so that what was drawn for that one is the
    beginning of this one's completion. A lease that is sent again goes on with itself."""


@_effect
class RevokeLease:
    """Action: tell the node to stop working on this lease."""

    node_id: str
    lease_id: int
    reason: DropReason


class Receipt(NamedTuple):
    """What has become of one rollout."""

    rollout_id: str
    state: ReceiptState
    drop_reason: DropReason | None = None
    checked: Checked = Checked.NO


@_effect
class SendReceipts:
    """Action: tell the node what became of its rollouts. Dropped silently when the node is not connected."""

    node_id: str
    receipts: tuple[Receipt, ...]


@_effect
class SendTrained:
    """Action: tell each node which of its rollouts are trained; one element a rollout, in the order of training."""

    rollout_ids: tuple[str, ...]
    node_ids: tuple[str, ...]


@_effect
class LookUpReceipt:
    """Action: a node sent a rollout that is final, or was never leased to it: answer with the store's receipt."""

    node_id: str
    rollout_id: str


class DrawnTurn(NamedTuple):
    """A rollout that came in and was no episode's later turn."""

    rollout_id: str
    node_id: str
    policy_version: int
    """Its lease's."""
    rollout_index: int
    group_seed: int
    attempt: int
    """So often the scorer had failed on its index before."""
    payload: RolloutPayload


class FirstTurn(NamedTuple):
    """What an episode has begun with, before the environment has answered anything."""

    group_id: int
    payload: RolloutPayload


@_effect
class ScoreRollout:
    """Action: check and score a committed rollout, then answer RolloutScored, RolloutContinued or RolloutRejected."""

    rollout_id: str
    first_turn: FirstTurn | None = field(default=None, compare=False)
    """All that is to be scored, while it is at hand, so that it need not be read again; None: the store has it."""


@_effect
class CheckRollout:
    """Action: compute a committed rollout again, then answer RolloutChecked or CheckAbandoned."""

    rollout_id: str
    is_urgent: bool
    """It is held until then; else it may wait for others, to be computed with them."""


@_effect
class MeasureNumerics:
    """Action: find how coarsely engines with this rounding draw by this version, then answer NumericsMeasured. It comes
    before all checks that are asked for after it."""

    rounding: str
    """One of `echo_hub.core.trust.numerics.ROUNDINGS`' values."""
    policy_version: int


@_effect
class HastenChecks:
    """Action: what is to be checked and waits for others is computed now, for some of it is held."""


@_effect
class SendCheck:
    """Action: have this node compute a committed rollout of others again, then answer CheckReturned; or CheckAbandoned,
    where nobody can. `deadline_s` is relative to now."""

    node_id: str
    rollout_id: str
    deadline_s: float


@_effect
class HandOver:
    """Action: all of the group has come in, if none of it is found wanting; give it to the learner ahead of the step
    that will take it, which is one of the next or none. Its rollouts, in the order of training, may still be without
    rewards. Told again of the same group, it has other rollouts."""

    group_id: int
    rollout_ids: tuple[str, ...]
    first_turns: tuple[DrawnTurn, ...] | None = field(default=None, compare=False)
    """All of it in that order, while it is at hand, so that it need not be read again; None: the store has it."""


class BatchGroup(NamedTuple):
    """A group of a step's batch."""

    group_id: int
    rollout_ids: tuple[str, ...]
    """As HandOver has them."""
    rewards: tuple[float, ...]
    """Of its episodes, in the same order."""


@_effect
class BeginStep:
    """Action, while the records of its turn are still being committed: let the learner compute this step, which is
    planned in this turn, but keep nothing of it until it is told to train it by the TrainStep of the same turn, which
    comes once the plan is in the store. The learner has most of the batch, by HandOver. It may come before an earlier
    TrainStep: a learner that lacks the step before lets it be, and takes all from the TrainStep."""

    step: int
    batch: tuple[BatchGroup, ...]


@_effect
class TrainStep:
    """Action: give the learner, which may still be at work on the step before, the planned batch of this step, unless
    BeginStep did, and have it keep what it leaves; then answer StepComputed and StepDone. Steps come in order, two at
    most without StepDone."""

    step: int


@_effect
class PublishVersion:
    """Action: sign and seed the learner's adapter of this version, then answer VersionPublished."""

    policy_version: int


@_effect
class AnnounceVersion:
    """Action: tell every node of a published version."""

    policy_version: int


@_effect
class EvaluationDone:
    """Action: every episode of this version's evaluation has ended; its figures can be read from the store."""

    policy_version: int


@_effect
class TellStandby:
    """Action: tell the node why it gets no work; None: it is not kept from it any more."""

    node_id: str
    reason: StandbyReason | None
    detail: str = ""


@_effect
class TellOperator:
    """Action: whoever waits for this action of an operator's finds in the books what has become of it."""

    number: int


@_effect
class FinishRun:
    """Action: the last step is trained and published; nothing more is leased for training."""


Action = (
    PrepareGroup
    | SendLease
    | RevokeLease
    | SendReceipts
    | SendTrained
    | LookUpReceipt
    | ScoreRollout
    | CheckRollout
    | MeasureNumerics
    | HastenChecks
    | SendCheck
    | HandOver
    | BeginStep
    | TrainStep
    | PublishVersion
    | AnnounceVersion
    | EvaluationDone
    | TellStandby
    | TellOperator
    | FinishRun
)

Effect = Record | Action
RECORDS = Record.__args__
"""The record types, for isinstance."""
ACTIONS = Action.__args__
"""The action types, for isinstance."""
