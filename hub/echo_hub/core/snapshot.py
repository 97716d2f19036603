"""What the store hands the coordinator at start: all that is unfinished, and where the counters stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from echo_hub.core.curriculum import GroupResult
from echo_hub.core.trust.numerics import CoarseClass
from echo_hub.core.trust.standing import StandingRow
from echo_shared.messages import Checked, ReceiptState

RECENT_STEPS: Final = 8
"""Over how many steps the number of groups that a step takes is averaged, where it varies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """One leased rollout whose state is not final."""

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
    """Scored and None: a turn that the environment has answered."""
    turn_reward: float = 0.0
    """Of such a turn."""
    oldest_version: int | None = None
    """That has drawn any of it, if it is received; None: that of its lease."""
    drawn_by: tuple[str, ...] = ()
    """Other nodes that have drawn any of it, if it is received."""
    others_held: bool = False
    """Another node had a lease of it before, and may have drawn what this one goes on with."""
    checked: Checked = Checked.NO


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """One group that no trained step has consumed and that was not dropped; those of planned steps are among them."""

    group_id: int
    seed: int
    prompt: int | None = None
    """The key of its prompt; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step's batch, as planned."""

    step: int
    group_ids: tuple[int, ...]
    rollout_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSnapshot:
    """Empty for a new run."""

    next_group_id: int = 0
    next_lease_id: int = 1
    groups: tuple[GroupRow, ...] = ()
    rollouts: tuple[RolloutRow, ...] = ()
    """Unfinished rollouts in the order of their leases, and so of their turns."""
    scorer_failures: tuple[tuple[int, int, int], ...] = ()
    """Group, index and turn of each rollout of these groups that was dropped because the scorer failed on it."""
    newest_planned_group: int = -1
    """The youngest group in any step's batch; -1 = none."""
    flat_groups: tuple[int, ...] = ()
    """Groups younger than that one that were dropped because all their rewards were equal."""
    results: tuple[GroupResult, ...] = ()
    """How well the newest groups did, oldest first, where that is written down."""
    trained_steps: int = 0
    """Steps recorded as trained."""
    planned: tuple[StepRow, ...] = ()
    """The steps after `trained_steps` whose batches are already written, in order."""
    batch_sizes: tuple[int, ...] = ()
    """How many groups each of the newest `RECENT_STEPS` steps has in its batch, in order."""
    published_version: int = 0
    replayable: frozenset[int] = frozenset()
    """Trained steps whose payloads are still in the store: a learner with an older checkpoint repeats them."""
    evaluated: frozenset[tuple[int, int]] = frozenset()
    """Group and index of the ended episodes of evaluations whose result is not recorded yet."""
    standings: tuple[StandingRow, ...] = ()
    """What is thought of nodes that were ever checked."""
    coarse_classes: tuple[CoarseClass, ...] = ()
    """Classes of numerics that unlike nodes have shown to be coarser than was measured."""
