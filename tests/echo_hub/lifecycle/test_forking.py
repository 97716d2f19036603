"""Forks of a run from version 3, which has a checkpoint with optimizer state, and from version 2, which has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save
from sqlalchemy import insert

from echo_hub.actions.requests import SetLearningRate
from echo_hub.commands.action_commands import noted
from echo_hub.config.file import load_config
from echo_hub.lifecycle import forking
from echo_hub.lifecycle.forking import fork, nested, value_of
from echo_hub.run.directory import RunDirectory
from echo_hub.run.start import ADAPTER, CHECKPOINT, read_start, write_checkpoint
from echo_hub.store.database import write_meta
from echo_hub.store.store import Store
from echo_hub.store.tables import groups, live_settings
from echo_shared.errors import ConfigError
from echo_shared.signing import key_file
from tests.echo_hub.lifecycle.test_starting import adapter_of, made

OPTIMIZER = save({"x/exp_avg": np.ones(3, np.float32)})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def parent(tmp_path: Path) -> RunDirectory:
    directory, config = made(tmp_path / "parent", server={"port": 8000}, run={"name": "first"})
    for version in (2, 3):
        adapter_of(config, directory.adapter(version), seed=version)
    (directory.root / "checkpoints").mkdir()
    write_checkpoint(directory.checkpoint(3), contents(directory.adapter(3)), step=3)
    (directory.checkpoint(3) / "optimizer.safetensors").write_bytes(OPTIMIZER)
    marker = json.loads((directory.checkpoint(3) / "checkpoint.json").read_text())
    marker["files"]["optimizer.safetensors"] = len(OPTIMIZER)
    (directory.checkpoint(3) / "checkpoint.json").write_text(json.dumps(marker))
    store = Store.open(directory.database_url)
    store.write(write_meta, "run_id", "id-of-first")
    with store.engine.begin() as connection:
        rows = [{"group_id": 5 * step + n, "seed": 1, "step": step} for step in (1, 2, 3) for n in range(5)]
        columns = {"leased_at", "opened_at", "created_at"} & set(groups.c.keys())
        connection.execute(insert(groups), [{**row, **dict.fromkeys(columns, 1.0)} for row in rows])
    store.close()
    return directory


def forked(parent: RunDirectory, *changes: str, at: int | None = None) -> tuple[RunDirectory, forking.Forked]:
    target = RunDirectory(parent.root.parent / "fork")
    return target, fork(parent, target, at=at, changes=changes)


def test_a_fork_shares_only_the_checkpoint(parent: RunDirectory) -> None:
    target, _ = forked(parent, "training.learning_rate=1e-5", "objective.name=grpo")
    start = read_start(target)
    assert start is not None
    assert (start.policy_version, start.has_optimizer, start.first_group) == (3, True, 20)
    assert start.lineage == ("version 3 of first (id-of-first)",)
    assert contents(target.start / CHECKPOINT) == contents(parent.checkpoint(3))
    weights = "adapter_model.safetensors"
    assert (target.start / ADAPTER / weights).read_bytes() == (parent.adapter(3) / weights).read_bytes()
    config = load_config(target.config, {})
    assert (config.training.learning_rate, config.objective.name, config.run.name) == (1e-5, "grpo", "first")
    assert config.model.start_from == f"{parent.root.resolve()}@3"
    assert config.server.port == 8001, "both runs can be served"
    assert key_file.load(target.key).public_key != key_file.load(parent.key).public_key
    assert not (target.root / "echo.db").exists()


def test_without_a_checkpoint_the_optimizer_starts_fresh(parent: RunDirectory) -> None:
    target, result = forked(parent, at=2)
    assert (result.start.has_optimizer, result.start.first_group, result.checkpoints) == (False, 15, (3,))
    assert (target.start / CHECKPOINT / "optimizer.safetensors").read_bytes() == save({})


def test_an_incomplete_checkpoint_does_not_count(parent: RunDirectory) -> None:
    (parent.checkpoint(3) / "optimizer.safetensors").write_bytes(b"")
    _, result = forked(parent)
    assert (result.start.policy_version, result.start.has_optimizer) == (3, False)


def test_operators_changes_are_inherited(parent: RunDirectory) -> None:
    store = Store.open(parent.database_url)
    noted(store, SetLearningRate(value=0.25))
    with store.engine.begin() as connection:
        connection.execute(insert(live_settings), {"name": "learning_rate", "value": [[2, 0.25]]})
    store.close()
    target, _ = forked(parent)
    assert load_config(target.config, {}).training.learning_rate == 0.25


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["training.lora_rank=4"], r"(?s)cannot change settings that its adapter.*training\.lora_rank = 4, was 2"),
        (
            ["training.lora_targets=mlp"],
            r"(?s)cannot change settings that its adapter.*training\.lora_targets = 'mlp', was 'all'",
        ),
        (["training.rslora=true"], r"(?s)cannot change settings that its adapter.*training\.rslora = True, was False"),
        (["model.base=x/y"], r"(?s)cannot change settings that its adapter.*model\.base"),
        (["model.start_from="], "cannot change settings that its adapter"),
        (["training.steps=3"], r"training\.steps to 4"),
        (["training.stepz=3"], "did you mean"),
        (["training.learning_rate=fast"], r"training\.learning_rate"),
        (["objective.name=aipo", "objective.clip_low=0.1"], "aipo does not use clip_low"),
        (["nothing"], r"form section\.key=value"),
    ],
)
def test_a_forbidden_change_is_refused_and_no_run_is_made(parent: RunDirectory, changes: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        forked(parent, *changes)
    assert not (parent.root.parent / "fork").exists()


def test_missing_versions_are_refused(parent: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)asked for 7.*2, 3"):
        forked(parent, at=7)
    empty, _ = made(tmp_path / "empty")
    Store.open(empty.database_url).close()
    with pytest.raises(ConfigError, match="no version yet"):
        forked(empty)
    with pytest.raises(ConfigError, match="directory already contains a run"):
        fork(parent, empty, at=None, changes=())


def test_a_killed_fork_leaves_no_run_and_can_be_repeated(parent: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(forking, "make_run", kill)
        with pytest.raises(KeyboardInterrupt):
            forked(parent)
    target = RunDirectory(parent.root.parent / "fork")
    assert target.start.exists() and not target.config.exists()
    _, result = forked(parent, at=2)
    assert read_start(target) == result.start and result.start.policy_version == 2


def test_values_are_tomls_or_text() -> None:
    assert nested(["a.b=1", "a.c=[1, 2]", "d.e = x y"]) == {"a": {"b": 1, "c": [1, 2]}, "d": {"e": "x y"}}
    assert [value_of(text) for text in ("true", "1e-5", '"5"', "cosine", "1\nb = 2", "")] == [
        *(True, 1e-5, "5", "cosine", "1\nb = 2", ""),
    ]
