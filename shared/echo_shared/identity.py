"""Ed25519 identities: who a node is, who a hub is, and what the hub has signed."""

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
    """A private key and what follows from it."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key: bytes = key.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_pem(cls, pem: bytes) -> Identity:
        """The key in a PEM file's bytes.

        Raises ValueError when they are no private key, TypeError when it is encrypted or of another kind than Ed25519.
        """
        key = load_pem_private_key(pem, password=None)
        if not isinstance(key, Ed25519PrivateKey):
            raise TypeError("the private key is not an Ed25519 key")
        return cls(key)

    def to_pem(self) -> bytes:
        """The private key, unencrypted."""
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @property
    def node_id(self) -> str:
        return node_id(self.public_key)

    def sign(self, data: bytes) -> bytes:
        """This key's signature over `data`, 64 bytes."""
        return self._key.sign(data)


def verify(public_key: bytes, signature: bytes, data: bytes) -> bool:
    """Whether `signature` is `public_key`'s over `data`."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def node_id(public_key: bytes) -> str:
    """The short name of a node in logs, pages and the store: 20 hexadecimal characters of the key's hash."""
    return hashlib.blake2b(public_key, digest_size=10).hexdigest()


def fingerprint(public_key: bytes) -> str:
    """A key as people compare it: eight groups of four hexadecimal characters."""
    digits = hashlib.blake2b(public_key, digest_size=16).hexdigest()
    return " ".join(digits[i : i + 4] for i in range(0, len(digits), 4))
