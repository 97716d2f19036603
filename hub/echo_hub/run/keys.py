"""The run's keys: what `echo_shared.sealing` seals published files with, known to the run's members alone.

Each has a number; numbers rise by one, and what is published is sealed with the newest. Barring a node makes a new key,
so that it can read nothing that is published afterwards. What was published before it had been able to read anyway.

RUN/run_keys.json is private and written whole. It also says who was barred when the newest key was made: whoever was
barred while the hub was down is noticed at its next start.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from echo_shared.errors import StorageError
from echo_shared.files import disk_errors, write_private
from echo_shared.messages import RunKey
from echo_shared.sealing import KEY_BYTES, new_key

_HexKey = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * KEY_BYTES}}}$")]


class _State(BaseModel):
    """The file."""

    # No key may get into the text of an error.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    keys: Annotated[dict[Annotated[int, Field(ge=0)], _HexKey], Field(min_length=1)]
    barred: frozenset[str] = frozenset()


class RunKeys:
    """Made by `open`. Writes block, for a few milliseconds."""

    def __init__(self, path: Path, state: _State) -> None:
        self._path = path
        self._state = state

    @classmethod
    def open(cls, path: Path) -> RunKeys:
        """The keys in `path`, or a first one, which is then in it. Raises StorageError."""
        try:
            if path.exists():
                return cls(path, _State.model_validate_json(path.read_bytes()))
        except (OSError, ValidationError) as error:
            raise StorageError(
                "The run's keys cannot be read.",
                got=f"{path}: {error}",
                do="Restore the file from a backup, or remove it and RUN/artefacts: all is then published anew.",
            ) from error
        # At random, so that nothing that was sealed before the file was lost is taken for sealed with this key.
        made = cls(path, _State(keys={secrets.randbelow(2**32): new_key().hex()}))
        made._write(made._state)
        return made

    @property
    def current(self) -> RunKey:
        """The key that seals what is published now."""
        return self.named((max(self._state.keys),))[0]

    @property
    def ids(self) -> frozenset[int]:
        return frozenset(self._state.keys)

    def named(self, key_ids: Collection[int]) -> tuple[RunKey, ...]:
        """The keys with these numbers, in order."""
        return tuple(RunKey(key_id=key_id, key=bytes.fromhex(self._state.keys[key_id])) for key_id in sorted(key_ids))

    def bar(self, node_ids: Collection[str]) -> bool:
        """Bars these nodes, and no others, from now on. True when that took a new key: one of them was not.

        Raises StorageError when it cannot be written down.
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
        """What is published from now on is sealed with a new key. Raises StorageError when it cannot be written."""
        keys = {**self._state.keys, max(self._state.keys) + 1: new_key().hex()}
        self._write(_State(keys=keys, barred=self._state.barred))

    def keep(self, key_ids: Collection[int]) -> None:
        """Forgets all keys but these and the newest. Raises StorageError when it cannot be written down."""
        newest = self.current.key_id
        kept = {key_id: key for key_id, key in self._state.keys.items() if key_id in key_ids or key_id == newest}
        if kept != self._state.keys:
            self._write(_State(keys=kept, barred=self._state.barred))

    def _write(self, state: _State) -> None:
        with disk_errors("The run's keys cannot be written.", self._path.parent):
            write_private(self._path, state.model_dump_json().encode())
        self._state = state
