"""What is committed is there after the server ended as a power cut ends it."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from benchmarks.harness.postgresql import lacking, postgresql
from echo_hub.store.database import connect


@pytest.mark.skipif(bool(lacking()), reason=lacking())
def test_it_comes_back_with_what_was_committed() -> None:
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
