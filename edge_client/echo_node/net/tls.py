"""Error messages for failed TLS handshakes with a hub."""

from __future__ import annotations

import ssl
from datetime import datetime
from typing import Final
from urllib.parse import urlsplit

from echo_node.host.address import HubAddress
from echo_shared.errors import ConnectError
from echo_shared.wire.messages.fields import printable_line

CLOCK: Final = "clock"
"""Code of the error for a TLS handshake that failed because of this machine's wrong clock."""
_NOT_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")
"""OpenSSL's reasons for an answer without TLS, in several releases."""
_NOT_YET_VALID: Final = 9
_EXPIRED: Final = 10
"""OpenSSL's codes X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""


def handshake_failure(error: ssl.SSLError, address: HubAddress) -> ConnectError:
    """Return the error for an untrusted certificate, a server without TLS, or any other failure."""
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in (_NOT_YET_VALID, _EXPIRED):
        return _out_of_time(error, address)
    if isinstance(error, ssl.SSLCertVerificationError):
        return ConnectError(
            "The hub's certificate is not trusted.",
            got=f"{address.origin}: {printable_line(error.verify_message)}",
            do="Check the address; the operator may have to renew the certificate.",
        )
    said = printable_line(str(error.reason or error))
    if error.reason in _NOT_TLS:
        return ConnectError(
            "The server at this address does not speak TLS, which https:// needs.",
            got=f"{address.origin}: {said}",
            do=_without_tls(address),
        )
    return ConnectError(
        "The TLS handshake with the hub failed.",
        got=f"{address.origin}: {said}",
        do="Check the address, and ask the operator if https:// works there.",
    )


def _out_of_time(error: ssl.SSLCertVerificationError, address: HubAddress) -> ConnectError:
    """Return the error for a certificate that is not valid at this machine's time. Either the certificate or this
    machine's clock is wrong; a certificate that is not valid yet points to the clock.
    """
    here = f"by this machine's clock, which shows {datetime.now().astimezone():%Y-%m-%d %H:%M %z}"
    if error.verify_code == _NOT_YET_VALID:
        return ConnectError(
            f"The hub's certificate is not valid yet {here}.",
            got=address.origin,
            do="Correct this machine's clock; the node then connects by itself.",
            code=CLOCK,
        )
    return ConnectError(
        f"The hub's certificate has expired {here}.",
        got=address.origin,
        do="If that clock is right, the operator must renew the certificate; else correct the clock.",
    )


def _without_tls(address: HubAddress) -> str:
    parts = urlsplit(address.origin)
    place = parts.netloc if parts.port is not None else f"{parts.netloc}:443"
    plain = f"http://{place}{parts.path}"
    if address.is_loopback:
        return f"Use {plain}"
    return f"In a network that you trust, use {plain} --insecure. Else ask the operator for the hub's https:// address."
