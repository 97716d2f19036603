"""Inputs of the coordinator. Each event is a fact from the outside world; the coordinator answers with effects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.answer_groups import AnswerGroup
from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.numerics import NOT_SAID, NumericsClass
from echo_hub.core.trust.pairs import PeerFinding
from echo_hub.core.trust.screening import StepScreen
from echo_shared.records.rollout import RolloutPayload
from echo_shared.wire.messages import DropReason


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConnected:
    """A node has proven its identity and was welcomed. It gets no work until it reports a capacity."""

    node_id: str
    cost_per_hour: float = 0.0
    """Price of the node in US dollars per hour, including power if that is counted; 0 = the node costs nothing."""
    origin: str = ""
    """Network address or range that the node connects from; empty = unknown. Many keys from one origin may belong to
    one person."""
    invite: str = ""
    """Invite that the node used. All keys of one invite count as one person's, at any address. Empty = no invite."""
    owner: str = ""
    """Owner that the node has proven to belong to (`echo-node fleet`); empty = none. Nodes of one owner never check
    each other's rollouts."""
    numerics: NumericsClass = NOT_SAID
    """Engine, precision and device that the node reports. The precision usually arrives with a later report."""
    answers: bool = True
    """False: the node works for no tenant."""
    refuses: frozenset[str] = frozenset()
    """Names of tenants for which the node does not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDisconnected:
    """The node's connection is closed. Its leases stay, because the node may come back with finished rollouts."""

    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReported:
    """A node's report of the work it accepts.

    `capacity`: rollouts the node is willing to hold. `policy_version`: newest version the node can sample from; None =
    none. `tokens_per_s`: speed that the node claims; 0 = unknown. `precision`: precision of the engine's weights; empty
    = not reported. `checks`: number of other nodes' rollouts that the node is willing to recompute at the same time.
    """

    node_id: str
    capacity: int
    policy_version: int | None
    tokens_per_s: float = 0.0
    precision: str = ""
    checks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPrepared:
    """The problem of a group requested by `PrepareGroup` is sampled and tokenised."""

    group_id: int
    seed: int
    prompt: int | None = None
    """Key of the prompt: equal prompts have equal keys. None if unknown."""
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutArrived:
    """A node sent a finished rollout, perhaps not for the first time. The core copies `payload` to the record, and
    reads only the number of tokens, the spans and the sampling time."""

    node_id: str
    rollout_id: str
    lease_id: int
    group_id: int
    index: int
    policy_version_start: int
    policy_version_end: int
    payload: RolloutPayload
    problem: str = ""
    """Contradiction between the completion and its lease; empty = none found."""
    is_unattributed: bool = False
    """True if the rollout continues tokens that the hub got before its restart, so that their sampling node is
    unknown."""
    ends_early: bool = False
    """True if the hub took the tokens that the node has streamed as the result, because they complete a stop string.
    The node still draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutScored:
    """The rollout passed the checks and has its reward: its episode has ended."""

    rollout_id: str
    reward: float
    components: Mapping[str, float] | None = None
    """Named parts of the reward; None if the task's score is the only part. The core only copies them to the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContinued:
    """The rollout passed the checks and the environment answered, so the episode continues.

    `observation_ids` are all tokens between this turn and the next. The core only copies them to the record.
    """

    rollout_id: str
    observation_ids: NDArray[np.int32]
    turn_reward: float = 0.0
    """Part of the episode's reward that this turn earned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRejected:
    """The rollout failed its token checks, or scoring failed."""

    rollout_id: str
    reason: DropReason
    detail: str
    killed_scorer: bool = False
    """True if scoring failed because the completion ended the scorer's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionDiverged:
    """The rollout's session was rebuilt, and answered an earlier turn of the episode differently than before. So later
    turns of that episode were sampled after an answer that the new environment never gave.

    The new answer to turn `turn` is `observation_ids`, or the end of the episode with `reward`.
    """

    rollout_id: str
    turn: int
    """The earlier turn of the episode that got another answer; 0 = the first turn."""
    observation_ids: NDArray[np.int32] | None = None
    turn_reward: float = 0.0
    reward: float | None = None
    """Reward of the episode, if the new answer to the earlier turn ends the episode."""
    components: Mapping[str, float] | None = None
    if_lost: RolloutScored
    """Score of the episode if losing this session ends the episode: it has lost `SessionRules.losses` sessions."""
    is_loss: bool = True
    """True if the session died by itself. False if a hub restart ended the session: hub restarts do not count as
    losses, because no policy can cause them.
    """
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLost:
    """The rollout's session is lost and cannot be rebuilt, so the episode starts again from its prompt."""

    rollout_id: str
    if_lost: RolloutScored
    """Score of the episode if losing this session ends the episode: it has lost `SessionRules.losses` sessions."""
    is_loss: bool = True
    """True if the session died by itself. False if a hub restart ended the session: hub restarts do not count as
    losses, because no policy can cause them.
    """
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsChanged:
    """The limit of simultaneously open sessions has changed. 0: the environment is away. The coordinator counts the
    sessions in use itself."""

    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutChecked:
    """The verifier recomputed the rollout. `spans`: in token order, each node that sampled a part, with the evidence
    about its tokens."""

    rollout_id: str
    spans: tuple[tuple[str, Evidence], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsMeasured:
    """The verifier measured how much engines with this kind of rounding err when they sample. `evidence` is None if the
    measurement failed."""

    rounding: str
    policy_version: int
    evidence: Evidence | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReturned:
    """A node answered SendCheck after recomputing the rollout. `finding` is None if the node could not decide."""

    node_id: str
    rollout_id: str
    finding: PeerFinding | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckAbandoned:
    """This rollout cannot be checked. It counts as unchecked, which is not held against its node."""

    rollout_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePardoned:
    """The operator ended a node's quarantine; the node starts over as new."""

    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorAsked:
    """An operator asked to change a setting or to publish a version (`core.operating`).

    ActionSettled with the same `number` follows.
    """

    number: int
    what: str
    value: str | float = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVouchedFor:
    """An operator declared a node trusted (proven), or withdrew that. ActionSettled with the same `number` follows."""

    number: int
    node_id: str
    is_trusted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGivenBack:
    """The node will not finish these indices of its lease."""

    node_id: str
    lease_id: int
    indices: tuple[int, ...]
    reason: str
    unusable_version: int | None = None
    """Version that the node's engine cannot use, if that is why the node gives the lease back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsBegun:
    """Nodes have streamed the first sampled tokens of these unfinished rollouts to the hub."""

    rollout_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerReady:
    """The learner is up, with this version's checkpoint loaded.

    `metrics` maps steps to the metrics that the checkpoint keeps. Only steps that the hub may not know about are
    included.
    """

    policy_version: int
    metrics: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    screens: Mapping[int, StepScreen] = field(default_factory=dict)
    """The learner's findings about each step's rollouts, for the steps in `metrics`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerLost:
    """The learner process ended, and every step that it was given but has not finished is lost. In co-located mode it
    also sampled, so its leases are lost as well. LearnerReady follows once it is up again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComputed:
    """The learner has computed step `step` and is free for the next one.

    Nothing is written yet, so the step may still be lost. StepDone follows once the step is written.
    """

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """Step `step` is trained and, where that is due, exported and checkpointed.

    The learner may already compute the next step. Without an earlier StepComputed, the step counts as computed now.
    """

    step: int
    metrics: Mapping[str, float]
    screen: StepScreen = field(default_factory=StepScreen)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPublished:
    """The version's adapter is signed, and nodes can fetch it."""

    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionUnusable:
    """The hub found that no engine can use this version's adapter, so the version is not published."""

    policy_version: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationWanted:
    """Nodes should sample the held-out problems with this version, which they can fetch. EvaluationDone follows.

    After a restart the event is sent again.
    """

    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationAbandoned:
    """The evaluation of this version by nodes was cancelled."""

    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerWanted:
    """A tenant asks for samples. DeliverAnswer follows for each of them, unless the request is cancelled."""

    group: AnswerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCancelled:
    """A tenant no longer wants the unfinished samples of this request."""

    group_id: int
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed: the coordinator checks its deadlines."""


Event = (
    NodeConnected
    | NodeDisconnected
    | NodeReported
    | GroupPrepared
    | RolloutArrived
    | RolloutScored
    | RolloutContinued
    | RolloutRejected
    | SessionDiverged
    | SessionLost
    | SlotsChanged
    | RolloutChecked
    | NumericsMeasured
    | CheckReturned
    | CheckAbandoned
    | NodePardoned
    | OperatorAsked
    | NodeVouchedFor
    | LeaseGivenBack
    | RolloutsBegun
    | LearnerReady
    | LearnerLost
    | StepComputed
    | StepDone
    | VersionPublished
    | VersionUnusable
    | EvaluationWanted
    | EvaluationAbandoned
    | AnswerWanted
    | AnswerCancelled
    | Tick
)
