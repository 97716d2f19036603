"""State that the store gives the coordinator at start: all unfinished work, and the counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from echo_hub.core.answer_groups import AnswerGroup
from echo_hub.core.policy.curriculum import GroupResult
from echo_hub.core.trust.numerics import CoarseClass
from echo_hub.core.trust.standing import StandingRow
from echo_shared.wire.messages import Checked, ReceiptState

RECENT_STEPS: Final = 8
"""Number of newest steps whose batch sizes are averaged, if batch sizes vary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedRollout:
    """One rollout that was leased and is not trained, evaluated, answered or dropped."""

    rollout_id: str
    lease_id: int
    node_id: str
    group_id: int
    index: int
    turn: int = 0
    policy_version: int
    deadline: float
    state: ReceiptState
    num_tokens: int = 0
    reward: float | None
    """Reward of the episode. None in state `scored`: the environment answered this turn, so the episode goes on."""
    turn_reward: float = 0.0
    """Reward of this turn alone, if the environment answered the turn and the episode goes on."""
    oldest_version: int | None = None
    """Oldest version that sampled any token of a received rollout; None: the lease's version."""
    drawn_by: tuple[str, ...] = ()
    """Nodes besides the lease's node that sampled some tokens of a received rollout."""
    others_held: bool = False
    """True if an earlier lease of another node may have produced this rollout's first tokens."""
    checked: Checked = Checked.NO


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLosses:
    """Losses of one episode's sessions. Episodes without any loss have no row."""

    group_id: int
    index: int
    attempt: int
    losses: int
    replaced: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """One group that was neither dropped nor trained. Groups in planned batches are included."""

    group_id: int
    seed: int
    prompt: int | None = None
    """Key of the prompt: equal prompts have equal keys. None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """Planned batch of one step."""

    step: int
    group_ids: tuple[int, ...]
    rollout_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSnapshot:
    """What the store knows when the hub starts. All defaults describe a new run."""

    next_group_id: int = 0
    next_lease_id: int = 1
    groups: tuple[GroupRow, ...] = ()
    rollouts: tuple[UnfinishedRollout, ...] = ()
    """Unfinished rollouts in leasing order, and so in turn order."""
    scorer_failures: tuple[tuple[int, int, int], ...] = ()
    """Group, index and turn of each rollout of an unfinished group that was dropped after a scorer failure."""
    sessions: tuple[SessionLosses, ...] = ()
    """Numbers of lost sessions, for each unfinished group's episodes."""
    newest_planned_group: int = -1
    """Youngest group in any step's batch; -1 = none."""
    flat_groups: tuple[int, ...] = ()
    """Groups younger than `newest_planned_group` that were dropped because of equal rewards."""
    results: tuple[GroupResult, ...] = ()
    """Stored pass rates of the newest groups, oldest first, for the curriculum."""
    trained_steps: int = 0
    """Number of steps recorded as trained."""
    planned: tuple[StepRow, ...] = ()
    """Planned steps after `trained_steps`, in order."""
    batch_sizes: tuple[int, ...] = ()
    """Number of groups in each of the newest `RECENT_STEPS` batches, in order."""
    published_version: int = 0
    replayable: frozenset[int] = frozenset()
    """Trained steps whose payloads are still stored, so that a learner with an older checkpoint can repeat them."""
    evaluated: frozenset[tuple[int, int]] = frozenset()
    """Group and index of each ended episode of an evaluation that is not finished."""
    answers: tuple[AnswerGroup, ...] = ()
    """Groups of tenants' samples that the store still has, sorted by id."""
    answered: frozenset[tuple[int, int]] = frozenset()
    """Group and index of each delivered sample of the groups in `answers`."""
    standings: tuple[StandingRow, ...] = ()
    """Trust standings of all nodes that were ever checked."""
    coarse_classes: tuple[CoarseClass, ...] = ()
    """Numerics classes (kinds of engine) that several nodes without a common owner have shown to round more coarsely
    than measured or assumed."""
