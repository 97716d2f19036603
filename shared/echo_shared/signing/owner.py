"""An owner's key: one Ed25519 key that all machines of one owner share.

With this key a node proves to a hub that it belongs to the owner, and the owner's machines sign commands to each other.
The hub only passes these commands on: it knows the public half of the key, and can neither make nor change a command.

The key travels from machine to machine as a code, which the owner copies: the secret bytes and a checksum, in base64.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Final

from echo_shared.errors import ConfigError
from echo_shared.signing.identity import Identity, verify

_SEED_BYTES: Final = 32
_CHECK_BYTES: Final = 4
_CLAIM: Final = b"echo owner 1\0"


def code_of(owner: Identity) -> str:
    """Return the code that gives another machine this owner's key. It is a secret."""
    return base64.urlsafe_b64encode(owner.seed + _check(owner.seed)).decode()


def owner_of(code: str) -> Identity:
    """Return the owner's key that `code` contains. Raises ConfigError if the code is incomplete or mistyped."""
    try:
        raw = base64.b64decode("".join(code.split()), altchars=b"-_", validate=True)
        seed, check = raw[:_SEED_BYTES], raw[_SEED_BYTES:]
        if check != _check(seed):
            raise ValueError("its checksum does not match")
        return Identity.from_seed(seed)
    except ValueError as error:
        raise ConfigError(
            "This is not an owner's code.",
            got=str(error),
            do="Copy the whole code that `echo-node fleet code` prints on another of your machines.",
        ) from error


def claim(owner: Identity, *, node_id: str, hub_key: bytes) -> bytes:
    """Return the owner's signature over a node id and a hub's key, which proves to this hub that the owner owns the
    node.
    """
    return owner.sign(_claimed(node_id, hub_key))


def is_claimed(owner_key: bytes, signature: bytes, *, node_id: str, hub_key: bytes) -> bool:
    """Return True if `signature` is the `claim` that the owner with this public key made for this node and hub."""
    return verify(owner_key, signature, _claimed(node_id, hub_key))


def _claimed(node_id: str, hub_key: bytes) -> bytes:
    return _CLAIM + hub_key + node_id.encode()


def _check(seed: bytes) -> bytes:
    return hashlib.blake2b(seed, digest_size=_CHECK_BYTES, person=b"echo owner code").digest()
