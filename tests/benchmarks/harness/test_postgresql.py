"""Committed data of the benchmarks' PostgreSQL survive a sudden stop of the server, as in a power cut."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from benchmarks.harness.postgresql import lacking, postgresql
from echo_hub.store.database import connect


@pytest.mark.skipif(bool(lacking()), reason=lacking())
def test_a_restarted_server_has_the_committed_rows() -> None:
    with postgresql() as server:
        engine = connect(server.url)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE kept (number integer)"))
            connection.execute(text("INSERT INTO kept VALUES (7)"))
        engine.dispose()
        server.stop()
        server.start()
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT number FROM kept")) == 7
        engine.dispose()
