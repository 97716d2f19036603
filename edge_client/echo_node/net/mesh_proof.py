"""How two nodes prove to each other who they are, and that both hold the run's current key. No I/O.

The one that connects says hello, the other answers with its own hello; then each sends a proof, the one that connects
first. A hello is a nonce and a public key. A proof is an HMAC-SHA256 under a key derived from the run key, and the
node's Ed25519 signature, both over the role, both nonces and both public keys: it cannot be replayed, reflected, or
made in another node's name. Nothing is negotiated afterwards: what then travels are pieces that are sealed already and
that count only if they match their hash.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from typing import Final, Literal

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from echo_shared.errors import RemoteProtocolError
from echo_shared.identity import Identity, node_id, verify

_NONCE_BYTES: Final = 32
_KEY_BYTES: Final = 32
_MAC_BYTES: Final = 32
_PURPOSE: Final = b"echo mesh 1"
Role = Literal[b"connects", b"listens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """One side of one connection. `me` must be the same node that the other end gets to see in `hello`."""

    me: Identity
    run_key: bytes = field(repr=False)
    role: Role
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(_NONCE_BYTES))

    @property
    def hello(self) -> bytes:
        return self.nonce + self.me.public_key

    def proof(self, theirs: bytes) -> bytes:
        """This side's proof for the node that said the hello `theirs`."""
        said = self._transcript(self.role, theirs)
        return self._mac(said) + self.me.sign(said)

    def check(self, theirs: bytes, proof: bytes) -> None:
        """Raises RemoteProtocolError unless `proof` is by the node of the hello `theirs`, and it holds the run key."""
        said = self._transcript(b"listens" if self.role == b"connects" else b"connects", theirs)
        mac, signature = proof[:_MAC_BYTES], proof[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(said)):
            raise RemoteProtocolError("A node does not hold the run's current key.", got=node_of(theirs))
        if not verify(theirs[_NONCE_BYTES:], signature, said):
            raise RemoteProtocolError("A node is not who it says.", got=node_of(theirs))

    def _transcript(self, prover: Role, theirs: bytes) -> bytes:
        connecting, listening = (self.hello, theirs) if self.role == b"connects" else (theirs, self.hello)
        return _PURPOSE + b"\n" + prover + b"\n" + connecting + listening

    def _mac(self, said: bytes) -> bytes:
        key = HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=None, info=_PURPOSE).derive(self.run_key)
        return hmac.digest(key, said, "sha256")


def node_of(hello: bytes) -> str:
    """The node that a hello is of. Raises RemoteProtocolError when it is none."""
    if len(hello) != _NONCE_BYTES + _KEY_BYTES:
        raise RemoteProtocolError("This is no node's hello.", got=f"{len(hello)} bytes")
    return node_id(hello[_NONCE_BYTES:])
