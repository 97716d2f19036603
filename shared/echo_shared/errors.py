"""The project's errors: one tree, each with a stable wire `code` and a text: what happened, what was got, what to do.

EchoError
├── ConfigError           a setting, file or argument the user can mend
├── LocalProtocolError    we tried to break the protocol: a bug on this end
├── RemoteProtocolError   the peer broke the protocol, or sent what no honest peer sends
│   └── CodecError        bytes that do not decode into a known, valid message or adapter
├── RefusedError          the peer understood and said no (its `code` says why)
├── ConnectError          the peer cannot be reached, or went away
├── StorageError          disk or database: full, locked, in use, damaged
├── SwarmError            an artefact that could not be fetched, seeded or verified
├── BackendError          the sampling engine failed
├── LearnerError          the training process failed
└── ScorerError           a task's scorer failed, crashed or took too long
"""

from __future__ import annotations

from typing import ClassVar, Final

DISK_FULL: Final = "disk_full"
"""The code of a StorageError that some free space cures."""
POLICY_UNUSABLE: Final = "policy_unusable"
"""The code of an error that lies in a policy version: its adapter cannot be applied, or computes no numbers."""
DATABASE_AWAY: Final = "database_away"
"""The code of a StorageError that the database server's return cures."""


class EchoError(Exception):
    """Base of all errors that a user may see; `str()` is the whole text, ready to print."""

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
        """What happened and what was got, without the advice."""
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
    """The peer has said no; `code` is one of `echo_shared.messages.RefusalCode`."""

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
