"""The hub's own TLS certificate and key, from PEM files that are reloaded when they change.

A new certificate applies to new connections; open ones are kept. While the two files do not match, as in the middle of
a renewal, the old certificate stays in use.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Final

from echo_shared.errors import ConfigError

log = logging.getLogger(__name__)

LOOK_S: Final = 5.0
"""Interval, in seconds, at which the certificate and key files are checked for changes."""


class Certificate:
    """The certificate and its TLS context. Call `load` first."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate = certificate
        self._key = key
        self._seen = self._state()
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)

    def load(self) -> ssl.SSLContext:
        """Return the TLS context for the server's sockets.

        Raises ConfigError if a file is missing or unreadable, or if certificate and key do not match.
        """
        self._check()
        self._context.load_cert_chain(self._certificate, self._key)
        return self._context

    async def watch(self) -> None:
        """Reload the files whenever they change. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self.renew)

    def renew(self) -> None:
        """Reload the certificate and key files if they have changed and match."""
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            self.load()
        except (ConfigError, OSError) as error:
            log.warning("the new TLS certificate cannot be used, the old one stays: %s", error)
        else:
            log.info("the TLS certificate was renewed")

    def _state(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_identity(path) for path in (self._certificate, self._key))

    def _check(self) -> None:
        """Load both files into a temporary context: a failed load would make the server's context unusable."""
        for name, path in (("server.tls_certificate", self._certificate), ("server.tls_key", self._key)):
            try:
                path.open("rb").close()
            except OSError as error:
                raise ConfigError(
                    "A TLS file cannot be read.",
                    got=f"{name} = {path}: {error.strerror}",
                    do=f"Correct {name}, or let the hub's user read the file.",
                ) from error
        try:
            # The empty password keeps OpenSSL from asking for one at the terminal if the key is encrypted.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._certificate, self._key, password="")
        except ssl.SSLError as error:
            mismatch = error.reason == "KEY_VALUES_MISMATCH"
            raise ConfigError(
                "The TLS key does not belong to the certificate." if mismatch else "The TLS files cannot be used.",
                got=f"{self._certificate}, {self._key}: {error.reason or 'no PEM, or a key with a password'}",
                do="Name the certificate with its chain in server.tls_certificate and its key, without a password, in "
                "server.tls_key; both in PEM.",
            ) from error


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
