"""The public leaderboards: `/leaderboard` of nodes and `/teams`, with instructions for lending a machine.

The database sorts, searches and returns one page of `ROWS_SHOWN` rows, for any number of nodes. Only a prefix of each
node's id is shown.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import Final

import jinja2
from aiohttp import web

from echo_hub.dashboard.access.guard import Visits
from echo_hub.dashboard.board import AboutView, BoardSource, board_query, page_links, sort_of
from echo_hub.dashboard.live import LivePages, LiveRequest
from echo_hub.dashboard.responses import (
    html_response,
    json_response,
    large_json_response,
    see_other,
    whole_number,
)
from echo_hub.dashboard.snapshots import Snapshot, Snapshots
from echo_hub.dashboard.tables import Column, headings
from echo_hub.dashboard.templating import Template
from echo_shared.records.credit import Board, BoardKind, BoardQuery, CreditStanding

ROWS_PER_ANSWER: Final = 1_000
"""Largest number of rows in one JSON answer."""
_NODE: Final = re.compile(r"[0-9a-z]{1,64}")

_RANK: Final[Column[CreditStanding]] = Column(key="rank", title="Rank", order=lambda row: row.rank, css="number")
_ROLLOUTS: Final[Column[CreditStanding]] = Column(
    key="rollouts", title="Rollouts", order=lambda row: row.rollouts, descending=True, css="number"
)
_TOKENS: Final[Column[CreditStanding]] = Column(
    key="tokens", title="Tokens", order=lambda row: row.tokens, descending=True, css="number wide"
)
_RECENT: Final[Column[CreditStanding]] = Column(
    key="recent", title="Tokens a day", order=lambda row: row.recent, descending=True, css="number"
)
_STREAK: Final[Column[CreditStanding]] = Column(
    key="streak", title="Streak", order=lambda row: row.streak_days, descending=True, css="number wide"
)
_ELSEWHERE: Final[Column[CreditStanding]] = Column(
    key="elsewhere", title="All runs", order=lambda row: row.all_rollouts, descending=True, css="number wide"
)
_SEEN: Final[Column[CreditStanding]] = Column(
    key="seen", title="Last seen", order=lambda row: row.last_seen, descending=True, css="number wide"
)


def columns(kind: BoardKind, *, has_elsewhere: bool = False) -> tuple[Column[CreditStanding], ...]:
    """Return a leaderboard's columns. The column "All runs" is included only if the hub knows credit from other
    runs."""
    title = "Team" if kind == "team" else "Node"
    name: Column[CreditStanding] = Column(key="name", title=title, order=lambda row: (row.name.casefold(), row.node))
    if kind == "team":
        return (_RANK, name, _ROLLOUTS, _TOKENS, _RECENT, _STREAK)
    elsewhere = (_ELSEWHERE,) if has_elsewhere else ()
    return (_RANK, name, _ROLLOUTS, _TOKENS, _RECENT, _STREAK, *elsewhere, _SEEN)


class LeaderboardPage:
    def __init__(
        self,
        live: LivePages,
        snapshots: Snapshots,
        board: BoardSource,
        visits: Visits,
        templates: jinja2.Environment,
        *,
        about: AboutView,
    ) -> None:
        self._live = live
        self._snapshots = snapshots
        self._board = board
        self._visits = visits
        self._about = about
        self._template = Template(templates, "leaderboard.html")

    @property
    def routes(self) -> list[web.AbstractRouteDef]:
        return [
            web.get("/leaderboard", self.serve),
            web.get("/teams", self.serve_teams),
            web.get("/api/v1/leaderboard", self.serve_json),
            web.get("/api/v1/teams", self.serve_teams_json),
        ]

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """GET /leaderboard?sort=KEY&q=SEARCH&after=ROWS; with node=ID it redirects to that node's page."""
        if _NODE.fullmatch(node := request.query.get("node", "")):
            return see_other(f"/nodes/{node[:10]}")
        return await self._serve(request, "node")

    async def serve_teams(self, request: web.Request) -> web.StreamResponse:
        """GET /teams"""
        return await self._serve(request, "team")

    async def _serve(self, request: web.Request, kind: BoardKind) -> web.StreamResponse:
        """Answer with the leaderboard. Only its first page is updated live, because clients can request any number of
        searches and later pages.
        """
        wanted = board_query(request.query, kind=kind)
        snapshot = await self._snapshots.get()
        own, address = snapshot.run.address, self._visits.address(request)

        async def prepare(snapshot: Snapshot) -> Callable[[], str]:
            return partial(self._render, snapshot, await self._board.board(wanted), wanted)

        def personal(text: str) -> str:
            """Insert the hub's address, as this reader's request names it, into the page. The address comes from the
            Host header and has been checked: it contains only characters of host names."""
            return text.replace(own, address) if own and address else text

        if wanted.search or wanted.after:
            return html_response(personal(await asyncio.to_thread(await prepare(snapshot))))
        look = LiveRequest(key=("leaderboard", kind, sort_of(wanted)), prepare=prepare, personal=personal)
        return await self._live.answer(request, look)

    def _render(self, snapshot: Snapshot, board: Board, wanted: BoardQuery) -> str:
        before, behind = page_links(wanted, board)
        shown = columns(wanted.kind, has_elsewhere=board.has_elsewhere)
        return self._template.render(
            room="leaderboard",
            kind=wanted.kind,
            run=snapshot.run,
            address=snapshot.run.address,
            about=self._about,
            board=board,
            wanted=wanted,
            before=before,
            behind=behind,
            sort=sort_of(wanted),
            columns=[column.key for column in shown],
            headings=headings(
                shown, sort_of(wanted), kept={"q": wanted.search} if wanted.search else {}, anchor="table"
            ),
            total_rollouts=snapshot.run.accounting.useful,
        )

    async def serve_json(self, request: web.Request) -> web.Response:
        """GET /api/v1/leaderboard?after=N&limit=M&sort=KEY&q=SEARCH: {"leaderboard": [`CreditStanding`, ...], "found":
        F}"""
        return await self._serve_json(request, "node", "leaderboard")

    async def serve_teams_json(self, request: web.Request) -> web.Response:
        """GET /api/v1/teams: {"teams": [`CreditStanding`, ...], "found": F}"""
        return await self._serve_json(request, "team", "teams")

    async def _serve_json(self, request: web.Request, kind: BoardKind, name: str) -> web.Response:
        after = whole_number(request.query.get("after", "0"))
        limit = whole_number(request.query.get("limit", str(ROWS_PER_ANSWER)))
        if after is None or not limit:
            return json_response({"error": "after must be a number of rows: 0, 1, 2, ...; limit 1, 2, ..."}, status=400)
        rows = min(limit, ROWS_PER_ANSWER)
        board = await self._board.board(board_query(request.query, kind=kind, rows=rows))
        return await large_json_response({name: board.rows, "found": board.num_found})
