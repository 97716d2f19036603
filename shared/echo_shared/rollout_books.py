"""What the hub's books say of single rollouts: what is asked for, one row of a list, and one group in full.

They are here because the pages import nothing of the hub. Fields are those of the JSON of /api/v1/rollouts: a name is a
promise. Times are seconds since the epoch on the hub's clock, log-probabilities are nats. Texts are what a model or a
stranger's node made up: hostile input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from echo_shared.books import FLAT
from echo_shared.messages import ReceiptState


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFilter:
    """Which rollouts are asked for: those that fit all of it. None and "" ask for nothing."""

    step: int | None = None
    """Of the groups of this step's batch, with those of them that were dropped."""
    group: int | None = None
    node: str = ""
    """The id of the node that it was leased to."""
    version: int | None = None
    """The policy version of its lease."""
    state: str = ""
    """A `ReceiptState` value."""
    drop: str = ""
    """A `DropReason` value."""
    check: str = ""
    """A `Checked` value."""
    reward_min: float | None = None
    reward_max: float | None = None
    tokens_min: int | None = None
    tokens_max: int | None = None
    text: str = ""
    """Somewhere in the completion, whatever the case of its letters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """One leased rollout: its receipt, and when it came through each state."""

    rollout_id: str
    group_id: int
    index: int
    turn: int
    """Of its episode; 0 = the first, and the only one but in environments."""
    step: int | None
    """Whose batch its group is in."""
    evaluation: str
    """Which held-out problem, if it was drawn to evaluate its version; else empty."""
    task: str = ""
    """The key of its task; empty where the run has one task alone."""
    node_id: str
    node_name: str
    policy_version: int
    state: str
    drop_reason: str | None
    detail: str
    """More of why it was dropped."""
    checked: str
    reward: float | None
    components: Mapping[str, float] | None
    """What the reward is made of, before it is weighed; None: it is the task's score alone, or there is none."""
    num_tokens: int | None
    """Drawn; None: it has not come in."""
    leased_at: float
    received_at: float | None
    scored_at: float | None
    final_at: float | None
    """When it was trained on, evaluated or dropped."""
    not_kept: str
    """Why its tokens are not there any more: share or bytes, as the settings of keeping have it; else empty."""

    @property
    def is_in_flight(self) -> bool:
        """A node still has it: it may come in yet."""
        return self.state == ReceiptState.LEASED


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """A rollout in a list."""

    summary: RolloutSummary = field(metadata=FLAT)
    text: str | None
    """The completion, its special tokens written out; None: its tokens are not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsPage:
    """Some rollouts, those that were leased last first."""

    rollouts: tuple[RolloutRow, ...]
    before: str
    """Goes on after these when asked with it; empty: there are no more. There may be more even after few or none: one
    answer looks at a bounded number of rollouts."""
    kept_rollouts: int
    """Of final rollouts, those whose tokens are there to read; in all of the run, as the next ones."""
    kept_bytes: int
    left_out_by_share: int
    deleted_by_bytes: int
    retired_rollouts: int = 0
    """That are not in the books any more: archived, or dropped as the settings of keeping have it."""
    retired_step: int = 0
    """They belong to the steps up to this one; 0: there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The shortest run of tokens that is a text: most often one token."""

    text: str
    num_tokens: int
    logprob: float
    """The sum over its tokens, by whoever drew them."""
    version: int
    """The policy version that drew its last token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSpan:
    """Tokens that one node drew by one version, one after the other."""

    node_id: str
    policy_version: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutText:
    """What was drawn, and what an environment answered."""

    text: str
    pieces: tuple[Piece, ...]
    """The text is theirs, one after the other."""
    completion_ids: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]
    spans: tuple[DrawnSpan, ...]
    finish_reason: str
    sampling_s: float
    observation: str
    """Empty: it was the last turn. Masked out of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView:
    """A rollout in its group."""

    summary: RolloutSummary = field(metadata=FLAT)
    advantage: float | None
    """As the run's objective has it; None: its group is in no step's batch, or it is not in the group's part of it."""
    drawn: RolloutText | None
    """None: its tokens are not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """One prompt with all that was ever leased of it, by index, turn and lease."""

    group_id: int
    step: int | None
    evaluation: str
    opened_at: float | None
    """None: of an evaluation."""
    drop_reason: str | None
    staleness: int | None
    """Optimizer steps from sampling to consumption; None: it is in no step's batch."""
    planned_at: float | None
    trained_at: float | None
    published_at: float | None
    """When the version that it was trained into was published."""
    task: str = ""
    """The key of its task; empty where the run has one task alone."""
    prompt: str
    """Its special tokens written out."""
    rollouts: tuple[RolloutView, ...]
    retired: bool = False
    """They are not in the books any more: archived, or dropped as the settings of keeping have it."""
