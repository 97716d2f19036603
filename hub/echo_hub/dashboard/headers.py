"""What every answer of the hub's port carries, whatever it answers: what a browser may do with it.

A name that a node made up must never run as a script here, and nothing is fetched from elsewhere or shown in another
site's frame. Style elements and attributes are refused as scripts are; what scripts set of an element's style is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from aiohttp import web

SECURITY_HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'self'",
            "frame-ancestors 'none'",
        )
    ),
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",  # With none at all, browsers would not say which page a form came from.
    "X-Content-Type-Options": "nosniff",
}
TRANSPORT_SECURITY: Final = f"max-age={180 * 86_400}"
"""Only where the hub itself speaks TLS: behind a proxy the proxy knows."""


async def add_security_headers(request: web.Request, response: web.StreamResponse) -> None:
    """For `web.Application.on_response_prepare`."""
    response.headers.update(SECURITY_HEADERS)
    if request.secure:
        response.headers["Strict-Transport-Security"] = TRANSPORT_SECURITY
