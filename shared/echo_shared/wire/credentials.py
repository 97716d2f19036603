"""Handshake frames in HTTP authentication headers (RFC 9110, section 11), so that the handshake ends before the upgrade
to a websocket.

    GET /node, Authorization: Echo hello=…                  ──►
            ◄── 401, WWW-Authenticate: Echo challenge=…
    GET /node, Authorization: Echo hello=…, nonce=…, proof=…  ──►
            ◄── 101, and Welcome is the first frame; or another status, and the body is a Refused

Frames are encoded as base64url without padding. `nonce` repeats the challenge's nonce, so the hub keeps no state
between the requests. `Authorization` also carries the invite token; HTTP clients drop this header on a redirect to
another host.
"""

from __future__ import annotations

import binascii
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass
from typing import Final

from echo_shared.errors import RemoteProtocolError

SCHEME: Final = "Echo"
MOST_CHARACTERS: Final = 8_000
"""Maximum length of one header. The longest proof takes about half of this; servers and proxies allow lines of 8 KiB.
"""
REFUSED_TYPE: Final = "application/vnd.msgpack"
"""Content type of a response whose body is a message, such as Refused."""
BOOKS_RECEIPTS: Final = "/node/receipts"
BOOKS_CERTIFICATE: Final = "/node/certificate"
"""URL path under which a node reads its own records over HTTP, with the credentials of this module."""
BOOKS_FLEET: Final = "/node/fleet"
BOOKS_TEAM: Final = "/node/team"
"""URL path at which a node reads, creates, joins or leaves a team."""
MOST_RECEIPTS: Final = 1_024
"""Maximum number of rollouts in one request to BOOKS_RECEIPTS."""

_PARAMETER: Final = re.compile(r"([a-z]{1,16})=([A-Za-z0-9_-]{0,8000})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Credentials in a node's request: `hello` in the first request, all three fields in the second."""

    hello: bytes
    nonce: bytes = b""
    proof: bytes = b""

    def header(self) -> str:
        fields = {"hello": self.hello, "nonce": self.nonce, "proof": self.proof}
        return _header({name: value for name, value in fields.items() if value})

    @classmethod
    def of_header(cls, header: str) -> Credentials | None:
        """Parse the `Authorization` header; None for another scheme. Raises RemoteProtocolError if it is malformed."""
        fields = _fields(header)
        if fields is None:
            return None
        if set(fields) not in ({"hello"}, {"hello", "nonce", "proof"}):
            raise RemoteProtocolError("A node's credentials are incomplete.", got=", ".join(sorted(fields)) or "none")
        return cls(**fields)


def challenge_header(challenge: bytes) -> str:
    return _header({"challenge": challenge})


def challenge_of(header: str) -> bytes | None:
    """Return the Challenge frame in a `WWW-Authenticate` header; None for another scheme."""
    fields = _fields(header)
    return None if fields is None else fields.get("challenge")


def _header(fields: dict[str, bytes]) -> str:
    pairs = (f"{name}={urlsafe_b64encode(value).decode().rstrip('=')}" for name, value in fields.items())
    return f"{SCHEME} {', '.join(pairs)}"


def _fields(header: str) -> dict[str, bytes] | None:
    scheme, _, rest = header[: MOST_CHARACTERS + 1].partition(" ")
    if scheme.lower() != SCHEME.lower():
        return None
    if len(header) > MOST_CHARACTERS:
        raise RemoteProtocolError("Credentials are too long.", got=f"{len(header)} characters")
    fields: dict[str, bytes] = {}
    for part in rest.split(","):
        found = _PARAMETER.fullmatch(part.strip(" \t"))
        if found is None or found[1] in fields:
            raise RemoteProtocolError("Credentials do not decode.", got=f"{len(header)} characters")
        try:
            fields[found[1]] = urlsafe_b64decode(found[2] + "=" * (-len(found[2]) % 4))
        except binascii.Error as error:
            raise RemoteProtocolError("Credentials do not decode.", got=f"{found[1]}: {error}") from error
    return fields
