"""What the store hands the coordinator at start: all that is unfinished, and where the counters stand."""

from __future__ import annotations

from dataclasses import dataclass

from echo_shared.messages import ReceiptState


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """One leased rollout whose state is not final."""

    rollout_id: str
    lease_id: int
    node_id: str
    group_id: int
    index: int
    policy_version: int
    deadline: float
    state: ReceiptState
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """One group that no trained step has consumed and that was not dropped; the planned step's are among them."""

    group_id: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step's batch, as planned."""

    step: int
    group_ids: tuple[int, ...]
    rollout_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Empty for a new run."""

    next_group_id: int = 0
    next_lease_id: int = 1
    groups: tuple[GroupRow, ...] = ()
    rollouts: tuple[RolloutRow, ...] = ()
    trained_steps: int = 0
    """Steps recorded as trained."""
    planned: StepRow | None = None
    """The step after `trained_steps`, if its batch was already written."""
    published_version: int = 0
    replayable: frozenset[int] = frozenset()
    """Trained steps whose payloads are still in the store: a learner with an older checkpoint repeats them."""
