"""Records of single rollouts in the hub's database: a filter, a list row, and one group in full.

The pages use these classes without importing the hub. Field names are those of the JSON of /api/v1/rollouts, so
renaming one breaks clients. Times are seconds since the epoch on the hub's clock, log-probabilities are in nats. Texts
come from models and untrusted nodes: treat them as hostile input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from echo_shared.records.run import FLAT
from echo_shared.wire.messages import Completion, FinishReason, ReceiptState, content_of
from echo_shared.wire.messages.fields import TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFilter:
    """Filter for rollouts. A rollout must match all fields that are set; None and "" match any rollout."""

    step: int | None = None
    """Rollouts of the groups in this step's batch, including dropped rollouts."""
    group: int | None = None
    node: str = ""
    """Id of the node that held the lease."""
    version: int | None = None
    """Policy version of the lease."""
    state: str = ""
    """State of the rollout, a `ReceiptState` value."""
    drop: str = ""
    """Reason why the rollout was dropped, a `DropReason` value."""
    check: str = ""
    """Result of the rollout's check, a `Checked` value."""
    reward_min: float | None = None
    reward_max: float | None = None
    tokens_min: int | None = None
    tokens_max: int | None = None
    text: str = ""
    """Text that the completion contains, in upper or lower case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """State of one leased rollout, and the time at which it reached each state."""

    rollout_id: str
    group_id: int
    index: int
    turn: int
    """Number of the turn in its episode, from 0. Single-turn tasks have only turn 0."""
    turn_reward: float | None = None
    """Part of the episode's reward that the environment gave this turn; None: last turn, or no answer yet."""
    step: int | None
    """Step whose batch contains the rollout's group."""
    evaluation: str
    """Id of the held-out problem if the rollout belongs to an evaluation; else empty."""
    task: str = ""
    """Task key; empty if the run has only one task."""
    node_id: str
    node_name: str
    policy_version: int
    state: str
    drop_reason: str | None
    detail: str
    """Details of the drop reason."""
    checked: str
    reward: float | None
    components: Mapping[str, float] | None
    """Components of the reward before weighting; None: the reward has no components, or is missing."""
    num_tokens: int | None
    """Number of drawn tokens; None: the rollout has not arrived."""
    leased_at: float
    received_at: float | None
    scored_at: float | None
    final_at: float | None
    """Time when the rollout was trained on, evaluated or dropped."""
    not_kept: str
    """Retention setting that removed the rollout's tokens: share or bytes; else empty."""

    @property
    def is_in_flight(self) -> bool:
        """True while a node holds the lease, so that the rollout may still arrive."""
        return self.state == ReceiptState.LEASED


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """A rollout as a row of a list: its state, and the text of its completion."""

    summary: RolloutSummary = field(metadata=FLAT)
    text: str | None
    """Completion with special tokens shown; None: its tokens are not stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsPage:
    """A page of rollouts, newest lease first."""

    rollouts: tuple[RolloutRow, ...]
    before: str
    """Cursor of the next page; empty: this page is the last one. Other pages may be short or empty, because a request
    examines a limited number of rollouts.
    """
    kept_rollouts: int
    """Final rollouts whose tokens are stored. This and the following fields count the whole run."""
    kept_bytes: int
    left_out_by_share: int
    deleted_by_bytes: int
    retired_rollouts: int = 0
    """Rollouts that were removed from the database: archived, or deleted by the retention settings."""
    retired_step: int = 0
    """Last step whose rollouts were removed; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """Shortest run of tokens that decodes to complete characters, usually one token."""

    text: str
    num_tokens: int
    logprob: float
    """Sum of the tokens' log-probabilities, as reported by the node that drew them."""
    version: int
    """Policy version with which the piece's last token was drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSpan:
    """Part of a completion: consecutive tokens that one node drew with one policy version."""

    node_id: str
    policy_version: int
    num_tokens: int


_NO_IDS: Final[NDArray[np.int32]] = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPayload(Completion):
    """A completion as the hub stores it: with the nodes that sampled its parts, and the environment's answer."""

    observation_ids: TokenIds = field(default_factory=lambda: _NO_IDS)
    """Tokens of the environment's answer, between this turn and the next; empty after the last turn."""
    spans: tuple[DrawnSpan, ...] = ()
    """Parts of the completion, each drawn by one node with one version, in token order. Empty: the node that holds the
    lease drew all tokens, with the lease's version.
    """

    @classmethod
    def of(cls, completion: Completion, spans: tuple[DrawnSpan, ...] = ()) -> RolloutPayload:
        """Make a payload from the completion in a node's message or an engine's report."""
        return cls(*content_of(completion), spans=spans)

    def attributed(self, node_id: str, policy_version: int) -> RolloutPayload:
        """Return the payload with `spans` that cover all tokens. Without spans, attribute all tokens to the lease's
        node and version.
        """
        if self.spans:
            return self
        own = DrawnSpan(node_id=node_id, policy_version=policy_version, num_tokens=len(self.completion_ids))
        return replace(self, spans=(own,))


_Payload = TypeVar("_Payload", bound=RolloutPayload)


def pack_payload(payload: RolloutPayload) -> dict[str, Any]:
    """Return all fields, including those of a subclass, as a frame between the hub's processes."""
    frame = {each.name: getattr(payload, each.name) for each in fields(payload)}
    return {**frame, "spans": pack_spans(payload.spans)}


def unpack_payload(kind: type[_Payload], frame: Mapping[str, Any]) -> _Payload:
    """Rebuild a payload of class `kind` from the frame of `pack_payload`."""
    reason, spans = FinishReason(frame["finish_reason"]), unpack_spans(frame["spans"])
    return kind(**{**frame, "finish_reason": reason, "spans": spans})


def pack_spans(spans: Sequence[DrawnSpan]) -> list[list[str | int]]:
    return [[span.node_id, span.policy_version, span.num_tokens] for span in spans]


def unpack_spans(packed: Iterable[Sequence[Any]]) -> tuple[DrawnSpan, ...]:
    return tuple(
        DrawnSpan(node_id=node_id, policy_version=version, num_tokens=count) for node_id, version, count in packed
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMade:
    """A tool call in a reply, as the model wrote it."""

    name: str
    """Name of the tool; empty if the call cannot be parsed."""
    arguments: str
    """Arguments as JSON text; empty if the call cannot be parsed."""
    problem: str = ""
    """Why the call cannot be parsed; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedMessage:
    """A message of the environment after a reply, without the chat template's own tokens."""

    role: str
    """Sender in the chat template: user or tool. Empty: the template's form was not recognised, and `text` holds all
    tokens."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutText:
    """Text of a completion and the environment's answer."""

    text: str
    pieces: tuple[TextPiece, ...]
    payload: RolloutPayload = field(metadata=FLAT)
    """The completion; its `spans` (which node and version drew which tokens) cover all tokens."""
    observation: str
    """The environment's answer, which the loss excludes; empty after the last turn."""
    calls: tuple[CallMade, ...] = ()
    """Tool calls in the model's reply, in order."""
    messages: tuple[ObservedMessage, ...] = ()
    """The environment's messages in `observation`, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView:
    """A rollout as its group's page shows it: state, advantage and text."""

    summary: RolloutSummary = field(metadata=FLAT)
    advantage: float | None
    """Advantage by the run's objective; None: the step's batch does not contain the rollout."""
    drawn: RolloutText | None
    """Text of the completion; None: its tokens are not stored."""


SessionEventKind = Literal["opened", "lost", "rebuilt", "diverged", "closed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEvent:
    """Opening, rebuild, loss or end of an episode's session in a stateful environment."""

    at: float
    index: int
    """Index of the episode in its group."""
    attempt: int
    """Number of times that the episode had started again before this event."""
    kind: SessionEventKind
    turn: int | None = None
    """Number of the turn (from 0) in which the event happened; None: between turns, or before the first one."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLosses:
    """Count of one episode's session losses: the session was lost, or gave other answers after it was rebuilt."""

    index: int
    """Index of the episode in its group."""
    attempt: int
    """Number of times that the episode started again."""
    losses: int
    """Number of times that the session was lost or gave other answers. The second time ends the episode."""
    replaced: int
    """Number of the environment's answers that were different when a lost session was rebuilt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """State of one group (the rollouts of one prompt), and the times of the training step that used it."""

    group_id: int
    step: int | None
    opened_at: float | None
    """Time when the group was opened; None: the group belongs to an evaluation."""
    drop_reason: str | None
    staleness: int | None
    """Optimizer steps between sampling and training; None: no step's batch contains the group."""
    planned_at: float | None
    trained_at: float | None
    published_at: float | None
    """Time at which the hub published the version that this step produced."""
    retired: bool = False
    """True: the group's rollouts were removed from the database (archived, or deleted by the retention settings)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView(GroupRecord):
    """One prompt with all rollouts ever leased for it, ordered by index, turn and lease."""

    evaluation: str
    task: str = ""
    """Task key; empty if the run has only one task."""
    prompt: str
    """Prompt with special tokens shown."""
    rollouts: tuple[RolloutView, ...]
    episode: int | None = None
    """Index of the only episode whose texts were read; None: the texts of all rollouts were read."""
    sessions: tuple[SessionEvent, ...] = ()
    """Events of the group's sessions that the hub still knows, oldest first."""
    losses: tuple[EpisodeLosses, ...] = ()
    """Losses of sessions as stored, for the episodes that had any."""
