"""What can happen to the coordinator. Every event is a fact from the world; the coordinator answers with effects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.step_screen import StepScreen
from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.numerics import NOT_SAID, NumericsClass
from echo_hub.core.trust.pairs import Finding
from echo_shared.messages import DropReason
from echo_shared.rollout_books import RolloutPayload


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConnected:
    """A node has proven who it is and was welcomed. It gets no work until it reports a capacity."""

    node_id: str
    cost_per_hour: float = 0.0
    """In US dollars, its power included where that is counted; 0 = a gift."""
    origin: str = ""
    """Where it connects from, as far as many keys may be one person's there: an address, or a network of addresses.
    Empty = not known."""
    invite: str = ""
    """By whose invite it came: all of its keys are one person's, wherever they are. Empty = by nobody's."""
    numerics: NumericsClass = NOT_SAID
    """What it says of its engine; its precision mostly comes with a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDisconnected:
    """The connection is gone. Its leases stay: the node may come back with finished rollouts in its spool."""

    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReported:
    """`capacity`: rollouts that it is willing to hold; `policy_version`: the newest it can sample from, None = none;
    `precision`: of its engine's weights, empty = not said; `checks`: rollouts of others that it is willing to compute
    again at once."""

    node_id: str
    capacity: int
    policy_version: int | None
    precision: str = ""
    checks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPrepared:
    """The problem of a group that `PrepareGroup` asked for is sampled and tokenised."""

    group_id: int
    seed: int
    prompt: int | None = None
    """A key that the same prompt has whenever it comes again; None: not known."""
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutArrived:
    """A node sent a rollout, perhaps again. `payload` is not read here and goes into the record that is committed."""

    node_id: str
    rollout_id: str
    lease_id: int
    group_id: int
    index: int
    policy_version_start: int
    policy_version_end: int
    payload: RolloutPayload
    problem: str = ""
    """What in it contradicts what the lease gave of its completion; empty = nothing."""
    is_unattributed: bool = False
    """It goes on with what was given before the hub's restart, and nobody knows any more who drew that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutScored:
    """The rollout passed the checks and has its reward: its episode has ended."""

    rollout_id: str
    reward: float
    components: Mapping[str, float] | None = None
    """What the reward is made of, each under its name; None: of the task's score alone. Not read here; they go into
    the record that is committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContinued:
    """The rollout passed the checks and the environment has answered it: its episode goes on. `observation_ids` are
    all tokens between this turn and the next, not read here; they go into the record that is committed."""

    rollout_id: str
    observation_ids: NDArray[np.int32]
    turn_reward: float = 0.0
    """Of the reward of its episode, what this turn has earned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRejected:
    """The rollout failed the checks, or could not be scored."""

    rollout_id: str
    reason: DropReason
    detail: str
    killed_scorer: bool = False
    """Whether it could not be scored because it ended the process that scored it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutChecked:
    """The verifier has computed the rollout again: what each node that drew a part of it has shown, in order."""

    rollout_id: str
    spans: tuple[tuple[str, Evidence], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsMeasured:
    """The verifier has drawn tokens as an engine with this rounding would, and examined them. `evidence`: None where it
    could not."""

    rounding: str
    policy_version: int
    evidence: Evidence | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReturned:
    """A node that was asked to by SendCheck has computed the rollout again; `finding` is None where it cannot tell."""

    node_id: str
    rollout_id: str
    finding: Finding | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckAbandoned:
    """The verifier cannot check this rollout: it counts as unchecked."""

    rollout_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePardoned:
    """The operator wants a quarantined node to begin anew."""

    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorAsked:
    """An operator wants a setting changed, or a version published (`core.operating`). ActionSettled follows, by the
    number that the action has in the books."""

    number: int
    what: str
    value: str | float = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVouchedFor:
    """An operator takes a node for proven, or no longer does. ActionSettled follows, as of OperatorAsked."""

    number: int
    node_id: str
    is_trusted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGivenBack:
    """The node will not finish these."""

    node_id: str
    lease_id: int
    indices: tuple[int, ...]
    reason: str
    unusable_version: int | None = None
    """The version that the node's engine cannot use, if that is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsBegun:
    """The hub has the first drawn tokens of these unfinished rollouts."""

    rollout_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerReady:
    """The learner is up, with the checkpoint of this version loaded. `metrics`: by step, of the newest ones up to that
    version, as many as it may have trained unseen; the checkpoint keeps them."""

    policy_version: int
    metrics: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    screens: Mapping[int, StepScreen] = field(default_factory=dict)
    """Likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerLost:
    """The learner process ended, and with it every TrainStep and, in co-located mode, every lease that it was given.
    LearnerReady follows once it is up again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComputed:
    """The learner has computed step `step` and is free for the next one. Nothing of it is written yet: it may still be
    lost, and StepDone follows once it is not."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """Step `step` is trained, and exported and checkpointed where that is due. The learner may be at work on the next
    step already. Without a StepComputed before it, it was computed just now."""

    step: int
    metrics: Mapping[str, float]
    screen: StepScreen = field(default_factory=StepScreen)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPublished:
    """The version's artefact is signed and seeded."""

    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionUnusable:
    """The version is not published: the hub finds that no engine can use its adapter."""

    policy_version: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationWanted:
    """This version is to be evaluated by nodes; they can fetch it. EvaluationDone follows. After a restart it is
    wanted again."""

    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationAbandoned:
    """Nobody waits for this version's evaluation by nodes any more."""

    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed: deadlines are looked at."""


Event = (
    NodeConnected
    | NodeDisconnected
    | NodeReported
    | GroupPrepared
    | RolloutArrived
    | RolloutScored
    | RolloutContinued
    | RolloutRejected
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
    | Tick
)
