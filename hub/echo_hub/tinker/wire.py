"""Parts that all handlers of the Tinker API share. They authenticate each request, limit its memory, and turn refusals
into responses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from aiohttp import web

from echo_hub.tenants.outcomes import Accepted
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.service import TenantService
from echo_hub.tinker.bodies import BodyRoom
from echo_hub.tinker.signed_urls import UrlSigner
from echo_hub.tinker.statuses import PAUSE_S, AskedFor, json_answer, refused

log = logging.getLogger(__name__)

PREFIX: Final = "/tinker/api/v1"
CHECKED_PREFIX: Final = "/tinker/checked/api/v1"
"""Prefix of the same routes for clients that want only completions whose draws the hub has checked: their base URL ends
with /tinker/checked."""


class Handle(Protocol):
    """A handler of a tenant's request."""

    async def __call__(self, request: web.Request, tenant_id: str, /) -> web.StreamResponse:
        """Answer the request of this tenant. May raise Refusal."""
        ...


class Admits(Protocol):
    """Authenticates tenants' requests. Implemented by `echo_hub.tenants.access.TenantAccess`."""

    def admitted(self, request: web.Request) -> AbstractAsyncContextManager[str]:
        """Answer the request within this context, which gives the tenant's id. Raises Refusal."""
        ...

    def serves(self, tenant_id: str) -> bool:
        """Return True if this tenant has a valid token and is not blocked. Used for requests that carry no token."""
        ...


class RequestAddress(Protocol):
    """Finds the hub's address in a request. Implemented by `echo_hub.dashboard.access.guard.Visits.address`."""

    def __call__(self, request: web.Request, /) -> str:
        """Return the hub's address as the client used it, for example https://hub.example; "" if the request does not
        contain it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerWire:
    """The tenants' service, access check and memory limit that all handlers use."""

    service: TenantService
    access: Admits
    address: RequestAddress
    signer: UrlSigner = field(default_factory=UrlSigner)
    room: BodyRoom = field(default_factory=BodyRoom)

    def answering(
        self, handle: Handle, moment: AskedFor = AskedFor.SUBMISSION
    ) -> Callable[..., Awaitable[web.StreamResponse]]:
        """Wrap a handler for a route: authenticate the tenant, and turn refusals into responses."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                async with self.access.admitted(request) as tenant_id:
                    return await handle(request, tenant_id)
            except Refusal as refusal:
                if moment is AskedFor.RETRIEVAL and refusal.kind is RefusalKind.NOT_READY:
                    await asyncio.sleep(PAUSE_S)
                return refused(refusal, moment)
            except web.HTTPException:
                raise
            except Exception:
                log.exception("A request of the Tinker API failed: %s", request.path)
                if moment is AskedFor.RETRIEVAL:
                    await asyncio.sleep(PAUSE_S)
                return json_answer({"detail": "The hub made an error; its log says more.", "code": "error"}, status=500)

        return answer


def is_checked(request: web.Request) -> bool:
    return request.path.startswith(CHECKED_PREFIX)


def future(accepted: Accepted, **more: Any) -> web.Response:
    """Return the response that names a future (the id under which the client asks for the outcome)."""
    return json_answer({"request_id": accepted.request_id, **more})


def texts(metadata: Mapping[str, Any] | None) -> dict[str, str]:
    """Return a user's metadata with texts as values. The SDK declares the values as texts, but sends any value that the
    user gives."""
    return {str(key): value if isinstance(value, str) else str(value) for key, value in (metadata or {}).items()}


def unsupported(option: str, what: str, do: str) -> Refusal:
    """Return the refusal of an option that this hub does not offer."""
    return Refusal(RefusalKind.INVALID, what, do=do, param=option)


def number_in_query(request: web.Request, name: str, default: int, *, most: int) -> int:
    """Return a whole number of the query. Raises Refusal."""
    text = request.query.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise Refusal(RefusalKind.INVALID, f"{name} is not a whole number.", got=repr(text)[:40], param=name)
    return min(int(text), most)
