"""Ed25519 identities: who a node is, who a hub is, and what the hub has signed."""

from __future__ import annotations

import hashlib
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from echo_shared.errors import ConfigError
from echo_shared.files import write_private


class Identity:
    """A private key and what follows from it."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key: bytes = key.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Raises ConfigError when the file is missing or is no Ed25519 private key."""
        try:
            key = load_pem_private_key(path.read_bytes(), password=None)
        except (OSError, ValueError) as error:
            raise ConfigError(
                "The identity key cannot be read.", got=f"{path}: {error}", do="Restore the file from a backup."
            ) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError("The identity key is of another kind.", got=str(path), do="Use an Ed25519 key.")
        return cls(key)

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """The key at `path`; a new one, readable by its owner alone, where there is none."""
        if path.exists():
            return cls.load(path)
        identity = cls.generate()
        write_private(path, identity._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return identity

    @property
    def node_id(self) -> str:
        return node_id(self.public_key)

    def sign(self, data: bytes) -> bytes:
        """64 bytes."""
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
