"""The benchmark `real` reads the figures of a finished run from the run's database."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.demo import run_demo
from benchmarks.real import FALSE_QUARANTINES, figures_of_run
from echo_hub.config.file import load_config
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.store.store import Store
from tests.echo_hub.written_books import write_books


def test_figures_come_from_the_runs_records(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    make_run(directory, load_config(None, {}))
    store = Store.open(directory.database_url)
    write_books(store)
    store.close()
    found = figures_of_run(directory.root)
    assert found["rewards"] and all(0 <= reward <= 1 for reward in found["rewards"])
    assert found["learner_step_s"] > 0
    assert found["delta_bytes"] is None, "the written versions have no payload"
    assert found[FALSE_QUARANTINES] == 0


def test_a_failed_demo_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    with pytest.raises(subprocess.CalledProcessError, match="status 1"):
        run_demo(tmp_path, 0)
