"""What a failed TLS handshake tells of a hub."""

from __future__ import annotations

import ssl
from typing import Final
from urllib.parse import urlsplit

from echo_node.host.address import HubAddress
from echo_shared.errors import ConnectError
from echo_shared.messages.fields import printable_line

_NOT_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")
"""What OpenSSL's releases say of an answer that is no TLS record."""


def handshake_failure(error: ssl.SSLError, address: HubAddress) -> ConnectError:
    """An untrusted certificate, a server that speaks plain HTTP, and all else, told apart."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return ConnectError(
            "The hub's certificate is not trusted.",
            got=f"{address.origin}: {printable_line(error.verify_message)}",
            do="Check the address; the operator may have to renew the certificate.",
        )
    said = printable_line(str(error.reason or error))
    if error.reason in _NOT_TLS:
        return ConnectError(
            "The server at this address does not speak TLS, which https:// asks for.",
            got=f"{address.origin}: {said}",
            do=_without_tls(address),
        )
    return ConnectError(
        "The TLS handshake with the hub failed.",
        got=f"{address.origin}: {said}",
        do="Check the address, and ask the operator whether the hub is to be reached by https:// there.",
    )


def _without_tls(address: HubAddress) -> str:
    parts = urlsplit(address.origin)
    place = parts.netloc if parts.port is not None else f"{parts.netloc}:443"
    plain = f"http://{place}{parts.path}"
    if address.is_loopback:
        return f"Use {plain}"
    return f"In a network that you trust, use {plain} --insecure. Else ask the operator for the hub's https:// address."
