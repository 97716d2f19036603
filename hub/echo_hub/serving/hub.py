"""One hub: its port, the driver of the coordinator, and five services.

The way of a rollout: websocket (`net.gateway`) → `intake.connected` → event queue → `driving.driver` → coordinator,
whose records the driver commits → `intake` scores it → event queue → `training` sends its group to the learner →
`distribution` publishes the version. `serving.services` decides which service carries out which action.
"""

from __future__ import annotations

import asyncio

from echo_hub.config.sections import HubConfig
from echo_hub.core.coordinator import Coordinator
from echo_hub.dashboard.access.guard import Guard
from echo_hub.dashboard.books_away import books_away
from echo_hub.dashboard.headers import add_security_headers
from echo_hub.distribution.publishing import Publishing
from echo_hub.driving.progress import RunProgress
from echo_hub.driving.resources import Resources
from echo_hub.driving.shared import Shared
from echo_hub.gateways.connections import Connections
from echo_hub.intake.connected import ConnectedNodes
from echo_hub.intake.partials import Partials
from echo_hub.net.joining import join_command
from echo_hub.net.live_nodes import LiveNodes
from echo_hub.net.server import Server
from echo_hub.oversight.operating import Operation
from echo_hub.run.directory import RunDirectory
from echo_hub.serving.http_routes import http_routes
from echo_hub.serving.services import HubServices
from echo_hub.talking.trying import Trials
from echo_hub.tenants.service import TenantService
from echo_hub.views.pages_source import HubPages


class Hub:
    """One hub. `echo_hub.serving.opening` creates it in its event loop. Call `open` to open its port, then `serve`.
    When the run is over, `progress.finished` is set."""

    def __init__(self, resources: Resources, partials: Partials) -> None:
        self.server = Server(resources.config.server)
        self.connections = Connections(
            resources.config, resources.me, run_id=resources.run_id, limits=self.server.limits
        )
        self._shared = Shared.of(resources, self.connections)
        self._services = HubServices(self._shared, partials=partials, server=self.server)
        self._resources = resources
        self.trials = Trials(resources.config, resources.directory, resources.codec, resources.learner.base_dir)

    async def open(self) -> None:
        """Open the port. Raises ConfigError if the port or the gateways' broker cannot be used."""
        await self._services.open()
        await self.connections.fleet.open()
        routes = http_routes(self._shared, self._services, self.trials)
        await self.server.open(routes, guards=[books_away, self.guard.middleware], dress=add_security_headers)

    async def serve(self) -> None:
        """Serve until cancelled. Raises fatal errors, such as a disk that fails or a learner process that keeps dying.

        While the disk is full, or while the database server does not answer, the hub waits.
        """
        self.operation.began()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._shared.driver.run(self._services))
                tasks.create_task(self._services.run())
        except Exception as error:
            self.operation.failed(error)
            raise
        finally:
            self._resources.store.give_up()
            await self._services.intake.close(*self.progress.farewell())
            await self.operation.ended()

    async def close(self) -> None:
        """Stop the child processes that outlive `serve`."""
        await self._services.close()

    @property
    def tenants(self) -> TenantService | None:
        """The tenants' service; None if the hub serves none."""
        return self._services.tenants

    @property
    def config(self) -> HubConfig:
        return self._resources.config

    @property
    def directory(self) -> RunDirectory:
        return self._resources.directory

    @property
    def run_id(self) -> str:
        return self._resources.run_id

    @property
    def key(self) -> bytes:
        return self._resources.me.public_key

    @property
    def coordinator(self) -> Coordinator:
        return self._resources.coordinator

    @property
    def progress(self) -> RunProgress:
        return self._shared.progress

    @property
    def nodes(self) -> ConnectedNodes:
        return self._services.intake.nodes

    @property
    def live(self) -> LiveNodes:
        return self._shared.live

    @property
    def partials(self) -> Partials:
        return self._services.intake.partials

    @property
    def publishing(self) -> Publishing:
        return self._services.distribution.publishing

    @property
    def pages(self) -> HubPages:
        return self._services.oversight.pages

    @property
    def operation(self) -> Operation:
        return self._services.oversight.operation

    @property
    def guard(self) -> Guard:
        return self._services.oversight.guard

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def dashboard_url(self) -> str:
        """URL of the dashboard. If no password is set, the URL contains the token, which logs the operator in."""
        credentials = self.guard.credentials
        return f"{self.url}/" if credentials.has_password else f"{self.url}/?token={credentials.token}"

    @property
    def join_command(self) -> str:
        return join_command(self.config, self.server)

    @property
    def tenant_urls(self) -> str:
        """Base URLs of the tenants' interfaces that are on, separated by commas."""
        on = {"/tinker": self.config.tinker.enabled, "/v1": self.config.openai.enabled}
        return ", ".join(f"{self.url}{path}" for path, enabled in on.items() if enabled)
