"""PEM file of an identity's private key, readable only by its owner."""

from __future__ import annotations

from pathlib import Path

from echo_shared.errors import ConfigError
from echo_shared.files.atomic import write_private
from echo_shared.signing.identity import Identity


def load(path: Path) -> Identity:
    """Read the key at `path`. Raises ConfigError if the file is missing or holds no Ed25519 private key."""
    try:
        return Identity.from_pem(path.read_bytes())
    except TypeError as error:
        raise ConfigError(
            "The identity key has the wrong type.", got=f"{path}: {error}", do="Use an Ed25519 key without a password."
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            "The identity key cannot be read.", got=f"{path}: {error}", do="Restore the file from a backup."
        ) from error


def load_or_create(path: Path) -> Identity:
    """Read the key at `path`, or create one that only its owner may read. Raises like `load`."""
    if path.exists():
        return load(path)
    identity = Identity.generate()
    write_private(path, identity.to_pem())
    return identity
