"""Challenge nonces without stored state: a client that only asks for a challenge costs the hub no memory.

A nonce consists of its expiry time, random bytes and a MAC over both and over the node's key and own nonce. The MAC's
secret is private to this process, or shared by all processes behind one address. Only nonces that were answered
correctly are stored, until they expire, so that a recorded upgrade request cannot be replayed.
"""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from hashlib import blake2b
from typing import Final

from echo_shared.errors import RefusedError
from echo_shared.wire.messages import Hello, RefusalCode

VALID_S: Final = 30.0
MOST_USED: Final = 65_536
"""Maximum number of used nonces stored. Each one cost its sender a verified signature, so filling the store is slow."""
_MAC_BYTES: Final = 16


class Nonces:
    """Makes and checks nonces. `now` is a monotonic clock in seconds; all calls must use the same clock."""

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret or secrets.token_bytes(32)
        self._used: OrderedDict[bytes, float] = OrderedDict()
        """Expiry time of each used nonce, in order of use, which is nearly the order of expiry."""

    def make(self, hello: Hello, *, now: float) -> bytes:
        """Return a new nonce for this node to sign."""
        content = int((now + VALID_S) * 1e6).to_bytes(8) + secrets.token_bytes(8)
        return content + self._mac(content, hello)

    def check(self, nonce: bytes, hello: Hello, *, now: float) -> None:
        """Raise RefusedError unless the nonce was made here for this Hello, has not expired and was not used."""
        content = nonce[:-_MAC_BYTES]
        is_mine = hmac.compare_digest(nonce[-_MAC_BYTES:], self._mac(content, hello))
        if not is_mine or _end(nonce) <= now or nonce in self._used:
            raise _stale()

    def use(self, nonce: bytes, *, now: float) -> None:
        """Store a nonce that was answered correctly. Raises RefusedError if the nonce was used before, or if MOST_USED
        nonces are stored.
        """
        while self._used and (oldest := next(iter(self._used.items())))[1] <= now:
            del self._used[oldest[0]]
        if nonce in self._used:
            raise _stale()
        if len(self._used) >= MOST_USED:  # A nonce forgotten before its expiry could be replayed.
            raise RefusedError("Too many nodes connect at once.", do="Try again soon.", code=RefusalCode.TOO_SOON)
        self._used[nonce] = now + VALID_S

    def _mac(self, content: bytes, hello: Hello) -> bytes:
        return blake2b(content + hello.node_key + hello.nonce, key=self._secret, digest_size=_MAC_BYTES).digest()


def _end(nonce: bytes) -> float:
    return int.from_bytes(nonce[:8]) / 1e6


def _stale() -> RefusedError:
    return RefusedError(
        "This proof answers no valid challenge of this hub.",
        got="an answer that came too late, twice, or from before a restart of the hub",
        do="The node asks for a new challenge by itself.",
        code=RefusalCode.STALE_PROOF,
    )
