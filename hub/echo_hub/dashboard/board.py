"""The interface from which the public pages get credit data (which work of nodes and teams counted), and the parsing of
leaderboard queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from echo_hub.dashboard import tables
from echo_hub.dashboard.responses import whole_number
from echo_shared.records.credit import (
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
"""Longest search text of a leaderboard query, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AboutView:
    """The operator's description of the run. The texts are not escaped: the pages must escape them."""

    description: str = ""
    contact: str = ""
    consent: str = ""
    links: Mapping[str, str] = field(default_factory=dict)
    """Links by title; http and https only."""
    needs_token: bool = False
    """True if a node needs an invite token to join."""


class BoardSource(Protocol):
    """Supplies the credit data that the pages request; the hub implements it. Answers may be cached for seconds, so
    that a thousand readers cost the hub one query."""

    async def board(self, wanted: BoardQuery) -> Board: ...

    async def node(self, start: str) -> tuple[str, Holder] | None:
        """Return the id and credit of the node whose id has this prefix; None if no work of such a node was
        credited."""
        ...

    async def team(self, name: str) -> tuple[str, Holder] | None: ...

    async def shares(self, holder: str, width: int) -> Mapping[int, StepShare]:
        """Return a holder's (node's or team's) share of the work, for each bucket of `width` steps. The key is the
        bucket's number, from 0."""
        ...

    async def receipt(self, rollout_id: str) -> PublicReceipt | None:
        """Return a rollout's receipt; None if no rollout with this id was ever leased."""
        ...


def board_query(query: Mapping[str, str], *, kind: BoardKind, rows: int = ROWS_SHOWN) -> BoardQuery:
    """Parse the query of a leaderboard's address. Invalid values are replaced by defaults."""
    asked = query.get("sort", "")
    order: BoardOrder = next((known for known in BOARD_ORDERS if known == asked.removeprefix("-")), "rank")
    return BoardQuery(
        kind=kind,
        order=order,
        reverse=asked == f"-{order}",
        search=" ".join(query.get("q", "").replace("\0", " ").split())[:MOST_SEARCHED],
        after=whole_number(query.get("after", "0")) or 0,
        limit=rows,
    )


def sort_of(wanted: BoardQuery) -> str:
    """Return the value of `sort` in the page address for the order of `wanted`."""
    return f"{'-' if wanted.reverse else ''}{wanted.order}"


def page_links(wanted: BoardQuery, board: Board) -> tuple[str, str]:
    asked = {"sort": sort_of(wanted), **({"q": wanted.search} if wanted.search else {})}
    return tables.page_links(
        asked, after=wanted.after, limit=wanted.limit, shown=len(board.rows), found=board.num_found
    )
