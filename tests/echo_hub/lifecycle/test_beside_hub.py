from __future__ import annotations

from pathlib import Path

import pytest

from echo_hub.config.sections import HubConfig
from echo_hub.lifecycle.beside_hub import store_of, when
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.store.database import read_meta, write_meta
from echo_hub.store.store import Store
from echo_shared.errors import ConfigError


def test_a_runs_store_opens_once_a_hub_has_made_it(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    make_run(directory, HubConfig())
    with pytest.raises(ConfigError, match="not been served yet"), store_of(directory):
        pass
    made = Store.open(directory.database_url)
    made.write(write_meta, "run_id", "r")
    made.close()
    with store_of(directory) as store:
        assert store.read(read_meta) == {"run_id": "r"}


def test_no_time_is_shown_as_nothing() -> None:
    assert when(0.0) == "" and when(1e9).startswith("2001-09-")
