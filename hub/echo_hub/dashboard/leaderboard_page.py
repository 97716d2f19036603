"""The public room, `/leaderboard`: whose machines taught the model, and how to lend another.

`?node=ID` puts that node's standing on top: the address that a volunteer shares.
"""

from __future__ import annotations

from typing import Final

import jinja2
from aiohttp import web

from echo_hub.dashboard.model import LeaderboardRow
from echo_hub.dashboard.responses import html_response
from echo_hub.dashboard.snapshots import Snapshot, Snapshots
from echo_hub.dashboard.tables import Column, headings, known_sort, sort_rows

ROWS_SHOWN: Final = 500

COLUMNS: Final[tuple[Column[LeaderboardRow], ...]] = (
    Column(key="rank", title="Rank", order=lambda row: row.rank, css="number"),
    Column(key="name", title="Node", order=lambda row: (row.totals.name.casefold(), row.totals.node_id)),
    Column(
        key="rollouts", title="Rollouts", order=lambda row: row.totals.trained_rollouts, descending=True, css="number"
    ),
    Column(key="tokens", title="Tokens", order=lambda row: row.totals.trained_tokens, descending=True, css="number"),
    Column(
        key="evaluated",
        title="Evaluated",
        order=lambda row: row.totals.evaluated_rollouts,
        descending=True,
        css="number wide",
    ),
    Column(key="share", title="Share", order=lambda row: row.totals.share, descending=True, css="number"),
    Column(key="seen", title="Last seen", order=lambda row: row.totals.last_seen, descending=True, css="number wide"),
)


class LeaderboardPage:
    def __init__(self, snapshots: Snapshots, templates: jinja2.Environment) -> None:
        self._snapshots = snapshots
        self._template = templates.get_template("leaderboard.html")

    async def serve(self, request: web.Request) -> web.Response:
        """GET /leaderboard"""
        snapshot = await self._snapshots.get()
        sort = known_sort(COLUMNS, request.query.get("sort", "")) or "rank"
        mine = next((row for row in snapshot.leaderboard if row.totals.node_id == request.query.get("node")), None)
        key = ("leaderboard", sort, mine.totals.node_id if mine else "")
        return html_response(snapshot.rendered(key, lambda: self._render(snapshot, sort, mine)))

    def _render(self, snapshot: Snapshot, sort: str, mine: LeaderboardRow | None) -> str:
        rows = snapshot.leaderboard
        return self._template.render(
            room="leaderboard",
            run=snapshot.run,
            rows=sort_rows(rows, COLUMNS, sort)[:ROWS_SHOWN],
            num_rows=len(rows),
            mine=mine,
            headings=headings(COLUMNS, sort, kept={"node": mine.totals.node_id} if mine else {}, anchor="table"),
            total_rollouts=sum(row.totals.trained_rollouts for row in rows),
            total_tokens=sum(row.totals.trained_tokens for row in rows),
            largest_share=max((row.totals.share for row in rows), default=0.0),
        )
