"""Encrypt files for X25519 keys in the age format (https://age-encryption.org/v1). tinker-cookbook downloads exports
that are encrypted to its own key.

A file is a header and a payload. The header holds, for each recipient, the file's random key, encrypted to the
recipient, and ends with a MAC. The payload is encrypted in chunks of 64 KiB.
"""

from __future__ import annotations

import hmac
import secrets
from base64 import b64encode
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import BinaryIO, Final

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from echo_hub.tenants.refusal import Refusal, RefusalKind

CHUNK_BYTES: Final = 64 * 1024
SUFFIX: Final = ".age"
_X25519_INFO: Final = b"age-encryption.org/v1/X25519"
_BECH32: Final = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
_GENERATOR: Final = (0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)
_KEY_BYTES: Final = 32
_CHECKSUM: Final = 6
"""Number of characters of the checksum at the end of a Bech32 text (the form of age's keys)."""


def public_key(recipient: str) -> bytes:
    """Return the 32 bytes of a recipient of the form age1... Raises Refusal for any other text, also for an SSH key."""
    text = recipient.lower() if recipient.isupper() else recipient
    values = [_BECH32.find(character) for character in text[4:]]
    if not text.startswith("age1") or len(text) != 62 or min(values) < 0 or _polymod(values) != 1:
        raise Refusal(
            RefusalKind.INVALID,
            "An entry of age_encryption_recipients is not an age X25519 key.",
            got=repr(recipient)[:80],
            do="Give keys of the form age1...; this hub does not take SSH keys.",
            param="age_encryption_recipients",
        )
    number = 0
    for value in values[:-_CHECKSUM]:
        number = number << 5 | value
    num_bits = 5 * (len(values) - _CHECKSUM)
    return (number >> (num_bits - 8 * _KEY_BYTES)).to_bytes(_KEY_BYTES, "big")


def _polymod(values: Sequence[int]) -> int:
    """Return the Bech32 checksum of the prefix `age` and the values (BIP 173)."""
    prefix = [ord(character) >> 5 for character in "age"] + [0] + [ord(character) & 31 for character in "age"]
    check = 1
    for value in (*prefix, *values):
        top = check >> 25
        check = (check & 0x1FFFFFF) << 5 ^ value
        for bit, part in enumerate(_GENERATOR):
            check ^= part if top >> bit & 1 else 0
    return check


def encrypted(file: BinaryIO, recipients: Sequence[str]) -> Iterator[bytes]:
    """Yield the encrypted file in pieces. Each piece of `file` is read only when it is needed. Raises Refusal for a
    recipient that is not a key.
    """
    file_key = secrets.token_bytes(16)
    yield _header(file_key, [public_key(recipient) for recipient in recipients])
    nonce = secrets.token_bytes(16)
    yield nonce
    cipher = ChaCha20Poly1305(_derived(file_key, salt=nonce, info=b"payload"))
    chunk, index = file.read(CHUNK_BYTES), 0
    while True:
        following = file.read(CHUNK_BYTES)
        yield cipher.encrypt(index.to_bytes(11, "big") + (b"\0" if following else b"\1"), chunk, None)
        if not following:
            return
        chunk, index = following, index + 1


def _header(file_key: bytes, keys: Sequence[bytes]) -> bytes:
    header = b"age-encryption.org/v1\n"
    for key in keys:
        ephemeral = X25519PrivateKey.generate()
        share = ephemeral.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        shared = ephemeral.exchange(X25519PublicKey.from_public_bytes(key))
        wrapping = _derived(shared, salt=share + key, info=_X25519_INFO)
        body = ChaCha20Poly1305(wrapping).encrypt(bytes(12), file_key, None)
        header += b"-> X25519 " + _base64(share) + b"\n" + _base64(body) + b"\n"
    header += b"---"
    mac = hmac.new(_derived(file_key, salt=b"", info=b"header"), header, sha256).digest()
    return header + b" " + _base64(mac) + b"\n"


def _derived(secret: bytes, *, salt: bytes, info: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=salt, info=info).derive(secret)


def _base64(data: bytes) -> bytes:
    return b64encode(data).rstrip(b"=")
