"""The operator's page of tenants, /tenants: the use, quota and failed requests of each tenant.

As JSON: /api/v1/tenants. Names and error texts are untrusted: they are escaped, and invisible characters are shown.
"""

from __future__ import annotations

from typing import Protocol

import jinja2
from aiohttp import web

from echo_hub.dashboard.responses import html_response, json_response
from echo_hub.dashboard.templating import Template
from echo_shared.records.tenant import TenantsOverview


class TenantsSource(Protocol):
    """Supplies the tenants' figures: `echo_hub.serving.tenant_pages`."""

    async def overview(self) -> TenantsOverview: ...


class TenantsPage:
    def __init__(self, source: TenantsSource, templates: jinja2.Environment) -> None:
        self._source = source
        self._template = Template(templates, "tenants.html")

    @property
    def routes(self) -> list[web.AbstractRouteDef]:
        return [web.get("/tenants", self.serve), web.get("/api/v1/tenants", self.serve_json)]

    async def serve(self, request: web.Request) -> web.Response:
        """GET /tenants"""
        return html_response(self._template.render(room="tenants", now=await self._source.overview()))

    async def serve_json(self, request: web.Request) -> web.Response:
        """GET /api/v1/tenants: a `TenantsOverview`"""
        return json_response(await self._source.overview())
