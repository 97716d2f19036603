"""Access control of the interfaces for tenants: find the tenant that sends a request, and end the request if the
tenant's token becomes invalid.

Both interfaces (`echo_hub.tinker`, `echo_hub.openai`) answer each request within `admitted`. A tenant's id is the name
of its token. So a new token of the same name continues with the tenant's models.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64decode
from collections.abc import AsyncIterator, Container
from contextlib import asynccontextmanager, suppress
from typing import Final, Protocol

from aiohttp import web

from echo_hub.actions.records import ApiToken
from echo_hub.actions.tenant_keys import token_in
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_shared.errors import RefusedError, RemoteProtocolError

KEY_HEADER: Final = "X-API-Key"
LOOK_S: Final = 1.0
"""Seconds between two checks whether the tokens of the open requests are still valid."""
_BEARER: Final = "Bearer "
_BASIC: Final = "Basic "
_RETRY_S: Final = 5.0
"""Seconds that a tenant above its limit of connections should wait."""


class KnownTokens(Protocol):
    """The hub's API tokens. Implemented by `echo_hub.dashboard.access.api_tokens`."""

    def find(self, given: str, now: float) -> ApiToken | None: ...

    def is_tenant(self, name: str, now: float) -> bool: ...


class WrongAttempts(Protocol):
    """Limits requests with wrong tokens. Implemented by `echo_hub.dashboard.access.attempts`."""

    def wait_s(self, place: str, now: float) -> float: ...


class Visitors(Protocol):
    """Knows where requests come from, and counts their connections. Implemented by `echo_hub.serving.tenant_visits`."""

    def place(self, request: web.Request) -> str:
        """Return the address to which a request is attributed, for limits per address. Raises RemoteProtocolError."""
        ...

    def vouch(self, request: web.Request, tenant_id: str) -> None:
        """Count the request's connection as one of this tenant's. Raises RefusedError if the tenant has too many."""
        ...


class TenantAccess:
    """Authenticates tenants' requests, and ends open requests whose token becomes invalid."""

    def __init__(self, tokens: KnownTokens, attempts: WrongAttempts, visitors: Visitors) -> None:
        self._tokens = tokens
        self._attempts = attempts
        self._visitors = visitors
        self.blocked: Container[str] = frozenset()
        """Tenants that the operator has blocked."""
        self._open: dict[asyncio.Timeout, str] = {}
        """For each open request: the timeout that can end it, and the request's token."""
        self._timer: asyncio.TimerHandle | None = None

    def tenant_of(self, request: web.Request) -> str:
        """Return the id of the tenant that sends the request. Raises Refusal."""
        given = _given(request)
        token = self._tokens.find(given, time.time())
        if token is None:
            raise self._unknown(request, is_given=bool(given))
        if token.scope != "use":
            raise Refusal(
                RefusalKind.FORBIDDEN,
                "This token is not for this interface.",
                got=f"a token with the scope {token.scope}",
                do="Ask the hub's operator for a token with the scope use.",
            )
        if token.name in self.blocked:
            raise Refusal(RefusalKind.FORBIDDEN, "The hub's operator has blocked this tenant.", do="Ask the operator.")
        try:
            self._visitors.vouch(request, token.name)
        except RefusedError as error:
            raise Refusal(
                RefusalKind.TOO_MANY,
                "You have too many connections to the hub.",
                got=error.got,
                do="Close some of them.",
                retry_after_s=_RETRY_S,
            ) from error
        return token.name

    def serves(self, tenant_id: str) -> bool:
        """Return True if this tenant has a valid token and is not blocked. Used where no request brings the token, as
        for samples that are being drawn."""
        return tenant_id not in self.blocked and self._tokens.is_tenant(tenant_id, time.time())

    @asynccontextmanager
    async def admitted(self, request: web.Request) -> AsyncIterator[str]:
        """Answer a request within this context, which gives the tenant's id.

        Raises Refusal if the request has no valid token. If the token becomes invalid within the context, the context's
        work is cancelled, and Refusal is raised.
        """
        tenant_id, secret = self.tenant_of(request), _given(request)
        try:
            async with asyncio.timeout(None) as deadline:
                self._open[deadline] = secret
                self._look_later()
                try:
                    yield tenant_id
                finally:
                    del self._open[deadline]
        except TimeoutError:
            if not deadline.expired():
                raise
            raise Refusal(
                RefusalKind.UNAUTHORIZED,
                "The token is no longer valid.",
                do="Ask the hub's operator for a new token with the scope use.",
            ) from None

    def _unknown(self, request: web.Request, *, is_given: bool) -> Refusal:
        try:
            place = self._visitors.place(request)
        except RemoteProtocolError:
            place = ""
        if is_given and (wait_s := self._attempts.wait_s(place, time.monotonic())):
            return Refusal(
                RefusalKind.TOO_MANY,
                "Too many requests with wrong tokens came from your address.",
                do="Try again later, with a valid token.",
                retry_after_s=wait_s,
            )
        return Refusal(
            RefusalKind.UNAUTHORIZED,
            "The token is not valid." if is_given else "The request has no token.",
            do=f"Ask the hub's operator for a token with the scope use, and send it as {KEY_HEADER} or as "
            "Authorization: Bearer TOKEN.",
        )

    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        """End the open requests whose tokens are no longer valid. While requests are open, repeat this check later."""
        self._timer = None
        loop, now = asyncio.get_running_loop(), time.time()
        for deadline, secret in tuple(self._open.items()):
            token = self._tokens.find(secret, now)
            if (token is None or token.name in self.blocked) and deadline.when() is None:
                deadline.reschedule(loop.time())
        if self._open:
            self._look_later()


def _given(request: web.Request) -> str:
    """Return the token in a request's headers; "" if there is none.

    Some clients send no header of their own. Their base URL may contain the token as password, which their HTTP library
    sends as basic authentication.
    """
    key, authorization = request.headers.get(KEY_HEADER, ""), request.headers.get("Authorization", "")
    if not key and authorization.startswith(_BEARER):
        key = authorization.removeprefix(_BEARER)
    elif not key and authorization.startswith(_BASIC):
        with suppress(ValueError):
            key = b64decode(authorization.removeprefix(_BASIC), validate=True).decode().partition(":")[2]
    return token_in(key.strip())
