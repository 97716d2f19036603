from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from echo_hub.config.file import load_config
from echo_hub.main import app
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_shared.errors import ConfigError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_run(RunDirectory(tmp_path / "run"), load_config(None, {}))
    return tmp_path / "run"


def test_gateway_prints_its_resolved_settings(run: Path) -> None:
    result = CliRunner().invoke(app, ["gateway", str(run), "--host", "0.0.0.0", "--port", "9999", "--dry-run"])
    assert result.exit_code == 0
    section = result.output.partition("[gateways]")[2].partition("\n[")[0]
    assert 'host = "0.0.0.0"' in section and "port = 9999" in section


def test_a_run_without_a_broker_has_no_gateways(run: Path) -> None:
    result = CliRunner().invoke(app, ["gateway", str(run)])
    assert isinstance(result.exception, ConfigError) and "gateways.url" in str(result.exception)


def test_gateway_needs_a_run_directory(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["gateway", str(tmp_path)])
    assert isinstance(result.exception, ConfigError) and "not a run directory" in str(result.exception)
