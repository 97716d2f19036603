"""What hub and gateways say to each other is sealed by a key that follows from the hub's own.

A stranger at the broker's port can delay or delete, as whoever runs the broker can, and can say nothing in their names:
every message carries a MAC over its subject, which names the run, the direction and the addressee, and its body. That
an old message comes again its reader sees by its number (`hub_line`, `fleet`, `intake`).
"""

from __future__ import annotations

import hmac
from hashlib import blake2b
from typing import Any, Final

import msgpack

from echo_shared.errors import CodecError
from echo_shared.identity import Identity

MAC_BYTES: Final = 16


def secret_of(me: Identity, purpose: str) -> bytes:
    """What only holders of the hub's key can make, another for each purpose. 32 bytes."""
    return blake2b(me.sign(b"echo: gateways: " + purpose.encode()), digest_size=32).digest()


class Seal:
    """Of one hub's key."""

    def __init__(self, me: Identity) -> None:
        self._key = secret_of(me, "messages")

    def close(self, subject: str, body: Any) -> bytes:
        """A message for this subject."""
        data: bytes = msgpack.packb(body)
        return self._mac(subject, data) + data

    def open(self, subject: str, message: bytes) -> Any:
        """What was sealed for this subject, lists as lists. Raises CodecError for anything else."""
        data = message[MAC_BYTES:]
        if not hmac.compare_digest(message[:MAC_BYTES], self._mac(subject, data)):
            raise CodecError(
                "A message at the broker was not sealed by this hub's key.",
                got=f"{len(message)} bytes at {subject}",
                do="Give hub and gateways the same hub.key, and nobody else the broker's password.",
            )
        return msgpack.unpackb(data, strict_map_key=False)

    def _mac(self, subject: str, data: bytes) -> bytes:
        mac = blake2b(subject.encode() + b"\0", key=self._key, digest_size=MAC_BYTES)
        mac.update(data)
        return mac.digest()
