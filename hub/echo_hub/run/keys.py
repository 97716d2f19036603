"""The run's keys. `echo_shared.artefacts.sealing` encrypts published files with them, so that only the run's members
can read the files.

Keys are numbered consecutively, and new files are encrypted with the newest key. If a node is barred from the run, a
new key is made, so that the node cannot read later publications. It can still read earlier ones.

RUN/run_keys.json is readable only by its owner, and is replaced atomically. The file also lists the nodes that were
barred when the newest key was made. So if a node is barred while the hub is down, the next start notices it.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from echo_shared.artefacts.sealing import KEY_BYTES, new_key
from echo_shared.errors import StorageError
from echo_shared.files.atomic import disk_errors, write_private
from echo_shared.wire.messages import RunKey

_HexKey = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * KEY_BYTES}}}$")]


class _State(BaseModel):
    # Error texts of the validation must not show a key.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    keys: Annotated[dict[Annotated[int, Field(ge=0)], _HexKey], Field(min_length=1)]
    barred: frozenset[str] = frozenset()


class RunKeys:
    """The run's keys and their file. Create it with `open`. Methods that change keys write the file, which takes a few
    milliseconds.
    """

    def __init__(self, path: Path, state: _State) -> None:
        self._path = path
        self._state = state

    @classmethod
    def open(cls, path: Path) -> RunKeys:
        """Read the keys from `path`; create the file with a first key if it is missing. Raises StorageError."""
        try:
            if path.exists():
                return cls(path, _State.model_validate_json(path.read_bytes()))
        except (OSError, ValidationError) as error:
            raise StorageError(
                "The run's keys cannot be read.",
                got=f"{path}: {error}",
                do="Restore the file from a backup, or delete it and RUN/artefacts: Echo publishes everything again.",
            ) from error
        # The first number is random. Otherwise files encrypted with a lost key could be mistaken for files of this key.
        made = cls(path, _State(keys={secrets.randbelow(2**32): new_key().hex()}))
        made._write(made._state)
        return made

    @property
    def current(self) -> RunKey:
        """Return the newest key, which encrypts new publications."""
        return self.named((max(self._state.keys),))[0]

    @property
    def ids(self) -> frozenset[int]:
        return frozenset(self._state.keys)

    def named(self, key_ids: Collection[int]) -> tuple[RunKey, ...]:
        """Return the keys with the numbers `key_ids`, in order."""
        return tuple(RunKey(key_id=key_id, key=bytes.fromhex(self._state.keys[key_id])) for key_id in sorted(key_ids))

    def bar(self, node_ids: Collection[str]) -> bool:
        """Replace the list of barred nodes, which must not read later publications, by `node_ids`. If a node in it is
        newly barred, make a new key and return True.

        Raises StorageError if the file cannot be written.
        """
        barred = frozenset(node_ids)
        if barred == self._state.barred:
            return False
        keys = dict(self._state.keys)
        is_new = not barred <= self._state.barred
        if is_new:
            keys[max(keys) + 1] = new_key().hex()
        self._write(_State(keys=keys, barred=barred))
        return is_new

    def renew(self) -> None:
        """Create a new key for later publications. Raises StorageError if the file cannot be written."""
        keys = {**self._state.keys, max(self._state.keys) + 1: new_key().hex()}
        self._write(_State(keys=keys, barred=self._state.barred))

    def keep(self, key_ids: Collection[int]) -> None:
        """Delete all keys except those with the numbers `key_ids` and the newest key. Raises StorageError if the file
        cannot be written."""
        newest = self.current.key_id
        kept = {key_id: key for key_id, key in self._state.keys.items() if key_id in key_ids or key_id == newest}
        if kept != self._state.keys:
            self._write(_State(keys=kept, barred=self._state.barred))

    def _write(self, state: _State) -> None:
        with disk_errors("The run's keys cannot be written.", self._path.parent):
            write_private(self._path, state.model_dump_json().encode())
        self._state = state
