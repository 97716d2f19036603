"""URLs that give access to one file without a token, because they are signed and expire. tinker-cookbook downloads
exports by such URLs."""

from __future__ import annotations

import hmac
import secrets
import time
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final
from urllib.parse import quote, urlencode

LIFE_S: Final = 1_800.0
"""Seconds for which a URL is valid. tinker-cookbook asks for new ones five minutes before the end."""


@dataclass(frozen=True, slots=True)
class UrlSigner:
    """Signs URLs with a secret of this process, so URLs become invalid when the hub restarts."""

    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def query(self, tenant_id: str, path: str, name: str, expires: int) -> str:
        """Return the file's name and the signed query as the end of a URL."""
        signature = self._signature(tenant_id, path, name, expires)
        values = {"tenant": tenant_id, "path": path, "expires": expires, "signature": signature}
        return f"{quote(name)}?{urlencode(values)}"

    def holds(self, tenant_id: str, path: str, name: str, expires: str, signature: str) -> bool:
        """Return True if this signer has made the signature and it has not expired."""
        if not (expires.isascii() and expires.isdigit() and len(expires) <= 12):
            return False
        expected = self._signature(tenant_id, path, name, int(expires))
        is_signed = hmac.compare_digest(expected.encode(), signature.encode("utf-8", "replace"))
        return is_signed and time.time() < int(expires)

    def _signature(self, tenant_id: str, path: str, name: str, expires: int) -> str:
        parts = (tenant_id, path, name, str(expires))
        # Each part is preceded by its length, so that no two lists of parts give the same message.
        message = b"".join(f"{len(part.encode())}:".encode() + part.encode() for part in parts)
        return hmac.new(self.secret, message, sha256).hexdigest()
