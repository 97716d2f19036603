"""Security headers for every response of the hub's port.

Node names are untrusted and must never run as scripts. Nothing is loaded from other hosts. Frames of other sites may
not show a page. Inline scripts, style elements and style attributes are refused; scripts from files may still set
styles.
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
    "Referrer-Policy": "same-origin",  # With no-referrer, browsers would not say which page sent a form.
    "X-Content-Type-Options": "nosniff",
}
TRANSPORT_SECURITY: Final = f"max-age={180 * 86_400}"
"""Value of Strict-Transport-Security, sent only if the hub itself terminates TLS. Behind a proxy, the proxy decides."""


async def add_security_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Set the security headers of a response; registered in `web.Application.on_response_prepare`."""
    response.headers.update(SECURITY_HEADERS)
    if request.secure:
        response.headers["Strict-Transport-Security"] = TRANSPORT_SECURITY
