"""`echo-hub bundle` and `echo-hub check-bundle` as an operator and a stranger call them."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from benchmarks.harness.forging import changed, in_json
from echo_hub.main import app
from echo_hub.run.directory import RunDirectory
from echo_shared.errors import ConfigError
from echo_shared.signing.identity import Identity, fingerprint
from tests.echo_hub.bundles.conftest import STEPS, bundle, hub_key, run

__all__ = ["bundle", "hub_key", "run"]

STRANGER = Identity.from_seed(bytes(32))


def said(*arguments: str | Path, status: int = 0) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.output


def test_a_bundle_is_written_and_checked(run: RunDirectory, hub_key: Identity, tmp_path: Path) -> None:
    out, figures = tmp_path / "out", tmp_path / "found.json"
    told = said("bundle", run.root, out, "--step", str(STEPS))
    assert f"{STEPS} steps" in told and fingerprint(hub_key.public_key) in told
    key = fingerprint(hub_key.public_key)
    found = said("check-bundle", out, "--share", "0.5", "--hub-key", key, "--device", "cpu", "--json", figures)
    assert "Nothing was found" in found and "equal to the bit" in found and key in found
    assert json.loads(figures.read_text())["discrepancies"] == []


def test_a_forged_bundle_gives_status_1(bundle: Path, hub_key: Identity, tmp_path: Path) -> None:
    forged = changed(bundle, tmp_path / "forged", STRANGER)
    found = said("check-bundle", forged, "--hub-key", fingerprint(hub_key.public_key), "--no-step", status=1)
    assert "FOUND: 1 things" in found and "[key] manifest.json" in found


def test_a_base_model_that_is_not_built_in_must_be_named(bundle: Path, tmp_path: Path) -> None:
    def change(value: dict[str, dict[str, dict[str, str]]]) -> None:
        value["settings"]["model"]["base"] = "somebody/downloads-a-lot"

    forged = changed(bundle, tmp_path / "forged", STRANGER, files={"run.json": lambda one: in_json(one, change)})
    result = CliRunner().invoke(app, ["check-bundle", str(forged)])
    assert isinstance(result.exception, ConfigError) and "--base" in str(result.exception)
    assert "Nothing was found" in said("check-bundle", forged, "--base", "builtin:tiny", "--share", "0", "--no-step")
