"""The public room, `/leaderboard`: whose machines taught the model, and how to lend another.

`?node=ID` puts that node's standing on top: the address that a volunteer shares. Of ids a start is enough, and nothing
more of them is shown here.
"""

from __future__ import annotations

from typing import Final

import jinja2
from aiohttp import web

from echo_hub.dashboard.live import LivePages, Look
from echo_hub.dashboard.model import LeaderboardRow, public_id
from echo_hub.dashboard.snapshots import Snapshot, Snapshots
from echo_hub.dashboard.tables import Column, headings, known_sort, sort_rows

ROWS_SHOWN: Final = 500

COLUMNS: Final[tuple[Column[LeaderboardRow], ...]] = (
    Column(key="rank", title="Rank", order=lambda row: row.rank, css="number"),
    Column(key="name", title="Node", order=lambda row: (row.name.casefold(), row.node)),
    Column(key="rollouts", title="Rollouts", order=lambda row: row.trained_rollouts, descending=True, css="number"),
    Column(key="tokens", title="Tokens", order=lambda row: row.trained_tokens, descending=True, css="number"),
    Column(
        key="evaluated",
        title="Evaluated",
        order=lambda row: row.evaluated_rollouts,
        descending=True,
        css="number wide",
    ),
    Column(key="share", title="Share", order=lambda row: row.share, descending=True, css="number"),
    Column(key="seen", title="Last seen", order=lambda row: row.last_seen, descending=True, css="number wide"),
)


class LeaderboardPage:
    def __init__(self, live: LivePages, snapshots: Snapshots, templates: jinja2.Environment) -> None:
        self._live = live
        self._snapshots = snapshots
        self._template = templates.get_template("leaderboard.html")

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """GET /leaderboard"""
        sort = known_sort(COLUMNS, request.query.get("sort", "")) or "rank"
        wanted = public_id(request.query.get("node", ""))
        known = {row.node for row in (await self._snapshots.get()).leaderboard}
        node = wanted if wanted in known else ""  # Ids that anybody makes up are one page, not many to render.

        async def render(snapshot: Snapshot) -> str:
            return self._render(snapshot, sort, node)

        return await self._live.answer(request, Look(key=("leaderboard", sort, node), render=render))

    def _render(self, snapshot: Snapshot, sort: str, node: str) -> str:
        rows = snapshot.leaderboard
        mine = next((row for row in rows if row.node == node), None)
        return self._template.render(
            room="leaderboard",
            run=snapshot.run,
            rows=sort_rows(rows, COLUMNS, sort)[:ROWS_SHOWN],
            num_rows=max(len(rows), snapshot.run.nodes_useful),
            mine=mine,
            headings=headings(COLUMNS, sort, kept={"node": mine.node} if mine else {}, anchor="table"),
            total_rollouts=snapshot.run.accounting.trained,
            largest_share=max((row.share for row in rows), default=0.0),
        )
