"""All errors of the project. Each has a `code`, stable in messages between hub and node, and a text for users.

EchoError
├── ConfigError           a setting, file or argument that the user can correct
├── LocalProtocolError    this end broke the protocol: a bug in this program
├── RemoteProtocolError   the peer broke the protocol, or sent data that no honest peer sends
│   └── CodecError        bytes that do not decode into a known, valid message or adapter
├── RefusedError          the peer refused a valid request (its `code` gives the reason)
├── ConnectError          the peer cannot be reached, or disconnected
├── StorageError          disk or database: full, locked, in use, damaged
├── SwarmError            an artefact that could not be fetched, seeded or verified
├── BackendError          the sampling engine failed
├── LearnerError          the training process failed
└── ScorerError           a task's scorer failed, crashed or took too long
"""

from __future__ import annotations

from typing import ClassVar, Final

DISK_FULL: Final = "disk_full"
"""Code of a StorageError that is resolved when disk space is freed."""
POLICY_UNUSABLE: Final = "policy_unusable"
"""Code of an error in a policy version: its adapter cannot be applied, or produces values that are not finite."""
DATABASE_AWAY: Final = "database_away"
"""Code of a StorageError that is resolved when the database server is reachable again."""


class EchoError(Exception):
    """Base of all errors shown to users. `str()` is the complete text: what happened, what was found, what to do."""

    default_code: ClassVar[str] = "error"

    def __init__(self, what: str, *, got: str | None = None, do: str | None = None, code: str | None = None) -> None:
        self.what = what
        self.got = got
        self.do = do
        self.code = code or self.default_code
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        if self.got is not None:
            lines.append(f"  got: {self.got}")
        if self.do is not None:
            lines.append(f"  do:  {self.do}")
        return "\n".join(lines)

    @property
    def brief(self) -> str:
        """The error text without its advice, on one line."""
        return self.what if self.got is None else f"{self.what} ({self.got})"


class ConfigError(EchoError):
    default_code = "config"


class LocalProtocolError(EchoError):
    default_code = "local_protocol"


class RemoteProtocolError(EchoError):
    default_code = "remote_protocol"


class CodecError(RemoteProtocolError):
    default_code = "codec"


class RefusedError(EchoError):
    """The peer refused; `code` is one of `echo_shared.wire.messages.RefusalCode`."""

    default_code = "refused"


class ConnectError(EchoError):
    default_code = "connect"


class StorageError(EchoError):
    default_code = "storage"


class SwarmError(EchoError):
    default_code = "swarm"


class BackendError(EchoError):
    default_code = "backend"


class LearnerError(EchoError):
    default_code = "learner"


class ScorerError(EchoError):
    default_code = "scorer"
