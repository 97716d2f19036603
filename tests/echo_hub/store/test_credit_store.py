from __future__ import annotations

from pathlib import Path

import pytest

from echo_hub.store.credit_store import CreditStore
from echo_hub.store.database import connect
from echo_shared.credit_books import BoardQuery
from echo_shared.errors import RefusedError, StorageError
from echo_shared.messages import Team, TeamWanted


def test_a_database_that_cannot_be_read_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "echo.db").write_bytes(b"this is no database, and never was" * 100)
    books = CreditStore(connect(f"sqlite:///{tmp_path / 'echo.db'}"))
    with pytest.raises(StorageError, match="cannot be read"):
        books.board(BoardQuery(), 1.0)
    with pytest.raises(StorageError, match="cannot be written"):
        books.remove_team("x")


def test_what_is_refused_changes_nothing(store: object) -> None:
    books = CreditStore(store.engine)  # type: ignore[attr-defined]
    with pytest.raises(RefusedError):
        books.change_team("a", TeamWanted(action="create", name="x"), 1.0)
    assert books.own_team("a", 1.0) == Team()
