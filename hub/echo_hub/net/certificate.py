"""The hub's own TLS: a certificate and its key from PEM files, read again when they change.

Whoever is connected stays so: a new certificate is for new connections. Files that do not fit together, as in the
middle of a renewal, are left alone until they do.
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
"""How often the files are looked at."""


class Certificate:
    """`load` first."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate = certificate
        self._key = key
        self._seen = self._state()
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)

    def load(self) -> ssl.SSLContext:
        """For the server's sockets. Raises ConfigError when the files are missing, cannot be read or do not belong
        together."""
        self._check()
        self._context.load_cert_chain(self._certificate, self._key)
        return self._context

    async def watch(self) -> None:
        """Takes over what is new, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self.renew)

    def renew(self) -> None:
        """Takes over the files if they have changed and fit together."""
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            self.load()
        except (ConfigError, OSError) as error:
            log.warning("the new TLS certificate is of no use, the old one stays: %s", error)
        else:
            log.info("the TLS certificate was renewed")

    def _state(self) -> tuple[tuple[int, int, int] | None, ...]:
        """What differs once a file has another content."""
        return tuple(_identity(path) for path in (self._certificate, self._key))

    def _check(self) -> None:
        """Tries them in a context of their own: one that fails halfway is of no use any more."""
        for name, path in (("server.tls_certificate", self._certificate), ("server.tls_key", self._key)):
            try:
                path.open("rb").close()
            except OSError as error:
                raise ConfigError(
                    "A file for TLS cannot be read.",
                    got=f"{name} = {path}: {error.strerror}",
                    do=f"Correct {name}, or let the hub's user read the file.",
                ) from error
        try:
            # The last argument keeps it from asking at the terminal for the password of a key that has one.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._certificate, self._key, password="")
        except ssl.SSLError as error:
            mismatch = error.reason == "KEY_VALUES_MISMATCH"
            raise ConfigError(
                "The TLS key does not belong to the certificate." if mismatch else "The files for TLS are of no use.",
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
