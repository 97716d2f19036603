"""Two small public pages: `/about` describes the run and how to join; `/receipts` shows one rollout's outcome."""

from __future__ import annotations

import re
from typing import Final

import jinja2
from aiohttp import web

from echo_hub.dashboard.access.guard import Visits
from echo_hub.dashboard.address import addressed
from echo_hub.dashboard.board import AboutView, BoardSource
from echo_hub.dashboard.responses import html_response, json_response
from echo_hub.dashboard.snapshots import Snapshots
from echo_hub.dashboard.templating import Template

_ROLLOUT: Final = re.compile(r"[0-9]{1,19}-[0-9]{1,9}")

WHAT_IT_MEANS: Final = {
    "leased": "The node is sampling this rollout.",
    "received": "The hub has received this rollout and will score it.",
    "scored": "This rollout has its reward and waits for a training step.",
    "trained": "The model was trained on this rollout: it counts.",
    "evaluated": "This rollout was used to measure a version: it counts.",
    "answered": "This rollout was delivered to a tenant who had asked for it: it counts.",
    "dropped": "This rollout could not be used. It does not count.",
    "quarantined": "The node was quarantined before a step used this rollout, so it does not count. A pardon of the "
    "node does not change that: the node samples new work.",
    "forged": "The hub recomputed this rollout: the named version does not produce it. It does not count.",
}
"""Explanation of each `ReceiptState` for readers. A dropped rollout's explanation comes from its `DropReason` if that
tells more."""


class PublicRooms:
    def __init__(
        self,
        snapshots: Snapshots,
        board: BoardSource,
        visits: Visits,
        templates: jinja2.Environment,
        *,
        about: AboutView,
    ) -> None:
        self._snapshots = snapshots
        self._board = board
        self._visits = visits
        self._about = about
        self._about_page = Template(templates, "about.html")
        self._receipt_page = Template(templates, "receipt.html")

    @property
    def routes(self) -> list[web.AbstractRouteDef]:
        return [
            web.get("/about", self.serve_about),
            web.get("/receipts", self.serve_receipt),
            web.get("/api/v1/receipts/{rollout}", self.serve_receipt_json),
        ]

    async def serve_about(self, request: web.Request) -> web.Response:
        """GET /about"""
        run = (await self._snapshots.get()).run
        address = self._visits.address(request)
        text = self._about_page.render(
            room="about", run=addressed(run, address), address=address or run.address, about=self._about
        )
        return html_response(text)

    async def serve_receipt(self, request: web.Request) -> web.Response:
        """GET /receipts?id=LEASE-INDEX"""
        asked = request.query.get("id", "").strip()
        run = (await self._snapshots.get()).run
        is_id = _ROLLOUT.fullmatch(asked) is not None
        found = await self._board.receipt(asked) if is_id else None
        text = self._receipt_page.render(
            room="leaderboard",
            run=run,
            asked=asked[:48],
            is_id=is_id,
            found=found,
            meaning=WHAT_IT_MEANS.get(found.drop_reason or "", WHAT_IT_MEANS.get(found.state, "")) if found else "",
        )
        return html_response(text, status=404 if asked and found is None else 200)

    async def serve_receipt_json(self, request: web.Request) -> web.Response:
        """GET /api/v1/receipts/{rollout}: a `PublicReceipt`"""
        asked = request.match_info["rollout"]
        found = await self._board.receipt(asked) if _ROLLOUT.fullmatch(asked) else None
        if found is None:
            return json_response({"error": "no rollout of this id was ever leased"}, status=404)
        return json_response(found)
