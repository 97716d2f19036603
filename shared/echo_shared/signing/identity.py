"""Ed25519 identities of nodes and hubs: keys, ids, signatures and fingerprints."""

from __future__ import annotations

import hashlib

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)


class Identity:
    """An Ed25519 private key, with its public key and id."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key: bytes = key.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_pem(cls, pem: bytes) -> Identity:
        """Read a private key from PEM bytes.

        Raises ValueError if the bytes hold no private key, TypeError if the key is encrypted or not Ed25519.
        """
        key = load_pem_private_key(pem, password=None)
        if not isinstance(key, Ed25519PrivateKey):
            raise TypeError("the private key is not an Ed25519 key")
        return cls(key)

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """Make the identity whose private key has these 32 secret bytes. Raises ValueError for another length."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @property
    def seed(self) -> bytes:
        """The key's 32 secret bytes."""
        return self._key.private_bytes_raw()

    def to_pem(self) -> bytes:
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @property
    def node_id(self) -> str:
        return node_id(self.public_key)

    def sign(self, data: bytes) -> bytes:
        """Return the 64-byte signature over `data`."""
        return self._key.sign(data)


def verify(public_key: bytes, signature: bytes, data: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def node_id(public_key: bytes) -> str:
    """Return a node's short id, used in logs, pages and the database: 20 hexadecimal characters of the key's hash."""
    return hashlib.blake2b(public_key, digest_size=10).hexdigest()


def fingerprint(public_key: bytes) -> str:
    """Return the key's fingerprint, which people compare: eight groups of four hexadecimal characters."""
    digits = hashlib.blake2b(public_key, digest_size=16).hexdigest()
    return " ".join(digits[i : i + 4] for i in range(0, len(digits), 4))
