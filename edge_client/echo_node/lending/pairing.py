"""Pairing of a node with its helper, a machine that lends its devices. The node pins the helper's certificate; the
helper asks for a secret.

The code that the helper prints holds the certificate's fingerprint and the secret. The secret is derived from the
certificate's key, so one file stores both.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from echo_shared.errors import ConfigError
from echo_shared.files.atomic import write_private
from echo_shared.wire.sockets import is_loopback

DEFAULT_PORT: Final = 50_052
_FINGERPRINT_BYTES: Final = 16
_SECRET_BYTES: Final = 16
_NAME: Final = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "echo-node lend")])
_BEGIN: Final = datetime.datetime(2000, 1, 1)
_NO_END: Final = datetime.datetime(9999, 12, 31, 23, 59, 59)
"""Date for a certificate that never expires, by RFC 5280, 4.1.2.5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Contents of a helper's code: the fingerprint of its certificate, and the secret."""

    fingerprint: bytes
    secret: bytes

    @classmethod
    def parse(cls, text: str) -> Code:
        """Parse a helper's code. Raises ValueError."""
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        if len(raw) != _FINGERPRINT_BYTES + _SECRET_BYTES:
            raise ValueError(f"{len(raw)} bytes")
        return cls(fingerprint=raw[:_FINGERPRINT_BYTES], secret=raw[_FINGERPRINT_BYTES:])

    def __str__(self) -> str:
        return base64.urlsafe_b64encode(self.fingerprint + self.secret).decode().rstrip("=")

    def is_of(self, certificate: bytes) -> bool:
        """Return True if this pairing code holds the fingerprint of this DER certificate."""
        return hmac.compare_digest(_fingerprint(certificate), self.fingerprint)


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperAddress:
    """Address of a helper, as HOST:PORT#CODE. A helper on the node's own machine needs no code."""

    host: str
    port: int
    code: Code | None

    @classmethod
    def parse(cls, text: str) -> HelperAddress:
        """Parse the address. Raises ConfigError."""
        where, mark, code = text.strip().partition("#")
        try:
            parts = urlsplit(f"//{where}")
            if not parts.hostname or parts.netloc != where or "@" in where:
                raise ValueError("no host")
            address = cls(host=parts.hostname, port=parts.port or DEFAULT_PORT, code=Code.parse(code) if mark else None)
        except ValueError as error:
            raise ConfigError(
                "This is not the address of a helper.",
                got=f"{where!r}{' with a code' if mark else ''}: {error}",
                do="Copy HOST:PORT#CODE from the output of `echo-node lend` on the helper.",
            ) from error
        if address.code is None and not is_loopback(address.host):
            raise ConfigError(
                "The helper is another machine, and its code is missing.",
                got=text,
                do="Copy HOST:PORT#CODE from the output of `echo-node lend` on the helper.",
            )
        return address

    @property
    def with_code(self) -> str:
        """The address with its code, in the form that `parse` reads."""
        return str(self) if self.code is None else f"{self}#{self.code}"

    def __str__(self) -> str:
        """Return the address without its secret code."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """A helper's certificate, and the code with its fingerprint and secret."""

    code: Code
    file: Path

    @classmethod
    def load_or_create(cls, file: Path) -> Pairing:
        """Load certificate and key from `file`, or create them. Raises ConfigError if the file is unreadable."""
        if not file.exists():
            write_private(file, _make())
        try:
            text = file.read_bytes()
            key = load_pem_private_key(text, password=None)
            certificate = x509.load_pem_x509_certificate(text)
            if not isinstance(key, Ed25519PrivateKey):
                raise ValueError("the key is not Ed25519")
        except (OSError, ValueError) as error:
            raise ConfigError(
                "The helper's certificate cannot be read.",
                got=f"{file}: {error}",
                do="Delete the file. The helper then makes a new certificate, and shows a new code for its nodes.",
            ) from error
        secret = hashlib.blake2b(key.private_bytes_raw(), digest_size=_SECRET_BYTES, person=b"echo lend").digest()
        fingerprint = _fingerprint(certificate.public_bytes(Encoding.DER))
        return cls(code=Code(fingerprint=fingerprint, secret=secret), file=file)

    def server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self.file)
        return context


def client_context() -> ssl.SSLContext:
    """Return a TLS context without verification, because the caller compares the certificate with the helper's code."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _make() -> bytes:
    key = Ed25519PrivateKey.generate()
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_NAME)
        .issuer_name(_NAME)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN)
        .not_valid_after(_NO_END)
        .sign(key, None)
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return private + certificate.public_bytes(Encoding.PEM)


def _fingerprint(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()[:_FINGERPRINT_BYTES]
