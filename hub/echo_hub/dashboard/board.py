"""What the public pages ask for of credit, and how a reader's address says which rows are wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from echo_hub.dashboard import tables
from echo_hub.dashboard.responses import whole_number
from echo_shared.credit_books import (
    BOARD_ORDERS,
    Board,
    BoardKind,
    BoardOrder,
    BoardQuery,
    Holder,
    PublicReceipt,
    StepShare,
)

ROWS_SHOWN: Final = 100
MOST_SEARCHED: Final = 64
"""Characters of what is searched for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AboutView:
    """What the run is for, in its operator's words: not a stranger's, and text all the same."""

    description: str = ""
    contact: str = ""
    consent: str = ""
    links: Mapping[str, str] = field(default_factory=dict)
    """Addresses (http and https alone) by title."""
    needs_token: bool = False
    token_from: str = ""
    """Whom to ask for a token, where one is needed."""

    @property
    def asks(self) -> str:
        return self.token_from or self.contact


class BoardSource(Protocol):
    """What the hub supplies. Answers may be some seconds old, so that many readers cost no more than one."""

    async def board(self, wanted: BoardQuery) -> Board: ...

    async def node(self, start: str) -> tuple[str, Holder] | None:
        """The holder and what is known of it; None where nothing of such a node has counted."""
        ...

    async def team(self, name: str) -> tuple[str, Holder] | None: ...

    async def shares(self, holder: str, width: int) -> Mapping[int, StepShare]:
        """A holder's part in each `width` consecutive steps, by their number from 0."""
        ...

    async def receipt(self, rollout_id: str) -> PublicReceipt | None:
        """None: no rollout of this id was ever leased."""
        ...


def board_query(query: Mapping[str, str], *, kind: BoardKind, rows: int = ROWS_SHOWN, team: str = "") -> BoardQuery:
    """What an address asks for; what makes no sense there is as if it were not there."""
    asked = query.get("sort", "")
    order: BoardOrder = next((known for known in BOARD_ORDERS if known == asked.removeprefix("-")), "rank")
    return BoardQuery(
        kind=kind,
        order=order,
        reverse=asked == f"-{order}",
        search=" ".join(query.get("q", "").replace("\0", " ").split())[:MOST_SEARCHED],
        team=team,
        after=whole_number(query.get("after", "0")) or 0,
        limit=rows,
    )


def sort_of(wanted: BoardQuery) -> str:
    """As it stands in an address."""
    return f"{'-' if wanted.reverse else ''}{wanted.order}"


def page_links(wanted: BoardQuery, board: Board) -> tuple[str, str]:
    """Addresses of the page before this one and of the one behind it; empty where there is none."""
    asked = {"sort": sort_of(wanted), **({"q": wanted.search} if wanted.search else {})}
    return tables.page_links(
        asked, after=wanted.after, limit=wanted.limit, shown=len(board.rows), found=board.num_found
    )
