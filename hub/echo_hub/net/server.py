"""The hub's one port: nodes' websocket, tracker, web seed and pages behind one aiohttp application."""

from __future__ import annotations

import errno
from collections.abc import Iterable

from aiohttp import web

from echo_hub.config.sections import ServerConfig
from echo_shared.errors import ConfigError

SHUTDOWN_S = 3.0


class Server:
    """`port` is the real one, also when the settings say 0."""

    def __init__(self, settings: ServerConfig) -> None:
        self._settings = settings
        self.routes: tuple[web.AbstractRouteDef, ...] = ()
        """Once it is open."""
        self._runner: web.AppRunner | None = None
        self.port = settings.port

    async def open(self, routes: Iterable[web.AbstractRouteDef]) -> None:
        """Raises ConfigError when the port cannot be had."""
        self.routes = tuple(routes)
        application = web.Application()
        application.add_routes(self.routes)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._settings.host, self._settings.port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            in_use = error.errno == errno.EADDRINUSE
            raise ConfigError(
                "The hub's port is in use." if in_use else "The hub cannot listen on this address.",
                got=f"{self._settings.host}:{self._settings.port} ({error.strerror})",
                do="Stop the program that uses it, or take another: echo-hub serve RUN --port PORT"
                if in_use
                else "Correct server.host and server.port.",
            ) from error
        self.port = self._runner.addresses[0][1]

    @property
    def url(self) -> str:
        """The address that nodes on this machine, or behind the public one, use."""
        if self._settings.public_url:
            return self._settings.public_url.rstrip("/")
        host = "127.0.0.1" if self._settings.host in ("0.0.0.0", "::", "") else self._settings.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
