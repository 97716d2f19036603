"""Mutual proof of two nodes: of their identities, and that both hold the run's current key. No I/O.

The connecting node sends a hello, the listening node answers with a hello. Then each sends a proof, the connecting node
first. A hello is a nonce and a public key. A proof is an HMAC-SHA256 under a key derived from the run key, and the
node's Ed25519 signature. Both cover the role, both nonces and both public keys, so a proof cannot be replayed,
reflected, or made in another node's name. The connection then needs no encryption: it carries encrypted pieces that
must match their hashes.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from typing import Final, Literal

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from echo_shared.errors import RemoteProtocolError
from echo_shared.signing.identity import Identity, node_id, verify

_NONCE_BYTES: Final = 32
_KEY_BYTES: Final = 32
_MAC_BYTES: Final = 32
_PURPOSE: Final = b"echo mesh 1"
Role = Literal[b"connects", b"listens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """One side of a connection. `me` is the identity whose key is in `hello`."""

    me: Identity
    run_key: bytes = field(repr=False)
    role: Role
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(_NONCE_BYTES))

    @property
    def hello(self) -> bytes:
        return self.nonce + self.me.public_key

    def proof(self, theirs: bytes) -> bytes:
        """Return this side's proof for the peer with the hello `theirs`."""
        said = self._transcript(self.role, theirs)
        return self._mac(said) + self.me.sign(said)

    def check(self, theirs: bytes, proof: bytes) -> None:
        """Raise RemoteProtocolError unless `proof` is from the node of the hello `theirs`, and that node holds the run
        key.
        """
        said = self._transcript(b"listens" if self.role == b"connects" else b"connects", theirs)
        mac, signature = proof[:_MAC_BYTES], proof[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(said)):
            raise RemoteProtocolError("A node does not hold the run's current key.", got=node_of(theirs))
        if not verify(theirs[_NONCE_BYTES:], signature, said):
            raise RemoteProtocolError("A node's signature does not match its key.", got=node_of(theirs))

    def _transcript(self, prover: Role, theirs: bytes) -> bytes:
        connecting, listening = (self.hello, theirs) if self.role == b"connects" else (theirs, self.hello)
        return _PURPOSE + b"\n" + prover + b"\n" + connecting + listening

    def _mac(self, said: bytes) -> bytes:
        key = HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=None, info=_PURPOSE).derive(self.run_key)
        return hmac.digest(key, said, "sha256")


def node_of(hello: bytes) -> str:
    """Return the node id in a hello. Raises RemoteProtocolError if the hello is malformed."""
    if len(hello) != _NONCE_BYTES + _KEY_BYTES:
        raise RemoteProtocolError("This is not a node's hello.", got=f"{len(hello)} bytes")
    return node_id(hello[_NONCE_BYTES:])
