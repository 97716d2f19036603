"""The coordinator's outputs: records to commit, then actions to carry out, in this order.

A *turn* of the coordinator is one call with one or several events (fields named `turn` count the turns of an episode
instead). The caller commits all records of a turn in one database transaction, and then carries out the turn's actions.
So the database has every ack and lease that nodes have seen. A crash between commit and actions loses only actions. The
coordinator repeats lost actions when it is rebuilt from the store.

Only `BeginStep` need not wait for the commit: the learner holds its results back until the turn's `TrainStep` arrives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.accounting.parameters import SamplingParameters
from echo_hub.core.answer_groups import AnswerGroup
from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.numerics import CoarseClass
from echo_hub.core.trust.standing import Decision, StandingRow
from echo_shared.records.rollout import RolloutPayload
from echo_shared.records.run import TaskFigures
from echo_shared.wire.messages import Checked, DropReason, ReceiptState, StandbyReason

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def _effect(kind: type[T]) -> type[T]:
    """Make a dataclass that type checkers treat as frozen. At run time it is a plain dataclass with slots, because
    constructing a frozen one takes twice as long, and each event creates several effects."""
    return dataclass(slots=True, kw_only=True)(kind)


@_effect
class GroupOpened:
    """Record: the group exists. Its problem is number `group_id` of the task's training stream."""

    group_id: int
    seed: int
    prompt: int | None = None
    """Key of the group's prompt: groups with equal prompts have equal keys. None if the prompt is unknown."""


@_effect
class GroupsRated:
    """Record: pass rates of complete groups. The curriculum chooses later problems by them, also after a restart."""

    pass_rates: tuple[tuple[int, float], ...]
    """Pairs of group id and pass rate: mean reward scaled to 0 .. 1."""


@_effect
class GroupDropped:
    """Record: the group will never be trained. Separate records drop its unfinished rollouts."""

    group_id: int
    reason: DropReason


@_effect
class RolloutsLeased:
    """Record: these indices of the group are leased to a node; each index gets a rollout in state `leased`. `deadline`
    is in seconds since the epoch."""

    lease_id: int
    node_id: str
    group_id: int
    indices: tuple[int, ...]
    turn: int = 0
    """Turn of the episode that is leased. Later turns have one index per lease, because each episode has its own
    prompt."""
    policy_version: int
    deadline: float


@_effect
class RolloutReceived:
    """Record: the rollout's state changes from leased to received, and its payload is stored."""

    rollout_id: str
    received_at: float
    payload: RolloutPayload


@_effect
class ScoreRecorded:
    """Record that a received rollout is scored. If the rollout ended its episode, the record has the episode's
    `reward`; otherwise the environment's answer (`observation_ids`). Both are None if the scorer failed in an
    evaluation."""

    rollout_id: str
    reward: float | None
    observation_ids: NDArray[np.int32] | None = None
    components: Mapping[str, float] | None = None
    turn_reward: float = 0.0
    """Reward of this turn alone, if the environment answered the turn and the episode goes on."""


@_effect
class AnswerReplaced:
    """Record: a rebuilt session answers this scored turn differently than before. The turn now has `observation_ids`,
    or it ends its episode with `reward`. Separate records drop the turns that followed the old answer.
    """

    rollout_id: str
    reward: float | None
    observation_ids: NDArray[np.int32] | None = None
    components: Mapping[str, float] | None = None
    turn_reward: float = 0.0


@_effect
class SessionNoted:
    """Record: numbers of an episode's lost sessions so far. Each record replaces the episode's earlier one."""

    group_id: int
    index: int
    attempt: int
    """Number of times that the episode started again from its prompt because its session was lost."""
    losses: int
    """Number of lost sessions that count towards the limit at which the episode ends."""
    replaced: int
    """Number of turns whose answer a rebuilt session replaced."""


@_effect
class RolloutsEvaluated:
    """Record: all turns of one ended evaluation episode change from scored to evaluated."""

    rollout_ids: tuple[str, ...]


@_effect
class AnswerOpened:
    """Record that a new group of tenants' samples was opened."""

    group: AnswerGroup


@_effect
class AnswersCancelled:
    """Record: the unfinished samples of this request are no longer wanted."""

    group_id: int
    request_id: str


@_effect
class RolloutsAnswered:
    """Record: received rollouts of tenants' requests passed their checks, and change to answered."""

    rollout_ids: tuple[str, ...]


@_effect
class RolloutsDropped:
    """Record: unfinished rollouts are dropped, in whatever state they were."""

    rollout_ids: tuple[str, ...]
    reason: DropReason
    detail: str = ""


@_effect
class StepPlanned:
    """Record: the batch of step `step`, written before training. `rollout_ids` are in training order."""

    step: int
    group_ids: tuple[int, ...]
    rollout_ids: tuple[str, ...]
    staleness: tuple[int, ...]
    """Staleness of each group, in the order of `group_ids`: version before the step (`step` - 1) minus the oldest
    version that sampled any of the group's tokens."""
    planned_at: float
    by_task: Mapping[str, TaskFigures] = field(default_factory=dict)
    """Figures of each task in this batch, by task key, if the run has several tasks."""


@_effect
class StepTrained:
    """Record: a checkpoint contains the step, so its rollouts change from scored to trained. `metrics` come from the
    learner."""

    step: int
    rollout_ids: tuple[str, ...]
    metrics: Mapping[str, float]
    trained_at: float
    node_ids: tuple[str, ...] = ()
    """Node that each rollout was leased to, in the order of `rollout_ids`. Empty: the store looks the nodes up by
    lease."""
    drawn_by_several: tuple[str, ...] = ()
    """Rollouts that also contain tokens sampled by nodes other than the lease's node."""


@_effect
class VersionRecorded:
    """Record: the version is published, so a restarted hub announces it again."""

    policy_version: int
    published_at: float


class NodeCost(NamedTuple):
    """Cost of the time for which one node was connected and active (paid)."""

    node_id: str
    active_s: float
    dollars: float


@_effect
class CostAccrued:
    """Record: costs of nodes since the previous CostAccrued record that names them."""

    nodes: tuple[NodeCost, ...]


@_effect
class CheckRecorded:
    """Record: the check of the rollout ended with the result `checked`. The rollout's state does not change."""

    rollout_id: str
    checked: Checked


@_effect
class StandingRecorded:
    """Record: the hub's new trust standing of a node: how far the hub trusts it, and why."""

    row: StandingRow


@_effect
class CoarseClassesRecorded:
    """Record: all numerics classes (kinds of engine) whose rounding several nodes without a common owner have shown to
    be coarser than measured or assumed."""

    classes: tuple[CoarseClass, ...]


@_effect
class CheckingCredited:
    """Record: the node recomputed `num_tokens` tokens of another node's rollout, and its finding was accepted."""

    node_id: str
    num_tokens: int


@_effect
class TrustDecided:
    """Record: a trust decision about a node, for the log."""

    node_id: str
    decision: Decision
    reason: str
    rollout_id: str = ""
    """Id of the rollout whose check led to the decision; empty if none did."""
    evidence: Evidence | None = None
    """Evidence of the checks that led to the decision: all since the sum of evidence that convicts the node (`judging`)
    was last zero. None if no check led to it."""
    decided_at: float


@_effect
class SettingRecorded:
    """Record: an operator changed this setting, and a rebuilt hub keeps the new value. `stored` is JSON-compatible."""

    setting: str
    stored: Any


@_effect
class ActionSettled:
    """Record: the outcome of an operator's action. A recorded outcome is never replaced. `before` and `after` are
    JSON-compatible."""

    number: int
    done: bool
    before: Any = None
    after: Any = None
    detail: str = ""
    """Reason why the action was refused, for the operator; empty if it was not."""


Record = (
    GroupOpened
    | GroupsRated
    | GroupDropped
    | RolloutsLeased
    | RolloutReceived
    | ScoreRecorded
    | AnswerReplaced
    | SessionNoted
    | RolloutsEvaluated
    | AnswerOpened
    | AnswersCancelled
    | RolloutsAnswered
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
    """Action: sample and tokenise problem number `group_id`, then answer with GroupPrepared."""

    group_id: int


@_effect
class SendLease:
    """Action: send the lease to the node. `deadline_s` is relative to now. Turn 0 uses the group's prompt. A later turn
    has one index; its prompt is that episode's whole conversation so far."""

    node_id: str
    lease_id: int
    group_id: int
    indices: tuple[int, ...]
    turn: int = 0
    seed: int
    policy_version: int
    deadline_s: float
    may_move_on: bool = False
    """True if the node may switch to newer versions in the middle of the lease's completions."""
    goes_on: tuple[tuple[int, int], ...] = ()
    """Pairs of index and earlier lease id: the hub sends the tokens that it has of the earlier lease, and the node
    continues them. Index, turn and seed of both leases are equal, so these tokens begin the new completion. The earlier
    lease names the same version or, in runs whose nodes may switch versions within a completion, an older one. If this
    lease is only sent again, the pair names the lease's own id."""
    sampling: SamplingParameters | None = None
    """Sampling parameters of a tenant's request; None = the run's settings."""
    tenant: str = ""
    """Name of the tenant whose work it is, as nodes see it; empty = the run's own work."""


@_effect
class RevokeLease:
    """Action: tell the node to stop working on this lease."""

    node_id: str
    lease_id: int
    reason: DropReason


class RolloutReceipt(NamedTuple):
    """Current state of one rollout, as sent to its node."""

    rollout_id: str
    state: ReceiptState
    drop_reason: DropReason | None = None
    checked: Checked = Checked.NO


@_effect
class SendReceipts:
    """Action: send receipts to the node. They are discarded silently if the node is not connected."""

    node_id: str
    receipts: tuple[RolloutReceipt, ...]


@_effect
class SendTrained:
    """Action: tell each node which of its rollouts are trained. Both tuples have one element per rollout, in training
    order."""

    rollout_ids: tuple[str, ...]
    node_ids: tuple[str, ...]


@_effect
class LookUpReceipt:
    """Action: send the node the receipt that the store has for this rollout. Needed for finished rollouts, and for
    rollouts never leased to this node."""

    node_id: str
    rollout_id: str
    is_verdict: bool = False
    """True if the receipt follows the end of a check. If the check found forgery in a sample that a tenant already has,
    the operator is told.
    """


class DrawnTurn(NamedTuple):
    """Received first turn of an episode, with everything that the learner needs to prepare it for training."""

    rollout_id: str
    node_id: str
    policy_version: int
    """Version named by the lease."""
    rollout_index: int
    group_seed: int
    attempt: int
    """Number of earlier scorer failures on this index: each of them changed the sampling seed."""
    payload: RolloutPayload


class FirstTurn(NamedTuple):
    """First turn of an episode, before any answer of the environment."""

    group_id: int
    payload: RolloutPayload


@_effect
class ScoreRollout:
    """Action: check and score a committed rollout, then answer RolloutScored, RolloutContinued or RolloutRejected. For
    an episode with a session, SessionDiverged and SessionLost are answers too."""

    rollout_id: str
    attempt: int = 0
    """Number of times that the rollout's episode has started again because its session was lost."""
    first_turn: FirstTurn | None = field(default=None, compare=False)
    """Tokens of the rollout to score, if still in memory. None: load them from the store."""


@_effect
class CloseSession:
    """Action: close the session of this episode, if one is open. A later ScoreRollout of the same attempt opens it
    again: the session is then rebuilt from the turns that were kept."""

    group_id: int
    index: int
    attempt: int


@_effect
class CheckRollout:
    """Action: have the verifier recompute a committed rollout, then answer RolloutChecked or CheckAbandoned."""

    rollout_id: str
    is_urgent: bool
    """True if the rollout's score is held back until the check ends. Otherwise the check may wait for a fuller
    batch."""


@_effect
class MeasureNumerics:
    """Action: have the verifier measure how much engines with this kind of rounding err when they sample from this
    version, then answer NumericsMeasured. Checks requested later wait for this measurement."""

    rounding: str
    """Kind of rounding: one of the values of `echo_hub.core.trust.numerics.ROUNDINGS`."""
    policy_version: int


@_effect
class HastenChecks:
    """Action: compute now all checks that wait for a fuller batch. Reason: a rollout's score waits for one of these
    checks, or one node has too many waiting checks.
    """


@_effect
class SendCheck:
    """Action: have this node recompute another node's committed rollout, then answer CheckReturned. The answer is
    CheckAbandoned if no node can do the check. `deadline_s` is relative to now."""

    node_id: str
    rollout_id: str
    deadline_s: float


@_effect
class HandOver:
    """Action: give the learner a group whose rollouts are all received, before a step trains on it. None of the
    rollouts is known to be invalid; some rewards may still be missing. `rollout_ids` are in training order. A second
    HandOver of the same group replaces its rollouts.
    """

    group_id: int
    rollout_ids: tuple[str, ...]
    first_turns: tuple[DrawnTurn, ...] | None = field(default=None, compare=False)
    """All first turns in training order, if still in memory. None: load them from the store."""


class PlannedGroup(NamedTuple):
    """One group of a step's batch, with its rollouts and their rewards."""

    group_id: int
    rollout_ids: tuple[str, ...]
    """Rollouts in the same order as in the group's HandOver."""
    rewards: tuple[float, ...]
    """Reward of each episode, in order."""


@_effect
class BeginStep:
    """Action: let the learner compute this step while the database still commits the step's plan. The learner must keep
    no result until the TrainStep of the same turn arrives, after the commit. BeginStep may arrive before the TrainStep
    of an earlier step. A learner that lacks the previous step ignores BeginStep and takes everything from TrainStep."""

    step: int
    batch: tuple[PlannedGroup, ...]


@_effect
class TrainStep:
    """Action: give the learner the planned batch of this step, unless BeginStep did, and have it keep the result. The
    learner may still be computing the previous step. It answers with StepComputed and then StepDone. Steps come in
    order, and at most two are outstanding without StepDone."""

    step: int


@_effect
class PublishVersion:
    """Action: sign the learner's adapter of this version and offer it to nodes, then answer VersionPublished."""

    policy_version: int


@_effect
class AnnounceVersion:
    """Action: announce a published version to every node."""

    policy_version: int


@_effect
class EvaluationDone:
    """Action: note that every episode of this version's evaluation has ended. The store has the results of all these
    episodes.
    """

    policy_version: int


@_effect
class DeliverAnswer:
    """Action: give a tenant one finished sample."""

    group_id: int
    index: int
    rollout_id: str
    node_id: str
    """Node that held the sample's lease."""
    payload: RolloutPayload | None = field(default=None, compare=False)
    """The sample, if still in memory. None: the store has it."""


@_effect
class TellStandby:
    """Action: tell a node on standby why it gets no work. `reason` None: the node may get work again."""

    node_id: str
    reason: StandbyReason | None
    detail: str = ""


@_effect
class TellOperator:
    """Action: wake the caller that waits for operator action `number`; its outcome is in the database."""

    number: int


@_effect
class FinishRun:
    """Action: end the run. Its last step is trained and published, and no more training leases follow."""


IntakeAction = (
    PrepareGroup
    | SendLease
    | RevokeLease
    | SendReceipts
    | SendTrained
    | LookUpReceipt
    | ScoreRollout
    | CloseSession
    | SendCheck
    | AnnounceVersion
    | DeliverAnswer
    | TellStandby
)
"""Actions that `echo_hub.intake` carries out. AnnounceVersion is one of them, because the intake checks that
nodes name only announced versions."""
TrainingAction = HandOver | BeginStep | TrainStep | EvaluationDone | FinishRun
"""Actions that `echo_hub.training` carries out."""
DistributionAction = PublishVersion | AnnounceVersion
"""Actions that `echo_hub.distribution` carries out."""
OversightAction = CheckRollout | MeasureNumerics | HastenChecks | PublishVersion | TellOperator
"""Actions that `echo_hub.oversight` carries out. PublishVersion is one of them, because the verifier counts published
versions."""
Action = IntakeAction | TrainingAction | DistributionAction | OversightAction

Effect = Record | Action
RECORDS = Record.__args__
ACTIONS = Action.__args__
