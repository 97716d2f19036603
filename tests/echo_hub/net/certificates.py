"""A certificate authority that is trusted only by tests."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True, slots=True)
class Files:
    """PEM files: a server's certificate and key, and the certificate of the authority."""

    authority: Path
    certificate: Path
    key: Path


class Authority:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Echo's tests")])
        self.path = root / "authority.pem"
        made = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(True, None), critical=True)
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        signed = made.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())
        self.path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))

    def server(self, name: str = "server") -> Files:
        """Return files for a server at 127.0.0.1 and localhost, with a new key at each call."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        places = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        made = self._builder(subject, key).add_extension(x509.SubjectAlternativeName(places), critical=False)
        signed = made.sign(self._key, hashes.SHA256())
        files = Files(self.path, self._root / f"{name}.pem", self._root / f"{name}.key")
        files.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        files.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return files

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        day = datetime.timedelta(days=1)
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(identifier, critical=False)
        )
