"""The operator's event log, /log: events by kind, severity and subject, newest first.

As JSON: /api/v1/log, with the same query. Event texts may contain texts from nodes, so they are escaped and shown on
one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Final
from urllib.parse import urlencode

import jinja2
from aiohttp import web

from echo_hub.dashboard.responses import html_response, json_response, whole_number
from echo_hub.dashboard.source import PagesSource
from echo_hub.dashboard.templating import Template
from echo_shared.records.run import EventFilter, Severity

ROWS_SHOWN: Final = 100
MOST_ROWS: Final = 1_000
MAX_TEXT: Final = 64
SEVERITIES: Final = tuple(severity.value for severity in Severity)


class WrongLogQueryError(ValueError):
    """An invalid query value, described for the page."""


def event_filter_of(query: Mapping[str, str]) -> EventFilter:
    """Parse the query of an address or a command. Empty values mean no condition. Raises WrongLogQueryError."""
    given = {name: query.get(name, "").strip() for name in ("kind", "severity", "subject", "before")}
    for name in ("kind", "subject"):
        if len(given[name]) > MAX_TEXT or "\0" in given[name]:  # PostgreSQL rejects NUL in texts.
            raise WrongLogQueryError(f"{name} must be at most {MAX_TEXT} characters, without NUL")
    if given["severity"] and given["severity"] not in SEVERITIES:
        raise WrongLogQueryError(f"severity must be one of: {', '.join(SEVERITIES)}")
    before = whole_number(given["before"]) if given["before"] else None
    if given["before"] and before is None:
        raise WrongLogQueryError("before must be an event's number: 1, 2, 3, ...")
    return EventFilter(kind=given["kind"], severity=given["severity"], subject=given["subject"], before=before)


class LogRoom:
    def __init__(self, source: PagesSource, templates: jinja2.Environment) -> None:
        self._source = source
        self._template = Template(templates, "log.html")

    @property
    def routes(self) -> list[web.AbstractRouteDef]:
        return [web.get("/log", self.serve), web.get("/api/v1/log", self.serve_json)]

    async def serve(self, request: web.Request) -> web.Response:
        """GET /log"""
        wanted, wrong = EventFilter(), ""
        try:
            wanted = event_filter_of(request.query)
        except WrongLogQueryError as error:
            wrong = str(error)
        events = () if wrong else await self._source.events(wanted, ROWS_SHOWN)
        query = {name: value for name, value in asdict(wanted).items() if value and name != "before"}
        older = urlencode({**query, "before": events[-1].number}) if len(events) == ROWS_SHOWN else ""
        text = self._template.render(
            room="events",
            wanted=wanted,
            wrong=wrong,
            events=events,
            severities=SEVERITIES,
            is_asked=bool(query),
            newest=f"/log?{urlencode(query)}".rstrip("?") if wanted.before is not None else "",
            older=f"/log?{older}" if older else "",
            as_json=f"/api/v1/log?{urlencode(query)}".rstrip("?"),
        )
        return html_response(text, status=400 if wrong else 200)

    async def serve_json(self, request: web.Request) -> web.Response:
        """GET /api/v1/log: {"events": [`RunEvent`, ...]}. For older events, request again with `before` = the last
        number, until an answer has fewer than `limit` events.
        """
        try:
            wanted = event_filter_of(request.query)
            limit = whole_number(request.query.get("limit", str(ROWS_SHOWN)))
            if limit is None or not 1 <= limit <= MOST_ROWS:
                raise WrongLogQueryError(f"limit must be 1 to {MOST_ROWS}")
        except WrongLogQueryError as error:
            return json_response({"error": str(error)}, status=400)
        return json_response({"events": await self._source.events(wanted, limit)})
