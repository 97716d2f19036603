"""What the hub's books say of credit: a board of nodes or teams, one of them in full, and one receipt. All is public.

They are here because the pages import nothing of the hub. Fields are those of the JSON of /api/v1/leaderboard and its
neighbours: a name is a promise. Times are seconds since the epoch on the hub's clock, days are UTC days numbered from
1970-01-01. Names are what nodes and teams call themselves: hostile input.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from echo_shared.books import FLAT

BoardKind = Literal["node", "team"]
BoardOrder = Literal["rank", "name", "rollouts", "tokens", "recent", "streak", "elsewhere", "seen"]
BOARD_ORDERS: Final[tuple[BoardOrder, ...]] = get_args(BoardOrder)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardQuery:
    """Which rows of which board are asked for."""

    kind: BoardKind = "node"
    order: BoardOrder = "rank"
    reverse: bool = False
    """Numbers go from the largest down, ranks and names from the first up; this turns it round."""
    search: str = ""
    """Somewhere in the name, whatever the case of its letters; or the start of a node's id."""
    team: str = ""
    """Nodes that are in the team of this name alone."""
    after: int = 0
    """Rows that are passed over."""
    limit: int = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkKinds:
    """What kinds of work a node's credit is for, and what else it did."""

    trained_rollouts: int = 0
    trained_tokens: int = 0
    evaluated_rollouts: int = 0
    others_checked: int = 0
    """Rollouts of others that it has computed again: counted, and no credit."""
    others_checked_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One node's or team's work that counted: was trained on or evaluated."""

    kind: BoardKind
    rank: int
    """From 1, by rollouts, among all of its kind."""
    node: str = ""
    """The start of a node's id: enough to tell it from others. Of a team it is empty."""
    name: str
    team: str = ""
    """That the node is in now."""
    members: int = 0
    """Of a team."""
    rollouts: int
    tokens: int
    """Of these, those of others' rollouts that it has drawn a part of among them."""
    share: float
    """Of all rollouts that counted."""
    recent: float
    """Tokens a day of late: see `echo_hub.store.recent_average`."""
    steps: int
    """That it took part in."""
    streak_days: int
    """Days in a row up to today or yesterday; 0 = the last one has ended."""
    longest_streak: int
    first_day: int | None
    """None: nothing has counted in this run."""
    last_day: int | None
    elsewhere_rollouts: int = 0
    """In runs of other hubs, by their signed exports."""
    elsewhere_tokens: int = 0
    last_seen: float = 0.0
    """Of a node; 0 = it was never here."""
    work: WorkKinds = field(default=WorkKinds(), metadata=FLAT)
    """Of a node."""

    @property
    def all_rollouts(self) -> int:
        """Over all runs that this hub knows of."""
        return self.rollouts + self.elsewhere_rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Some rows of a board."""

    rows: tuple[Standing, ...]
    num_found: int
    """Rows that fit what was asked for."""
    num_ranked: int
    """All of the board."""
    has_elsewhere: bool = False
    """Other hubs' exports are in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditDay:
    """What counted on one day."""

    day: int
    rollouts: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunElsewhere:
    """One run of another hub whose signed export was taken in."""

    run_id: str
    run_name: str
    rollouts: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One node or team in full."""

    standing: Standing
    days: tuple[CreditDay, ...]
    """On which something counted, in order; of very many the newest."""
    elsewhere: tuple[RunElsewhere, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShare:
    """A holder's part in some consecutive steps."""

    rollouts: int
    share: float
    """Of the tokens that these steps were trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicReceipt:
    """What became of one rollout, as its own node is told it."""

    rollout_id: str
    state: str
    """A `ReceiptState` value."""
    drop_reason: str | None
    checked: str
    """A `Checked` value."""
    node: str
    """The start of the id of the node that it was leased to."""
    name: str
    policy_version: int
    step: int | None
    """Whose batch its group is in."""
    num_tokens: int | None
    leased_at: float
    received_at: float | None
    scored_at: float | None
    final_at: float | None
