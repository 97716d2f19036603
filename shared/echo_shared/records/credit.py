"""Public credit records: the leaderboard of nodes or teams, one entry in full, and one receipt.

The pages use these classes without importing the hub. Field names are those of the JSON of /api/v1/leaderboard and
related routes, so renaming one breaks clients. Times are seconds since the epoch on the hub's clock; days are UTC days
since 1970-01-01. Nodes and teams choose their names: treat them as hostile input.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from echo_shared.records.run import FLAT

BoardKind = Literal["node", "team"]
BoardOrder = Literal["rank", "name", "rollouts", "tokens", "recent", "streak", "elsewhere", "seen"]
BOARD_ORDERS: Final[tuple[BoardOrder, ...]] = get_args(BoardOrder)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardQuery:
    kind: BoardKind = "node"
    order: BoardOrder = "rank"
    reverse: bool = False
    """Reverse the default order: largest numbers first, but lowest ranks and first names first."""
    search: str = ""
    """Substring of the name, in any case, or start of a node id."""
    team: str = ""
    """Only nodes in the team of this name."""
    after: int = 0
    """Number of rows to skip."""
    limit: int = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkKinds:
    """Work of one node by kind. Checks of other nodes' rollouts earn no credit; all other kinds do."""

    trained_rollouts: int = 0
    trained_tokens: int = 0
    evaluated_rollouts: int = 0
    answered_rollouts: int = 0
    """Rollouts delivered to tenants (users of the hub's API)."""
    answered_tokens: int = 0
    others_checked: int = 0
    others_checked_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditStanding:
    """Credit of one node, of one team, or of all nodes of an owner who wants a single entry.

    A rollout counts once a training step or an evaluation has used it, or a tenant has received it.
    """

    kind: BoardKind
    rank: int
    """Position by number of rollouts that counted, from 1, among all nodes or all teams."""
    node: str = ""
    """Start of the node id. For an owner: the owner's node with the most rollouts. Empty for a team."""
    name: str
    team: str = ""
    """Current team of a node; empty: none."""
    members: int = 0
    """Number of members of a team, or of an owner's nodes; 0 for a single node."""
    rollouts: int
    tokens: int
    """Tokens of rollouts that counted and that this node or team drew, including its parts of rollouts shared with
    other nodes.
    """
    share: float
    """Rollouts of this node or team that counted, as a fraction (0..1) of all that counted."""
    recent: float
    """Average tokens per day, with recent days weighted most: see `echo_hub.store.recent_average`."""
    steps: int
    """Number of training steps that used a rollout of this node or team."""
    streak_days: int
    """Number of consecutive days with credit, up to today or yesterday; 0 = the streak has ended."""
    longest_streak: int
    first_day: int | None
    """UTC day of the first rollout that counted; None: nothing has counted in this run."""
    last_day: int | None
    elsewhere_rollouts: int = 0
    """Rollouts that counted in runs of other hubs, according to exports that those hubs have signed."""
    elsewhere_tokens: int = 0
    last_seen: float = 0.0
    """Time of a node's last connection; 0 = it never connected."""
    work: WorkKinds = field(default=WorkKinds(), metadata=FLAT)
    """The node's work by kind (trained, evaluated, checked ...); zeros for a team."""

    @property
    def all_rollouts(self) -> int:
        """Rollouts that counted in this run and in imported runs of other hubs."""
        return self.rollouts + self.elsewhere_rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One page of a leaderboard's rows."""

    rows: tuple[CreditStanding, ...]
    num_found: int
    """Number of rows that match the query."""
    num_ranked: int
    """Number of all rows of the board."""
    has_elsewhere: bool = False
    """True if rows include credit from other hubs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditDay:
    day: int
    rollouts: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunElsewhere:
    """Credit from one imported run of another hub."""

    run_id: str
    run_name: str
    rollouts: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One node or team, with its daily credit and its credit from other hubs."""

    standing: CreditStanding
    days: tuple[CreditDay, ...]
    """Days with credit, in order. Old days are left out if there are many."""
    elsewhere: tuple[RunElsewhere, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShare:
    """Share of a node or team in a range of steps."""

    rollouts: int
    share: float
    """Fraction of these steps' trained tokens that the node or team has drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicReceipt:
    """State of one rollout, as the hub reports it to the rollout's node."""

    rollout_id: str
    state: str
    """State of the rollout, a `ReceiptState` value."""
    drop_reason: str | None
    checked: str
    """Result of the rollout's check, a `Checked` value."""
    node: str
    """Start of the id of the node that held the lease."""
    name: str
    policy_version: int
    step: int | None
    """Step whose batch contains the rollout's group."""
    num_tokens: int | None
    leased_at: float
    received_at: float | None
    scored_at: float | None
    final_at: float | None
