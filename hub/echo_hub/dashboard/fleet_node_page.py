"""The operator's page of one node, `/fleet/ID`: the node's reports, history, trust standing and possible actions. As
JSON: /api/v1/nodes/ID. The public page of a node is `/nodes/ID`; it shows only credited work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import jinja2
from aiohttp import web

from echo_hub.dashboard.live import LivePages, LiveRequest
from echo_hub.dashboard.model import NodeView, public_id
from echo_hub.dashboard.responses import html_response, json_response
from echo_hub.dashboard.snapshots import Snapshot, Snapshots
from echo_hub.dashboard.source import PagesSource
from echo_hub.dashboard.templating import Template
from echo_shared.records.node import NodeRecord
from echo_shared.records.run import EventFilter

EVENTS_SHOWN: Final = 20
MOST_ID: Final = 64
_IN_JSON: Final = ("public_key", "outcomes", "shown", "decisions", "checked", "rollouts")
"""Fields of `NodeRecord` in the JSON answer, next to the node's view."""


class FleetNodePage:
    def __init__(
        self,
        source: PagesSource,
        live: LivePages,
        snapshots: Snapshots,
        templates: jinja2.Environment,
    ) -> None:
        self._source = source
        self._live = live
        self._snapshots = snapshots
        self._template = Template(templates, "fleet_node.html")
        self._missing = Template(templates, "fleet_missing.html")

    @property
    def routes(self) -> list[web.AbstractRouteDef]:
        return [web.get("/fleet/{node}", self.serve), web.get("/api/v1/nodes/{node}", self.serve_json)]

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """GET /fleet/{node}"""
        node_id = request.match_info["node"]
        if await self._record(node_id) is None:
            run = (await self._snapshots.get()).run
            text = self._missing.render(room="nodes", run=run, node_id=node_id)
            return html_response(text, status=404)

        async def prepare(snapshot: Snapshot) -> Callable[[], str]:
            record = await self._record(node_id)
            if record is None:
                raise web.HTTPNotFound
            events = await self._source.events(EventFilter(subject=node_id), EVENTS_SHOWN)
            return partial(
                self._template.render,
                room="nodes",
                run=snapshot.run,
                node=_view(snapshot, record),
                record=record,
                events=events,
                public_id=public_id(node_id),
            )

        return await self._live.answer(request, LiveRequest(key=("fleet node", node_id), prepare=prepare))

    async def serve_json(self, request: web.Request) -> web.Response:
        """GET /api/v1/nodes/{node}: {"node": `NodeView`, ...} with the other fields of `NodeRecord`."""
        record = await self._record(request.match_info["node"])
        if record is None:
            return json_response({"error": "there is no node of this id"}, status=404)
        view = _view(await self._snapshots.get(), record)
        return json_response({"node": view, **{name: getattr(record, name) for name in _IN_JSON}})

    async def _record(self, node_id: str) -> NodeRecord | None:
        is_possible = len(node_id) <= MOST_ID and "\0" not in node_id  # PostgreSQL rejects NUL characters in texts.
        return await self._source.node(node_id) if is_possible else None


def _view(snapshot: Snapshot, record: NodeRecord) -> NodeView:
    """Return the snapshot's view of the node. If the snapshot does not list the node, make a view from the node's
    totals in the database.
    """
    return snapshot.nodes.get(record.totals.node_id) or NodeView(
        totals=record.totals,
        connected=False,
        activity="",
        policy_version=None,
        capacity=0,
        in_flight=0,
        tokens_per_s=0.0,
        precision=record.totals.precision,
    )
