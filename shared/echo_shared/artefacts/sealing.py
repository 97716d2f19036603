"""Sealed files: an artefact's files encrypted with a run key, so that only nodes that joined the run can read them.

A sealed file is MAGIC, a random salt, then the content in chunks of `CHUNK_BYTES`, each with its AES-256-GCM tag. Its
file key is HKDF-SHA256 (RFC 5869) of run key and salt, so the nonces of each file can count from 0. A nonce is an
11-byte counter and one byte that is 1 for the last chunk. This is the STREAM construction of Hoang, Reyhanitabar,
Rogaway and Vizár, "Online Authenticated-Encryption and its Nonce-Reuse Misuse-Resistance" (CRYPTO 2015). It detects
chunks that are changed, omitted, reordered, repeated or cut off.

Sealing controls which nodes can read a file. It does not prove the author, because every node of the run knows the run
key; the signed manifest does.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from echo_shared.errors import CodecError
from echo_shared.files.atomic import Readable, disk_errors, sync

KEY_BYTES: Final = 32
CHUNK_BYTES: Final = 2**20
MAGIC: Final = b"echoseal1\n"
SALT_BYTES: Final = 32
TAG_BYTES: Final = 16
_COUNTER_BYTES: Final = 11


def new_key() -> bytes:
    return os.urandom(KEY_BYTES)


def seal(source: Path, target: Path, key: bytes) -> None:
    """Encrypt `source`, of any size, to `target`, readable only with `key`. Each call gives different bytes.

    `target` is complete or missing, even after a power failure. Blocks the calling thread. Raises StorageError for file
    errors.
    """
    salt = os.urandom(SALT_BYTES)
    cipher = _cipher(key, salt)

    def sealed() -> Iterator[bytes]:
        with source.open("rb") as file:
            yield MAGIC + salt
            for nonce, chunk in _chunks(file, CHUNK_BYTES):
                yield cipher.encrypt(nonce, chunk, None)

    _write(target, sealed(), synced=True)


def unseal(source: Path, target: Path, key: bytes) -> str:
    """Decrypt `source` to `target`, and return the content's SHA-256 (hexadecimal).

    `target` is complete or missing. Blocks the calling thread. Raises CodecError if the file was sealed with another
    key, or was cut, reordered or changed; StorageError for file errors.
    """
    digest = hashlib.sha256()

    def hashed() -> Iterator[bytes]:
        with source.open("rb") as file:
            for chunk in _unsealed(file, key):
                digest.update(chunk)
                yield chunk

    _write(target, hashed())
    return digest.hexdigest()


class UnsealingReader:
    """Decrypts `source` in order while it is read. `source` may return fewer bytes than requested only at its end.

    All returned bytes are authentic and in order. Read until a call returns fewer bytes than requested: only that last
    read detects that `source` was cut off.
    """

    def __init__(self, source: Readable, key: bytes) -> None:
        self._chunks = _unsealed(source, key)
        self._rest = memoryview(b"")

    def read(self, count: int, /) -> bytes:
        """Return the next `count` bytes, or all that remain. Raises CodecError if the sealed bytes were changed, and
        the errors of `source`.
        """
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
        raise CodecError("A file is not sealed.", got="its first bytes are not those of a sealed file")
    cipher = _cipher(key, header[len(MAGIC) :])
    for nonce, chunk in _chunks(file, CHUNK_BYTES + TAG_BYTES):
        try:
            yield cipher.decrypt(nonce, chunk, None)
        except InvalidTag as error:
            raise CodecError(
                "A sealed file cannot be opened.", got="it was sealed with another key, or was changed or cut"
            ) from error


def _cipher(key: bytes, salt: bytes) -> AESGCM:
    return AESGCM(HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt, info=MAGIC).derive(key))


def _chunks(file: Readable, chunk_bytes: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield (nonce, chunk) to the file's end, at least once. Only the last chunk may be shorter or empty."""
    counter, chunk, last = 0, file.read(chunk_bytes), False
    while not last:
        following = file.read(chunk_bytes)
        last = not following
        yield counter.to_bytes(_COUNTER_BYTES) + bytes([last]), chunk
        counter, chunk = counter + 1, following


def _write(target: Path, chunks: Iterator[bytes], *, synced: bool = False) -> None:
    """Write all of `target` or nothing. With `synced`, a power failure cannot leave a partial file either."""
    temporary = target.with_name(f"{target.name}.tmp")
    with disk_errors(f"{target.name} cannot be written.", target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as writer:
                writer.writelines(chunks)
            if synced:
                sync(temporary)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
