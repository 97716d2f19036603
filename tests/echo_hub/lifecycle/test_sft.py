"""Fine-tuning on demonstrations before a run. The run then starts with the resulting adapter. Repeating the finished
command changes nothing."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from echo_hub.config.file import load_config, set_in_file
from echo_hub.learner.sft import SftProgress
from echo_hub.learner.sft_plan import SftSettings
from echo_hub.lifecycle import sft, starting
from echo_hub.lifecycle.forking import fork
from echo_hub.run.directory import RunDirectory
from echo_hub.run.start import CHECKPOINT, read_start
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.database import write_meta
from echo_hub.store.store import Store
from echo_shared.delta.adapter import load_adapter
from echo_shared.errors import ConfigError, StorageError
from tests.echo_hub.lifecycle.test_forking import parent
from tests.echo_hub.lifecycle.test_starting import BASE, adapter_of, made

__all__ = ["parent"]

OPTIONS = SftSettings(epochs=1, batch_tokens=30, heldout=0.25, learning_rate=1e-2)
LINES = [{"prompt": f"{number}+1=", "completion": str(number + 1)} for number in range(12)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def trained(
    directory: RunDirectory,
    file: Path,
    options: SftSettings = OPTIONS,
    *,
    anew: bool = False,
    updates: int | None = None,
) -> sft.Finetuned | None:
    stop = threading.Event()

    class Stopping:
        def tell(self, progress: SftProgress) -> None:
            if progress.update == updates:
                stop.set()

    prepared = sft.prepare(directory, load_config(directory.config, {}), file, options)
    return sft.finetune(prepared, anew=anew, watcher=Stopping(), stop=stop)


def weights(folder: Path) -> dict[str, list[Any]]:
    return {name: tensor.tolist() for name, tensor in load_file(folder / "adapter_model.safetensors").items()}


async def test_a_run_starts_with_the_fine_tuned_adapter(tmp_path: Path, file: Path) -> None:
    directory, _ = made(tmp_path / "run")
    done = trained(directory, file)
    assert done is not None and done.began_with is None and done.adapter == directory.root / "sft"
    config = load_config(directory.config, {})
    assert config.model.start_from == str((directory.root / "sft").resolve())
    figures = json.loads((done.adapter / "sft.json").read_text())
    assert figures["heldout_losses"] == list(done.progress.heldout_losses)
    assert figures["heldout_perplexities"][1] < figures["heldout_perplexities"][0]
    assert load_adapter(done.adapter).modules, "PEFT's layout"
    store = AsyncStore(Store.open(directory.database_url))
    start = await starting.begin(store, directory, config, BASE)
    await store.close()
    assert start is not None and start.lineage == ("the base, fine-tuned on sums.jsonl",)
    assert weights(directory.adapter(1)) == weights(done.adapter)
    with pytest.raises(ConfigError, match="already begun") as error:
        sft.prepare(directory, config, file, OPTIONS)
    assert f"echo-hub fork {directory.root} NEWRUN, echo-hub sft NEWRUN FILE" in str(error.value)


def test_the_same_again_changes_nothing(tmp_path: Path, file: Path) -> None:
    directory, _ = made(tmp_path / "run")
    assert trained(directory, file, updates=1) is None
    assert not (directory.root / "sft").exists() and not load_config(directory.config, {}).model.start_from
    trained(directory, file)
    first, settings = weights(directory.root / "sft"), directory.config.read_text()
    trained(directory, file)
    assert weights(directory.root / "sft") == first and directory.config.read_text() == settings
    other, _ = made(tmp_path / "other")
    trained(other, file)
    assert weights(other.root / "sft") == first, "a seed has one result"


def test_other_options_need_a_word(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _ = made(tmp_path / "run")
    trained(directory, file)
    first = weights(directory.root / "sft")
    other = OPTIONS.model_copy(update={"learning_rate": 2e-2})
    with pytest.raises(ConfigError, match="other options") as error:
        trained(directory, file, other)
    assert error.value.got == "learning_rate = 0.02, was 0.01"
    file.write_text(file.read_text() + json.dumps({"prompt": "7+7=", "completion": "14"}))
    with pytest.raises(ConfigError, match="other options or demonstrations"):
        trained(directory, file)
    assert weights(directory.root / "sft") == first
    monkeypatch.chdir(tmp_path)
    set_in_file(directory.config, "model", "start_from", "run/sft")
    done = trained(directory, file, other, anew=True)
    assert done is not None and done.began_with is None, (
        "it starts with the run's first adapter, not with its own result"
    )
    assert weights(directory.root / "sft") != first


def test_fine_tuning_starts_with_the_runs_start_adapter(tmp_path: Path, file: Path) -> None:
    adapter = adapter_of(made(tmp_path / "other")[1], tmp_path / "mine")
    directory, _ = made(tmp_path / "run", model={"start_from": str(adapter)})
    for anew in (False, True):
        done = trained(directory, file, anew=anew)
        assert done is not None and done.began_with is not None
        assert weights(done.began_with) == weights(adapter)
        assert weights(done.adapter) != weights(adapter)
    start = starting.take_start(directory, load_config(directory.config, {}), BASE)
    assert start.lineage == ("the adapter mine, fine-tuned on sums.jsonl",)


def test_a_version_of_another_run_stays_the_ancestor(parent: RunDirectory, tmp_path: Path, file: Path) -> None:
    directory, _ = made(tmp_path / "run", model={"start_from": f"{parent.root}@2"})
    trained(directory, file)
    trained(directory, file)
    start = starting.take_start(directory, load_config(directory.config, {}), BASE)
    assert start.lineage == ("version 2 of first (id-of-first), fine-tuned on sums.jsonl",)


def test_a_forks_fine_tuning_starts_at_the_forked_step(parent: RunDirectory, tmp_path: Path, file: Path) -> None:
    target = RunDirectory(tmp_path / "fork")
    made_fork = fork(parent, target, at=3, changes=())
    before = weights(target.start / CHECKPOINT)
    for anew in (False, False, True):
        done = trained(target, file, anew=anew)
        assert done is not None and done.began_with is not None and weights(done.began_with) == before
        start = read_start(target)
        assert start is not None and (start.policy_version, start.kind) == (3, "fork")
        assert not start.has_optimizer and start.ancestors == made_fork.start.ancestors
        assert start.sha256 != made_fork.start.sha256
        assert start.lineage == ("version 3 of first (id-of-first), fine-tuned on sums.jsonl",)
        assert weights(target.start / CHECKPOINT) == weights(done.adapter) != before
    assert load_config(target.config, {}).model.start_from == f"{parent.root.resolve()}@3"


def test_a_killed_fine_tuning_leaves_a_fork_complete(
    parent: RunDirectory, tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = RunDirectory(tmp_path / "fork")
    fork(parent, target, at=3, changes=())
    before = weights(target.start / CHECKPOINT)

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(sft, "write_start", kill)
        with pytest.raises(KeyboardInterrupt):
            trained(target, file)
    assert weights(target.start / CHECKPOINT) == before
    done = trained(target, file)
    assert done is not None and done.began_with is not None and weights(done.began_with) == before
    assert weights(target.start / CHECKPOINT) == weights(done.adapter)


def test_unreadable_work_is_reported(tmp_path: Path, file: Path) -> None:
    directory, _ = made(tmp_path / "run")
    trained(directory, file, updates=1)
    (sft.work_of(directory) / "sft.json").write_text("{}")
    with pytest.raises(StorageError, match="record of fine-tuning cannot be read"):
        trained(directory, file)


def test_an_adapters_side_file_must_name_its_origin(tmp_path: Path) -> None:
    config = made(tmp_path / "other")[1]
    adapter = adapter_of(config, tmp_path / "mine")
    (adapter / "sft.json").write_text("[]")
    directory, config = made(tmp_path / "run", model={"start_from": str(adapter)})
    with pytest.raises(ConfigError, match="origin of an adapter"):
        starting.take_start(directory, config, BASE)


def test_a_run_without_a_version_is_not_to_be_forked(tmp_path: Path, file: Path) -> None:
    directory, config = made(tmp_path / "run")
    store = Store.open(directory.database_url)
    store.write(write_meta, "fixed_settings", "{}")
    store.close()
    with pytest.raises(ConfigError, match="already begun") as error:
        sft.prepare(directory, config, file, OPTIONS)
    assert error.value.do is not None and "echo-hub init NEWRUN" in error.value.do
