from __future__ import annotations

import stat
from pathlib import Path

import pytest

from echo_hub.config.file import load_config
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run, port_beside
from echo_hub.run.siblings import siblings_of
from echo_shared.errors import ConfigError
from echo_shared.signing import key_file


def made(path: Path, *, port: int = 8710, beside: RunDirectory | None = None) -> RunDirectory:
    make_run(run := RunDirectory(path), load_config(None, {"server": {"port": port}}), beside=beside)
    return run


def test_a_sibling_run_shares_the_hubs_key_and_has_its_own_port(tmp_path: Path) -> None:
    first, stranger = made(tmp_path / "first"), made(tmp_path / "stranger", port=9000)
    assert port_beside(first) == 8711
    second = made(tmp_path / "second", port=8711, beside=first)
    assert key_file.load(second.key).public_key == key_file.load(first.key).public_key
    assert stat.S_IMODE(second.key.stat().st_mode) == 0o600
    assert port_beside(first) == port_beside(second) == 8712 and port_beside(stranger) == 9001
    assert [run.root.name for run in siblings_of(first)] == ["second"]
    assert siblings_of(stranger) == []


def test_if_one_run_uses_any_free_port_siblings_do_too(tmp_path: Path) -> None:
    assert port_beside(made(tmp_path / "first", port=0)) == 0


def test_runs_of_one_hub_are_in_one_directory(tmp_path: Path) -> None:
    first = made(tmp_path / "first")
    with pytest.raises(ConfigError, match=rf"(?s)same parent directory.*Use {tmp_path}/second"):
        made(tmp_path / "deeper" / "second", beside=first)
    assert not (tmp_path / "deeper").exists(), "a refused run leaves nothing"
    with pytest.raises(ConfigError, match="not a run directory"):
        port_beside(RunDirectory(tmp_path / "nowhere"))


def test_a_key_that_is_there_is_never_replaced(tmp_path: Path) -> None:
    first, other = made(tmp_path / "first"), made(tmp_path / "other")
    key = other.key.read_bytes()
    other.config.unlink()
    with pytest.raises(ConfigError, match="another hub's key"):
        made(other.root, beside=first)
    assert other.key.read_bytes() == key
