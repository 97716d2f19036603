"""The operator's fleet page, `/fleet`: nodes by state, standing and work, on several pages.

Only the first page of a filter is updated live. Searches and later pages are static, because clients can request any
number of different searches and pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jinja2
from aiohttp import web

from echo_hub.dashboard.fleet import (
    FASTEST,
    STANDINGS,
    STATES,
    FleetQuery,
    WrongFleetQueryError,
    columns,
    find_nodes,
    fleet_query,
    kinds,
    page_links,
)
from echo_hub.dashboard.live import LivePages, LiveRequest
from echo_hub.dashboard.responses import html_response
from echo_hub.dashboard.snapshots import Snapshot, Snapshots
from echo_hub.dashboard.tables import headings
from echo_hub.dashboard.templating import Template


class FleetPage:
    def __init__(self, live: LivePages, snapshots: Snapshots, templates: jinja2.Environment) -> None:
        self._live = live
        self._snapshots = snapshots
        self._template = Template(templates, "fleet.html")

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """GET /fleet?q=SEARCH&state=S&standing=S&engine=E&precision=P&sort=KEY&after=NODES"""
        try:
            asked = fleet_query(request.query)
        except WrongFleetQueryError as error:
            text = self._render(await self._snapshots.get(), FleetQuery(sort=FASTEST), wrong=str(error))
            return html_response(text, status=400)
        wanted = replace(asked, sort=asked.sort or FASTEST)
        if wanted.search or wanted.after:
            return html_response(await asyncio.to_thread(self._render, await self._snapshots.get(), wanted))

        async def prepare(snapshot: Snapshot) -> Callable[[], str]:
            return partial(self._render, snapshot, wanted)

        key = ("fleet", *(f"{name}={value}" for name, value in wanted.asked.items()))
        return await self._live.answer(request, LiveRequest(key=key, prepare=prepare))

    def _render(self, snapshot: Snapshot, wanted: FleetQuery, *, wrong: str = "") -> str:
        part, all_kinds = find_nodes(snapshot.nodes, wanted), kinds(snapshot.nodes)
        before, behind = page_links(wanted, part)
        shown = columns(has_costs=all_kinds.has_costs)
        kept = {name: value for name, value in wanted.asked.items() if name != "sort"}
        return self._template.render(
            room="nodes",
            run=snapshot.run,
            part=part,
            kinds=all_kinds,
            num_known=max(all_kinds.number, snapshot.run.nodes_known),
            wanted=wanted,
            wrong=wrong,
            before=before,
            behind=behind,
            columns=[column.key for column in shown],
            headings=headings(shown, wanted.sort, kept=kept, anchor="table"),
            states=STATES,
            standings=STANDINGS,
        )
