"""Access control: only the operator may call a route, unless `PUBLIC` lists it.

An operator authenticates with `Authorization: Bearer TOKEN`, as scripts and Prometheus do, or with a session cookie. A
script may have its own token with a scope; a token for reading cannot change anything. Opening `/?token=TOKEN` begins a
session, like the form at /login. Every change is a POST. In a session, the POST must come from a page of this hub
(Origin, Sec-Fetch-Site) and carry the session's key or the hub's token.

Browsers send a cookie to every port of its host, so another server on the host receives the session cookie. The
session's key protects against that server: the key is in no cookie and on no page. Login puts the key after # in the
redirect address. `key.js` moves it into the browser's storage for this origin, which is separate for each port.
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
from echo_hub.dashboard.access.credentials import OperatorCredentials
from echo_hub.dashboard.access.sessions import LIFE_S, BrowserSession, BrowserSessions
from echo_hub.dashboard.responses import json_response, see_other
from echo_shared.errors import RemoteProtocolError

log = logging.getLogger(__name__)

PUBLIC: Final = frozenset(
    {
        "/leaderboard",
        "/teams",
        "/nodes/{node}",  # The node is named by a prefix of its id; only credited work is shown.
        "/nodes/{node}/picture.png",
        "/teams/{team}",
        "/teams/{team}/picture.png",
        "/receipts",  # Shows the outcome of one rollout, without tokens.
        "/about",
        "/api/v1/leaderboard",
        "/api/v1/leaderboard/nodes/{node}",
        "/api/v1/leaderboard/teams/{team}",
        "/api/v1/teams",
        "/api/v1/receipts/{rollout}",
        "/api/v1/events",  # Streams no more than the leaderboard shows.
        "/healthz",
        "/readyz",  # Strangers get only the status word.
        "/static/{name}",
        "/login",
        "/node",  # Nodes authenticate in the protocol of this route and the next three.
        "/node/receipts",
        "/node/certificate",
        "/node/team",
        "/node/fleet",
        "/announce/{passkey}",
        "/artefacts/{passkey}/{carrier}/{path}",
        "/install.sh",  # Like the next two routes: "not found" unless the operator set server.install_from.
        "/install.ps1",
        "/install/{sha256}/{name}",
    }
)
"""Routes that need no authentication. All other routes, including new ones, require the operator."""
OF_TENANTS: Final = ("/tinker/", "/v1/", "/inference/v1/")
"""Beginnings of the routes for tenants. These routes authenticate each request themselves
(`echo_hub.tenants.access`)."""
HEALTH: Final = "/health"
"""Route of the OpenAI API. Clients without a token learn from this route only that the hub runs."""

KEY: Final = "page_key"
TOKEN: Final = "hub_token"
"""Name of the form field that holds the hub's token."""
_OPEN_TO_SESSIONS: Final = "/logout"
"""Route that a session may call without its key: a forged request could only end the session."""
NOT_OWN_PAGE: Final = (
    "This form is not from a page of this hub. Open the hub's own page and try again. Behind a proxy that speaks TLS,"
    " name the proxy in server.trusted_proxies and have it pass on Host and X-Forwarded-Proto."
)
NO_KEY: Final = "This form lacks the key that logging in gives to the browser. Log in again, then repeat the action."
NO_KEY_PAGE: Final = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>Echo</title>'
    f'<p role="alert">{NO_KEY}</p><p><a href="/login">Log in</a></p></html>\n'
)
_ACTOR: Final = web.RequestKey("actor", Actor)
_SAFE: Final = frozenset({"GET", "HEAD"})
_BEARER: Final = "Bearer "
_CREDENTIALS_S: Final = 1.0
"""Interval in seconds at which the password file is checked for a new password."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """Functions that tell, by the hub's settings, where a request came from, and whether it came over TLS."""

    place: Callable[[web.Request], str]
    """Returns a key for the origin of a request. In all limits, requests with equal keys count as coming from one
    address."""
    is_https: Callable[[web.Request], bool]
    address: Callable[[web.Request], str] = lambda _: ""
    """Returns the address at which the request reached the hub, for links; "" if the request does not tell."""


class Guard:
    """Middleware that authenticates requests.

    `name` is part of the cookie's name. It keeps the cookies of several hubs on one host apart, because cookies ignore
    the port.
    """

    def __init__(
        self,
        credentials: OperatorCredentials,
        visits: Visits,
        *,
        name: str,
        tokens: ApiTokens | None = None,
    ) -> None:
        self.credentials = credentials
        self.tokens = tokens or ApiTokens()
        self.visits = visits
        self._name = name
        self._sessions = BrowserSessions()
        self._password_set_at = credentials.password_set_at
        self._looked_at = time.monotonic()

    @property
    def middleware(self) -> Middleware:
        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._answer(request, handler)

        return guarded

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is None or resource.canonical in PUBLIC:  # None: no route matches.
            return await handler(request)
        if resource.canonical.startswith(OF_TENANTS) or resource.canonical == HEALTH:
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
        """Return True if the browser says that a page of this hub sent the request: same scheme, host and port."""
        site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
        if site is not None and site != "same-origin":
            return False
        if origin is None:
            return site is not None
        try:
            sent_from = urlsplit(origin)
            # The browser has already compared the schemes. The hub cannot compare them: a proxy may terminate TLS
            # without telling the hub.
            if site is not None:
                return sent_from.netloc == request.host
            scheme = "https" if self.visits.is_https(request) else "http"
            return sent_from.scheme == scheme and _with_port(sent_from) == _with_port(
                urlsplit(f"{scheme}://{request.host}")
            )
        except ValueError:
            return False

    async def _has_key(self, request: web.Request, session: BrowserSession) -> bool:
        form = await request.post()
        key, token = form.get(KEY, ""), form.get(TOKEN, "")
        if isinstance(key, str) and session.is_key(key):
            return True
        return isinstance(token, str) and self.credentials.is_token(token.strip())

    def is_operator(self, request: web.Request) -> bool:
        return self._actor(request, self.session(request)) is not None

    def rotate_token(self) -> None:
        """Replace the operator's token and end all sessions. Raises OSError."""
        self.credentials.rotate_token()
        self._sessions.end_all()

    def session(self, request: web.Request) -> BrowserSession | None:
        if time.monotonic() - self._looked_at >= _CREDENTIALS_S:
            self._heed_new_password()
        return self._sessions.find(request.cookies.get(self._cookie(request), ""), time.monotonic())

    def begin_session(self, request: web.Request) -> web.Response:
        """Begin a session, and return the response that sets its cookie."""
        # Notice a new password before the session begins. Otherwise the next check would end this session together with
        # the older ones.
        self._heed_new_password()
        session = self._sessions.begin(time.monotonic())
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
        """Return the cookie's name. Over TLS it has a prefix that only TLS pages can set
        (https://www.rfc-editor.org/rfc/rfc6265bis, `__Host-`).
        """
        return f"{'__Host-' if self.visits.is_https(request) else ''}echo-{self._name}"

    def _actor(self, request: web.Request, session: BrowserSession | None) -> Actor | None:
        """Return the request's authenticated actor; None if the request has no valid session or token."""
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
        token = self.tokens.find(shown, time.time())
        if token is None or token.scope == "use":  # Tenants see no page of the operator.
            return None
        return Actor(via="api", who=token.name, scope=token.scope)

    def _begun_by_address(self, request: web.Request) -> web.Response | None:
        is_address = request.path == "/" and request.method == "GET"
        if is_address and self.credentials.is_token(request.query.get("token", "")):
            return self.begin_session(request)
        return None

    def _heed_new_password(self) -> None:
        self._looked_at = time.monotonic()
        if (set_at := self.credentials.password_set_at) != self._password_set_at:
            self._password_set_at = set_at
            self._sessions.end_all()


def actor_of(request: web.Request) -> Actor:
    """Return the actor of a request that the guard admitted to a non-public route."""
    return request[_ACTOR]


def _with_port(address: SplitResult) -> tuple[str | None, int]:
    """Return the address's host and port. Raises ValueError if the port is invalid."""
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
