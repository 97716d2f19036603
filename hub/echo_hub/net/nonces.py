"""The hub's nonces: each says when it ends and for whom it was made, so that nothing is kept of who only asks.

A nonce is when it ends, chance, and a MAC by a secret over both and the node's key and nonce. The secret is this
process's own, or shared by all that answer at one address. Only one that a node has answered rightly is written down,
until it ends: an upgrade that somebody has recorded opens nothing.
"""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from hashlib import blake2b
from typing import Final

from echo_shared.errors import RefusedError
from echo_shared.messages import Hello, RefusalCode

VALID_S: Final = 30.0
MOST_USED: Final = 65_536
"""Nonces in use at once. Each has cost its node a signature that was checked."""
_MAC_BYTES: Final = 16


class Nonces:
    """`now` is any clock that only goes forward, in seconds, the same in every call."""

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret or secrets.token_bytes(32)
        self._used: OrderedDict[bytes, float] = OrderedDict()
        """Until when; in the order of use, which is nearly that of their ends."""

    def make(self, hello: Hello, *, now: float) -> bytes:
        """What this node is to sign."""
        content = int((now + VALID_S) * 1e6).to_bytes(8) + secrets.token_bytes(8)
        return content + self._mac(content, hello)

    def check(self, nonce: bytes, hello: Hello, *, now: float) -> None:
        """Raises RefusedError unless it was made here for this Hello, has not ended, and is new."""
        content = nonce[:-_MAC_BYTES]
        is_mine = hmac.compare_digest(nonce[-_MAC_BYTES:], self._mac(content, hello))
        if not is_mine or _end(nonce) <= now or nonce in self._used:
            raise _stale()

    def use(self, nonce: bytes, *, now: float) -> None:
        """Writes down one that was answered rightly. Raises RefusedError when there is no room for more."""
        while self._used and (oldest := next(iter(self._used.items())))[1] <= now:
            del self._used[oldest[0]]
        if nonce in self._used:
            raise _stale()
        if len(self._used) >= MOST_USED:  # None may be forgotten before it has ended.
            raise RefusedError("Too many nodes connect at once.", do="Try again soon.", code=RefusalCode.TOO_SOON)
        self._used[nonce] = now + VALID_S

    def _mac(self, content: bytes, hello: Hello) -> bytes:
        return blake2b(content + hello.node_key + hello.nonce, key=self._secret, digest_size=_MAC_BYTES).digest()


def _end(nonce: bytes) -> float:
    return int.from_bytes(nonce[:8]) / 1e6


def _stale() -> RefusedError:
    return RefusedError(
        "This proof is not for a challenge that this hub has made and that still holds.",
        got="an answer that came too late, twice, or from before a restart of the hub",
        do="The node asks for a new challenge by itself.",
        code=RefusalCode.STALE_PROOF,
    )
