"""Attacks on a hub that speaks TLS itself, by its handshake: it costs the hub more than a request, a stranger little.

Each says what the hub did, or raises `Unnoticed`. As with `network`, its delay and memory are measured around them, by
whoever asks how the hub is from another address, with a handshake of its own each time.
"""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from benchmarks.trust.network import SOCKETS, all_closed, sockets
from benchmarks.trust.protocol import Unnoticed, Victim

SLOW: Final = 100
BYTE_EVERY_S: Final = 0.5
CLOSED_WITHIN_S: Final = 60.0
"""A handshake is over, or given up, long before."""


def settings(directory: Path) -> dict[str, dict[str, Any]]:
    """A hub's, with a certificate for this machine that it has signed itself; the files are made in `directory`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "attacked")])
    place = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    unsigned = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    dated = unsigned.serial_number(x509.random_serial_number()).not_valid_before(now - day).not_valid_after(now + day)
    made = dated.add_extension(place, critical=False).sign(key, hashes.SHA256())
    certificate, secret = directory / "attacked.pem", directory / "attacked.key"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    return {"server": {"tls_certificate": str(certificate), "tls_key": str(secret)}}


def client_hello() -> bytes:
    """The first flight of a handshake, after which it is the server's turn."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    sent = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    return sent.read()


def counted(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """What the hub has turned away meanwhile. Raises Unnoticed where it says of nothing."""
    more = Counter(after) - Counter(before)
    if not more:
        raise Unnoticed("the hub counts none of it")
    return f"the hub counts {dict(more)}"


async def _begun(victim: Victim, first_bytes: bytes) -> str:
    before = await victim.turned_away()
    closed = await all_closed(await sockets(victim, SOCKETS, first_bytes), within_s=CLOSED_WITHIN_S)
    return f"{closed}; {counted(before, await victim.turned_away())}"


async def silent(victim: Victim) -> str:
    """Connections of one address that never begin their handshake."""
    return await _begun(victim, b"")


async def half_hellos(victim: Victim) -> str:
    """Handshakes of one address that break off in their first message."""
    hello = client_hello()
    return await _begun(victim, hello[: len(hello) // 2])


async def half_handshakes(victim: Victim) -> str:
    """Handshakes of one address for which the hub computes its part, and never hears of the other end again."""
    return await _begun(victim, client_hello())


async def slow_handshakes(victim: Victim) -> str:
    """A byte of a handshake now and then: each is progress, and the last one is minutes away."""
    before, hello = await victim.turned_away(), client_hello()
    opened = await sockets(victim, SLOW, hello[:1])

    async def drip() -> None:
        for byte in hello[1:]:
            await asyncio.sleep(BYTE_EVERY_S)
            for _, writer in opened:
                with suppress(OSError):
                    writer.write(bytes([byte]))

    dripping = asyncio.create_task(drip())
    try:
        closed = await all_closed(opened, within_s=CLOSED_WITHIN_S)
    finally:
        dripping.cancel()
    return f"{closed}; {counted(before, await victim.turned_away())}"


Attack = Callable[[Victim], Awaitable[str]]
ATTACKS: Final[Mapping[str, Attack]] = {
    "connections without a handshake": silent,
    "half a first message": half_hellos,
    "half-done handshakes": half_handshakes,
    "slow handshakes": slow_handshakes,
}
"""By name."""
