"""The operator's credentials: the token made by the hub, and the password set by the operator.

Both are files in the run's directory, readable only by their owner. Of the password, only its Argon2id hash is stored
(19 MiB, two passes, one lane: https://cheatsheetseries.owasp.org, Password Storage). Verifying a password takes about
30 ms of one processor core. More lanes or memory would also make each guess by a stranger more expensive for the hub.
One permanent thread verifies one password at a time: the memory allocator keeps the memory of a hash for each thread
that ever computed one. The queue of waiting passwords is short (`MOST_WAITING`).
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from echo_shared.errors import ConfigError
from echo_shared.files.atomic import write_private

log = logging.getLogger(__name__)

TOKEN_BYTES: Final = 32
LEAST_CHARACTERS: Final = 10
MOST_CHARACTERS: Final = 1_024
MOST_WAITING: Final = 4
"""Number of passwords that may wait for verification. The hub refuses further passwords with the advice to try
again."""
_HASHER: Final = PasswordHasher(time_cost=2, memory_cost=19_456, parallelism=1)


class BusyError(Exception):
    """Too many passwords are waiting for verification."""


def set_password(path: Path, password: str) -> None:
    """Store the password's hash at `path`. Raises ConfigError if the password is too short or too long."""
    if not LEAST_CHARACTERS <= len(password) <= MOST_CHARACTERS:
        raise ConfigError(
            "This password cannot be used.",
            got=f"{len(password)} characters",
            do=f"Use {LEAST_CHARACTERS} to {MOST_CHARACTERS:,} characters.",
        )
    write_private(path, f"{_HASHER.hash(password)}\n".encode())


class OperatorCredentials:
    """The operator's token and password for one run. Call `open` first."""

    def __init__(self, *, token: Path, password: Path) -> None:
        self._token_path = token
        self._password_path = password
        self._waiting = 0
        self._verifier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="password")
        self.token = ""

    def open(self) -> None:
        """Read the token, or make one if its file is missing. Raises ConfigError if the file holds no valid token."""
        try:
            if not self._token_path.exists():
                write_private(self._token_path, f"{secrets.token_urlsafe(TOKEN_BYTES)}\n".encode())
            self.token = self._token_path.read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise ConfigError(
                "The operator's token cannot be read.",
                got=str(error),
                do=f"Delete {self._token_path}; the hub then makes a new token.",
            ) from error
        if len(self.token) < TOKEN_BYTES:
            raise ConfigError(
                "The operator's token is too short.",
                got=f"{len(self.token)} characters in {self._token_path}",
                do="Delete the file; the hub then makes a new token.",
            )

    def rotate_token(self) -> None:
        """Replace the token and its file. Raises OSError if the file cannot be written."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        write_private(self._token_path, f"{token}\n".encode())
        self.token = token

    @property
    def has_password(self) -> bool:
        return self._password_path.exists()

    @property
    def password_set_at(self) -> int:
        """Return the password file's modification time in ns, which changes with each new password; 0 if there is no
        password.
        """
        try:
            return self._password_path.stat().st_mtime_ns
        except OSError:
            return 0

    def is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="surrogatepass"), self.token.encode())

    async def is_password(self, given: str) -> bool:
        """Return True if the password is right. Raises BusyError if too many passwords wait for verification."""
        if not given or len(given) > MOST_CHARACTERS or not self.has_password:
            return False
        if self._waiting >= MOST_WAITING:
            raise BusyError
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._verifier, self._verify, given)
        finally:
            self._waiting -= 1

    def _verify(self, given: str) -> bool:
        try:
            return _HASHER.verify(self._password_path.read_text(encoding="ascii").strip(), given)
        except VerificationError:
            return False
        except (OSError, ValueError, InvalidHashError) as error:
            log.warning(
                "the password's file cannot be used (set it again: echo-hub password RUN): %s", type(error).__name__
            )
            return False
