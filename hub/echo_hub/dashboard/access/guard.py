"""Who may see and do what: everything is the operator's, unless `PUBLIC` names it.

An operator comes with `Authorization: Bearer TOKEN`, as scripts and Prometheus do, or with a session's cookie. A script
may have a token of its own, for a scope: whoever has one for reading changes nothing. Opening
`/?token=TOKEN` begins a session, as the form at /login does. Whatever changes something is a POST; with a session it
must come from a page of this hub (Origin, Sec-Fetch-Site) and carry the session's key, or the hub's token.

A browser sends a cookie to every port of its host, so whoever runs another server there has it. The key is in no cookie
and on no page: login puts it behind # of the address that it leads to, and `key.js` into the storage of this origin,
which ends at the port.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from echo_hub.actions.records import Actor
from echo_hub.dashboard.access.api_tokens import ApiTokens
from echo_hub.dashboard.access.credentials import Credentials
from echo_hub.dashboard.access.sessions import LIFE_S, Session, Sessions
from echo_hub.dashboard.responses import json_response, see_other
from echo_shared.errors import RemoteProtocolError

log = logging.getLogger(__name__)

PUBLIC: Final = frozenset(
    {
        "/leaderboard",
        "/teams",
        "/nodes/{node}",  # By the start of a node's id, and with what counted alone.
        "/nodes/{node}/picture.png",
        "/teams/{team}",
        "/teams/{team}/picture.png",
        "/receipts",  # What its node is told of a rollout, and nothing of what is in it.
        "/about",
        "/api/v1/leaderboard",
        "/api/v1/leaderboard/nodes/{node}",
        "/api/v1/leaderboard/teams/{team}",
        "/api/v1/teams",
        "/api/v1/receipts/{rollout}",
        "/api/v1/events",  # Its events say no more than the leaderboard does.
        "/healthz",
        "/readyz",  # To strangers one word.
        "/static/{name}",
        "/login",
        "/node",  # Nodes prove who they are there, and at the next three.
        "/node/receipts",
        "/node/certificate",
        "/node/team",
        "/announce/{passkey}",
        "/artefacts/{passkey}/{carrier}/{path}",
        "/install.sh",  # Not found, unless the operator set server.install_from; so the next two.
        "/install.ps1",
        "/install/{sha256}/{name}",
    }
)
"""The routes that anybody may ask for. Whatever is added to the hub and not to this is the operator's."""

KEY: Final = "page_key"
TOKEN: Final = "hub_token"
"""Fields of forms."""
_OPEN_TO_SESSIONS: Final = "/logout"
"""A session alone may end itself."""
NOT_OWN_PAGE: Final = (
    "This form is not from a page of this hub. Open the hub's own page and try again. Behind a proxy that speaks TLS,"
    " name the proxy in server.trusted_proxies and have it pass on Host and X-Forwarded-Proto."
)
NO_KEY: Final = "This form lacks the key that logging in gives to the browser. Log in again, then repeat this."
NO_KEY_PAGE: Final = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>Echo</title>'
    f'<p role="alert">{NO_KEY}</p><p><a href="/login">Log in</a></p></html>\n'
)
_ACTOR: Final = web.RequestKey("actor", Actor)
_SAFE: Final = frozenset({"GET", "HEAD"})
_BEARER: Final = "Bearer "
_CREDENTIALS_S: Final = 1.0
"""How often the guard looks whether the password has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """What the hub's settings make of a request: where it comes from, and whether it came by TLS."""

    place: Callable[[web.Request], str]
    """What counts as one address."""
    is_https: Callable[[web.Request], bool]
    address: Callable[[web.Request], str] = lambda _: ""
    """The address at which it reached the hub, as others may; empty where it does not say."""


class Guard:
    """`name` tells this run's cookie from those of other hubs on the same host, for cookies know no port."""

    def __init__(
        self,
        credentials: Credentials,
        visits: Visits,
        *,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        tokens: ApiTokens | None = None,
    ) -> None:
        self.credentials = credentials
        self.tokens = tokens or ApiTokens()
        self.visits = visits
        self._name = name
        self._clock = clock
        self._sessions = Sessions(clock)
        self._password_set_at = credentials.password_set_at
        self._looked_at = clock()

    @property
    def middleware(self) -> Middleware:
        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._answer(request, handler)

        return guarded

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is None or resource.canonical in PUBLIC:  # None: there is no such route.
            return await handler(request)
        session = self.session(request)
        actor = self._actor(request, session)
        if actor is None:
            return self._begun_by_address(request) or _refused(request)
        request[_ACTOR] = actor
        if actor.scope == "read" and request.method not in _SAFE:
            return json_response({"error": "This token is for reading; it changes nothing."}, status=403)
        if "token" in request.query and request.path == "/":
            return see_other(request.path)
        if session is not None and request.method not in _SAFE:
            if not self.is_from_own_page(request):
                log.warning("a form that is not of this hub's pages was refused: %s", request.path)
                return json_response({"error": NOT_OWN_PAGE}, status=403)
            if request.path != _OPEN_TO_SESSIONS and not await self._has_key(request, session):
                log.warning("a form without the session's key was refused: %s", request.path)
                return _without_key(request)
        return await handler(request)

    def is_from_own_page(self, request: web.Request) -> bool:
        """Whether a browser says that one of this hub's pages sent this: by the same scheme, host and port."""
        site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
        if site is not None and site != "same-origin":
            return False
        if origin is None:
            return site is not None
        try:
            sent_from = urlsplit(origin)
            if site is not None:  # It has compared the schemes itself; a proxy may speak TLS unknown to the hub.
                return sent_from.netloc == request.host
            scheme = "https" if self.visits.is_https(request) else "http"
            return sent_from.scheme == scheme and _with_port(sent_from) == _with_port(
                urlsplit(f"{scheme}://{request.host}")
            )
        except ValueError:
            return False

    async def _has_key(self, request: web.Request, session: Session) -> bool:
        form = await request.post()
        key, token = form.get(KEY, ""), form.get(TOKEN, "")
        if isinstance(key, str) and session.is_key(key):
            return True
        return isinstance(token, str) and self.credentials.is_token(token.strip())

    def is_operator(self, request: web.Request) -> bool:
        return self._actor(request, self.session(request)) is not None

    def rotate_token(self) -> None:
        """The operator's token that was lets nobody in any more, and all sessions end. Raises OSError."""
        self.credentials.rotate_token()
        self._sessions.end_all()

    def session(self, request: web.Request) -> Session | None:
        if self._clock() - self._looked_at >= _CREDENTIALS_S:
            self._heed_new_password()
        return self._sessions.find(request.cookies.get(self._cookie(request), ""))

    def begin_session(self, request: web.Request) -> web.Response:
        """The answer that logs in."""
        self._heed_new_password()  # Or this session would end with those that the old one began.
        session = self._sessions.begin()
        response = see_other(f"/#key={session.key}")
        response.set_cookie(
            self._cookie(request),
            session.session_id,
            max_age=int(LIFE_S),
            path="/",
            httponly=True,
            samesite="Strict",
            secure=self.visits.is_https(request),
        )
        return response

    def end_session(self, request: web.Request) -> web.Response:
        """The answer that logs out."""
        if (session := self.session(request)) is not None:
            self._sessions.end(session.session_id)
        response = see_other("/login")
        response.set_cookie(
            self._cookie(request),
            "",
            max_age=0,
            path="/",
            httponly=True,
            samesite="Strict",
            secure=self.visits.is_https(request),
        )
        return response

    def _cookie(self, request: web.Request) -> str:
        """By TLS one that no page without TLS can set (https://www.rfc-editor.org/rfc/rfc6265bis, `__Host-`)."""
        return f"{'__Host-' if self.visits.is_https(request) else ''}echo-{self._name}"

    def _actor(self, request: web.Request, session: Session | None) -> Actor | None:
        """Who this is, by the session or by what the request shows; None: nobody that is let in."""
        if session is not None:
            try:
                place = self.visits.place(request)
            except RemoteProtocolError:
                place = "somewhere"
            return Actor(via="page", who=place)
        given = request.headers.get("Authorization", "")
        if not given.startswith(_BEARER):
            return None
        shown = given.removeprefix(_BEARER)
        if self.credentials.is_token(shown):
            return Actor(via="api", who="the operator's token")
        token = self.tokens.find(shown)
        return None if token is None else Actor(via="api", who=token.name, scope=token.scope)

    def _begun_by_address(self, request: web.Request) -> web.Response | None:
        is_address = request.path == "/" and request.method == "GET"
        if is_address and self.credentials.is_token(request.query.get("token", "")):
            return self.begin_session(request)
        return None

    def _heed_new_password(self) -> None:
        """Who was let in by another password than the one that holds is out."""
        self._looked_at = self._clock()
        if (set_at := self.credentials.password_set_at) != self._password_set_at:
            self._password_set_at = set_at
            self._sessions.end_all()


def actor_of(request: web.Request) -> Actor:
    """Who is behind a request that the guard has let through to a route that is not public."""
    return request[_ACTOR]


def _with_port(address: SplitResult) -> tuple[str | None, int]:
    """Raises ValueError for what is no port."""
    return address.hostname, address.port or (443 if address.scheme == "https" else 80)


def _without_key(request: web.Request) -> web.Response:
    if "text/html" in request.headers.get("Accept", ""):
        return web.Response(
            text=NO_KEY_PAGE, status=403, content_type="text/html", headers={"Cache-Control": "no-store"}
        )
    return json_response({"error": NO_KEY}, status=403)


def _refused(request: web.Request) -> web.Response:
    if "text/html" in request.headers.get("Accept", ""):
        return see_other("/login")
    response = json_response(
        {"error": "Log in first, or send the operator's token: Authorization: Bearer TOKEN"}, status=401
    )
    response.headers["WWW-Authenticate"] = 'Bearer realm="echo-hub"'
    return response
