"""Public pages of single nodes and teams, `/nodes/ID` and `/teams/NAME`: history, effect of the work, and a picture to
share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

import jinja2
from aiohttp import web

from echo_hub.dashboard.access.guard import Guard
from echo_hub.dashboard.address import addressed
from echo_hub.dashboard.board import BoardSource
from echo_hub.dashboard.curves import CurvesRoom
from echo_hub.dashboard.milestones import milestones
from echo_hub.dashboard.picture_room import DrawnPicture, Pictures
from echo_hub.dashboard.responses import html_response, json_response
from echo_hub.dashboard.share_picture import SharePicture
from echo_hub.dashboard.snapshots import Snapshots
from echo_hub.dashboard.templating import Template
from echo_hub.dashboard.work_curve import WorkCurve, work_curve
from echo_shared.records.credit import Board, BoardKind, BoardQuery, CreditStanding, Holder

MEMBERS_SHOWN: Final = 100
_IDS: Final = frozenset("0123456789abcdefghijklmnopqrstuvwxyz")


class HolderPages:
    def __init__(
        self,
        snapshots: Snapshots,
        board: BoardSource,
        curves: CurvesRoom,
        guard: Guard,
        templates: jinja2.Environment,
    ) -> None:
        self._snapshots = snapshots
        self._board = board
        self._curves = curves
        self._guard = guard
        self._template = Template(templates, "holder.html")
        self._missing = Template(templates, "holder_missing.html")
        self._pictures = Pictures()

    @property
    def routes(self) -> list[web.AbstractRouteDef]:
        return [
            web.get("/nodes/{node}", self.serve),
            web.get("/teams/{team}", self.serve),
            web.get("/nodes/{node}/picture.png", self.serve_picture),
            web.get("/teams/{team}/picture.png", self.serve_picture),
            web.get("/api/v1/leaderboard/nodes/{node}", self.serve_json),
            web.get("/api/v1/leaderboard/teams/{team}", self.serve_json),
        ]

    async def serve(self, request: web.Request) -> web.Response:
        """GET /nodes/{node}, GET /teams/{team}"""
        kind = _kind_of(request.match_info)
        snapshot, found = await self._snapshots.get(), await self._find(request.match_info)
        address = self._guard.visits.address(request) or snapshot.run.address
        about = {"room": "leaderboard", "kind": kind, "run": addressed(snapshot.run, address), "address": address}
        if found is None:
            return html_response(self._missing.render(about), status=404)
        holder_id, holder = found
        standing = holder.standing
        members = await self._members(standing.name) if kind == "team" else None
        text = self._template.render(
            about,
            holder=holder,
            standing=standing,
            fleet_id=holder_id if kind == "node" and self._guard.is_operator(request) else "",
            path=_path(kind, standing.node or standing.name),
            members=members,
            num_ranked=(await self._board.board(BoardQuery(kind=kind, limit=1))).num_ranked,
            milestones=milestones(standing, holder.days),
            curve=await self._curve(holder_id),
            most_tokens=max((day.tokens for day in holder.days), default=1) or 1,
        )
        return html_response(text)

    async def serve_picture(self, request: web.Request) -> web.Response:
        """GET /nodes/{node}/picture.png, GET /teams/{team}/picture.png"""
        found = await self._find(request.match_info)
        if found is None:
            raise web.HTTPNotFound(text="No work of this node or team has counted yet.\n")
        holder_id, holder = found
        drawn = self._pictures.find(holder_id)
        if drawn is None:
            async with self._pictures.turn():
                drawn = self._pictures.find(holder_id) or await self._drawn(holder_id, holder.standing)
        return drawn.answer(request)

    async def _drawn(self, holder_id: str, standing: CreditStanding) -> DrawnPicture:
        picture = SharePicture(
            run_name=(await self._snapshots.get()).run.name,
            standing=standing,
            num_ranked=(await self._board.board(BoardQuery(kind=standing.kind, limit=1))).num_ranked,
            curve=await self._curve(holder_id),
        )
        return await self._pictures.draw(holder_id, picture)

    async def serve_json(self, request: web.Request) -> web.Response:
        """GET /api/v1/leaderboard/nodes/{node}, GET /api/v1/leaderboard/teams/{team}: a `Holder` and its `WorkCurve`"""
        found = await self._find(request.match_info)
        if found is None:
            return json_response({"error": "no work of this node or team has counted yet"}, status=404)
        holder_id, holder = found
        return json_response(
            {
                "standing": holder.standing,
                "days": holder.days,
                "elsewhere": holder.elsewhere,
                "curve": await self._curve(holder_id),
            }
        )

    async def _find(self, asked: Mapping[str, str]) -> tuple[str, Holder] | None:
        if "team" in asked:
            return await self._board.team(asked["team"][:160])
        node = asked["node"][:64]
        return await self._board.node(node[:10]) if node and set(node) <= _IDS else None

    async def _curve(self, holder_id: str) -> WorkCurve:
        curves = await self._curves.newest()
        return work_curve(curves.width, curves.after(0), await self._board.shares(holder_id, curves.width))

    async def _members(self, team: str) -> Board:
        return await self._board.board(BoardQuery(team=team, limit=MEMBERS_SHOWN))


def _kind_of(asked: Mapping[str, str]) -> BoardKind:
    return "team" if "team" in asked else "node"


def _path(kind: BoardKind, name: str) -> str:
    return f"/{kind}s/{quote(name, safe='')}"
