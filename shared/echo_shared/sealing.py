"""Sealed files: an artefact's files encrypted with a run key, so that only the run's members can read them.

A sealed file is MAGIC, a random salt, then the content in chunks of `CHUNK_BYTES`, each with AES-256-GCM's tag. The
file has a key of its own, HKDF-SHA256 (RFC 5869) of run key and salt, so the nonces may count from 0. Nonce: 11 bytes
counter, 1 byte that is 1 for the last chunk: the STREAM construction of Hoang, Reyhanitabar, Rogaway and Vizár, "Online
Authenticated-Encryption and its Nonce-Reuse Misuse-Resistance" (CRYPTO 2015), by which chunks that are left out,
swapped, repeated or cut off at the end are noticed like changed ones.

It says who may read, not who wrote: every member has the run key. Who wrote it is what the signed manifest proves.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from echo_shared.errors import CodecError
from echo_shared.files import Readable, disk_errors, sync

KEY_BYTES: Final = 32
CHUNK_BYTES: Final = 2**20
MAGIC: Final = b"echoseal1\n"
SALT_BYTES: Final = 32
TAG_BYTES: Final = 16
_COUNTER_BYTES: Final = 11


def new_key() -> bytes:
    """A run key."""
    return os.urandom(KEY_BYTES)


def seal(source: Path, target: Path, key: bytes) -> None:
    """Writes `source`, of any size, to `target`, readable with `key` alone; another sealing gives other bytes.

    `target` is there whole or not at all, even when the power fails. Blocks. Raises StorageError when a file cannot be
    read or written.
    """
    salt = os.urandom(SALT_BYTES)
    cipher = _cipher(key, salt)

    def sealed(file: BinaryIO) -> Iterator[bytes]:
        yield MAGIC + salt
        for nonce, chunk in _chunks(file, CHUNK_BYTES):
            yield cipher.encrypt(nonce, chunk, None)

    _rewrite(source, target, sealed, synced=True)


def unseal(source: Path, target: Path, key: bytes) -> str:
    """Writes to `target` what was sealed as `source`, once all of it has proved to be sealed with `key` and unchanged.
    Returns its SHA-256 (hexadecimal).

    `target` is there whole or not at all. Blocks. Raises CodecError when it was not sealed with this key, or was cut,
    reordered or changed; StorageError when a file cannot be read or written.
    """
    digest = hashlib.sha256()

    def hashed(file: BinaryIO) -> Iterator[bytes]:
        for chunk in _unsealed(file, key):
            digest.update(chunk)
            yield chunk

    _rewrite(source, target, hashed)
    return digest.hexdigest()


class UnsealingReader:
    """What was sealed as `source`, in order, while that is being read; `source` gives less than asked for at its end.

    What has been read is unchanged and in its place. Whether something was cut off shows at the end alone: the last
    read must be one that gives less than it was asked for.
    """

    def __init__(self, source: Readable, key: bytes) -> None:
        self._chunks = _unsealed(source, key)
        self._rest = memoryview(b"")

    def read(self, count: int, /) -> bytes:
        """The next `count` bytes, or all that are left. Raises CodecError as `unseal`, and what `source` raises."""
        parts = []
        while count:
            if not self._rest:
                chunk = next(self._chunks, None)
                if chunk is None:
                    break
                self._rest = memoryview(chunk)
            parts.append(self._rest[:count])
            self._rest = self._rest[count:]
            count -= len(parts[-1])
        return b"".join(parts)


def _unsealed(file: Readable, key: bytes) -> Iterator[bytes]:
    header = file.read(len(MAGIC) + SALT_BYTES)
    if len(header) < len(MAGIC) + SALT_BYTES or not header.startswith(MAGIC):
        raise CodecError("A file is not sealed.", got="its head is not a sealed file's")
    cipher = _cipher(key, header[len(MAGIC) :])
    for nonce, chunk in _chunks(file, CHUNK_BYTES + TAG_BYTES):
        try:
            yield cipher.decrypt(nonce, chunk, None)
        except InvalidTag as error:
            raise CodecError(
                "A sealed file cannot be opened.", got="it is sealed with another key, or was changed or cut"
            ) from error


def _cipher(key: bytes, salt: bytes) -> AESGCM:
    return AESGCM(HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt, info=MAGIC).derive(key))


def _chunks(file: Readable, chunk_bytes: int) -> Iterator[tuple[bytes, bytes]]:
    """(nonce, chunk) of all the rest; at least one, which may be empty. Only the last may be shorter."""
    counter, chunk, last = 0, file.read(chunk_bytes), False
    while not last:
        following = file.read(chunk_bytes)
        last = not following
        yield counter.to_bytes(_COUNTER_BYTES) + bytes([last]), chunk
        counter, chunk = counter + 1, following


def _rewrite(
    source: Path, target: Path, transform: Callable[[BinaryIO], Iterator[bytes]], *, synced: bool = False
) -> None:
    """`target` from `source`; never a half-written one, and with `synced` not even when the power fails."""
    temporary = target.with_name(f"{target.name}.tmp")
    with disk_errors(f"{target.name} cannot be written.", target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with source.open("rb") as reader, temporary.open("wb") as writer:
                writer.writelines(transform(reader))
            if synced:
                sync(temporary)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
