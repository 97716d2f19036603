from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from echo_hub.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path / 'echo.db'}")
    yield opened
    opened.close()
