"""Authenticate messages between hub and gateways with a key that is derived from the hub's identity key.

Strangers with access to the broker, and the broker's operator, can delay or delete messages, but cannot forge them.
Each message carries a MAC over its body and its subject. The subject names the run, the direction and the recipient. If
a message is replayed, receivers notice this by its number (`hub_line`, `fleet`, `intake`).
"""

from __future__ import annotations

import hmac
from hashlib import blake2b
from typing import Any, Final

import msgpack

from echo_shared.errors import CodecError
from echo_shared.signing.identity import Identity

MAC_BYTES: Final = 16


def secret_of(me: Identity, purpose: str) -> bytes:
    """Derive a 32-byte secret for this purpose. Only holders of the hub's key can compute the secret."""
    return blake2b(me.sign(b"echo: gateways: " + purpose.encode()), digest_size=32).digest()


class Seal:
    """Seals and opens messages with the key of one hub."""

    def __init__(self, me: Identity) -> None:
        self._key = secret_of(me, "messages")

    def close(self, subject: str, body: Any) -> bytes:
        """Encode and authenticate a message for this subject."""
        data: bytes = msgpack.packb(body)
        return self._mac(subject, data) + data

    def open(self, subject: str, message: bytes) -> Any:
        """Decode a message that was sealed for this subject. Arrays of msgpack become lists. Raises CodecError if the
        MAC is wrong."""
        data = memoryview(message)[MAC_BYTES:]
        if not hmac.compare_digest(message[:MAC_BYTES], self._mac(subject, data)):
            raise CodecError(
                "A message at the broker was not sealed by this hub's key.",
                got=f"{len(message)} bytes at {subject}",
                do="Give hub and gateways the same hub.key, and keep the broker's password secret.",
            )
        return msgpack.unpackb(data, strict_map_key=False)

    def _mac(self, subject: str, data: bytes | memoryview) -> bytes:
        mac = blake2b(subject.encode() + b"\0", key=self._key, digest_size=MAC_BYTES)
        mac.update(data)
        return mac.digest()
