"""The hub's only HTTP port: websocket, tracker, web seed and pages in one aiohttp application."""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware

from echo_hub.config.serving_sections import ServerConfig
from echo_hub.net import limits
from echo_hub.net.certificate import Certificate
from echo_hub.net.descriptors import room_for
from echo_hub.net.limits import ConnectionLimits
from echo_hub.net.listening import ACCEPTED_AT_ONCE, listen
from echo_hub.net.own_address import shared_address
from echo_hub.net.peer_log import PeerLog
from echo_shared.errors import ConfigError

log = logging.getLogger(__name__)

SHUTDOWN_S: Final = 3.0
Dress = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


class Server:
    """The server of the hub's HTTP port. `port` is the real port, even if the settings say 0. `shared`: share the port
    with other processes of the hub (`listen`)."""

    def __init__(self, settings: ServerConfig, *, shared: bool = False) -> None:
        self._settings = settings
        self._is_shared = shared
        self.routes: tuple[web.AbstractRouteDef, ...] = ()
        """All routes of the port; set by `open`."""
        self.limits = ConnectionLimits(settings)
        self._sweeping: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._runner: _LimitedRunner | None = None
        self.port = settings.port

    async def open(
        self, routes: Iterable[web.AbstractRouteDef], *, guards: Sequence[Middleware] = (), dress: Dress | None = None
    ) -> None:
        """Start serving. `guards` run before every route; `dress` adds headers to every response.

        Raises ConfigError if the port is not available or the TLS files cannot be used.
        """
        names = self._settings.tls_certificate, self._settings.tls_key
        certificate = Certificate(*map(Path, names)) if all(names) else None
        self.routes = tuple(routes)
        application = web.Application(middlewares=[self.limits.answering, *guards])
        if dress is not None:
            application.on_response_prepare.append(dress)
        application.add_routes(self.routes)
        self._runner = _LimitedRunner(
            application,
            self.limits,
            access_log=None,
            # aiohttp logs malformed HTTP requests with a traceback; PeerLog shortens that to one line.
            logger=PeerLog(logging.getLogger("aiohttp.server"), theirs=(HttpProcessingError,)),
            shutdown_timeout=SHUTDOWN_S,
        )
        await self._runner.setup()
        context = certificate.load() if certificate else None
        # The site gets no TLS context: `ConnectionLimits.make` adds TLS, so that limits apply from a connection's first
        # packet on.
        self._runner.speak_tls(context)
        try:
            for one in await listen(self._settings.host, self._settings.port, self.limits, shared=self._is_shared):
                await web.SockSite(self._runner, one, backlog=ACCEPTED_AT_ONCE).start()
        except OSError as error:
            await self._runner.cleanup()
            in_use = error.errno == errno.EADDRINUSE
            raise ConfigError(
                "The hub's port is in use." if in_use else "The hub cannot listen on this address.",
                got=f"{self._settings.host}:{self._settings.port} ({error.strerror})",
                do="Stop the program that uses it, or choose another port: echo-hub serve RUN --port PORT"
                if in_use
                else "Correct server.host and server.port.",
            ) from error
        self.port = self._runner.addresses[0][1]
        self._allow_connections()
        self._sweeping = asyncio.create_task(self._sweep(), name="connections' deadlines")
        if certificate is not None:
            self._renewing = asyncio.create_task(certificate.watch(), name="TLS certificate")

    def _allow_connections(self) -> None:
        wanted = self._settings.max_connections
        allowed = room_for(wanted)
        self.limits.allow(allowed)
        if allowed < wanted:
            log.warning(
                "The system allows this process only %d connections, but server.max_connections = %d: raise its limit"
                " of open files (ulimit -n, LimitNOFILE=).",
                allowed,
                wanted,
            )

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(limits.SWEEP_S)
            self.limits.sweep()

    @property
    def url(self) -> str:
        """URL for nodes on this machine; the public URL if the settings name one."""
        return address(self._settings, self.port)

    @property
    def shared_url(self) -> str:
        """URL to give to other machines. If the hub listens on all addresses, it contains this machine's network
        address."""
        return shared_address(self._settings, self.url)

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait([self._renewing])
        self.limits.end_handshakes()
        if self._runner is not None:
            await self._runner.cleanup()


def address(settings: ServerConfig, port: int) -> str:
    """Return the URL for nodes on this machine; the public URL if the settings name one."""
    if settings.public_url:
        return settings.public_url.rstrip("/")
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::", "") else settings.host
    scheme = "https" if settings.tls_certificate else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _LimitedRunner(web.AppRunner):
    """An aiohttp runner whose sites create every connection through `ConnectionLimits`."""

    def __init__(self, application: web.Application, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(application, **options)
        self._limits = limits
        self._context: ssl.SSLContext | None = None

    def speak_tls(self, context: ssl.SSLContext | None) -> None:
        """Set the TLS context, or None for plain HTTP. Call before adding a site."""
        self._context = context

    @property
    def server(self) -> web.Server | None:
        server = super().server
        # A site only calls the server to make a protocol, so a function that makes a limited connection can replace it.
        return None if server is None else cast("web.Server", partial(self._limits.make, server, self._context))
