"""Weights & Biases in its own process: the real library, offline, read back from its files; and broken ones."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from echo_hub.config.file import load_config
from echo_hub.config.sections import HubConfig
from echo_hub.sinks.base import Position, SampleText
from echo_hub.sinks.reading import Reading
from echo_hub.sinks.wandb_sink import TOLD_SECTIONS, WandB
from echo_hub.store.store import Store
from echo_shared.errors import ConfigError, EchoError
from tests.echo_hub.written_steps import evaluated, train

pytestmark = pytest.mark.timeout(300)

SECRET = "hunter2-hunter2"
READ = """
import json, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2

def records(data):
    # A log of LevelDB's: blocks of 32 KiB, of records behind checksum, length and kind (1 whole, 2 to 4 its parts).
    place, parts = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        if left < 7 or not kind:
            place += left
            continue
        parts = (b"" if kind in (1, 2) else parts) + data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            yield parts

told = {"history": [], "config": {}}
for path in sorted(Path(sys.argv[1]).glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime):
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = record.history.item
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            told["history"].append(row)
        if kind == "run":
            told["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            told["run"] = [record.run.run_id, record.run.project, record.run.display_name]
print(json.dumps(told))
"""


def config(**metrics: Any) -> HubConfig:
    server = {"invite_tokens": [SECRET]}
    return load_config(None, {"run": {"name": "Tiny"}, "server": server, "metrics": {"wandb": "offline", **metrics}})


def sink(root: Path, settings: HubConfig | None = None) -> WandB:
    return WandB(settings or config(), directory=root / "wandb", logs=root / "logs", run_id="abc-12")


@pytest.fixture
def library() -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")


@pytest.fixture
def library_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """Called with a module's text, which processes that this one starts find in the library's place."""
    (tmp_path / "lib").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"), prepend=os.pathsep)
    return (tmp_path / "lib" / "wandb.py").write_text


def read(directory: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", READ, str(directory)], capture_output=True, text=True, check=True, timeout=120
    )
    told: dict[str, Any] = json.loads(done.stdout)
    return told


async def feed(one: WandB, store: Store, texts: tuple[SampleText, ...] = ()) -> Position:
    reading = Reading(store, await one.open(), texts=lambda step: texts)
    while entries := reading.read():
        await one.write(entries, reading.position)
    await one.close()
    return reading.position


@pytest.mark.usefixtures("library")
async def test_the_real_library_has_all_figures_and_goes_on_after_a_restart(store: Store, tmp_path: Path) -> None:
    for step in (1, 2):
        train(store, step)
    store.record_evaluations(evaluated(0, 0.25))
    text = SampleText(rollout_id="1-0", reward=1.0, prompt="1+1=", completion="2")
    assert await feed(sink(tmp_path), store, (text,)) == Position(step=2, evaluated_at=2_000.0)
    first = read(tmp_path / "wandb")
    assert [row["policy_version"] for row in first["history"]] == [1, 2, 0, 0]
    assert [row.get("train/loss") for row in first["history"]] == [0.25, 0.5, None, None]
    assert first["history"][2]["eval/greedy_accuracy"] == 0.25 and first["history"][0]["at"] == 1_004.0
    second = first["history"][1]
    assert second["distribution/reward/_type"] == "histogram" and sum(second["distribution/reward/values"]) == 2
    assert second["samples/_type"] == "table-file"
    (table,) = (path for path in (tmp_path / "wandb").rglob("samples_0_*.table.json"))
    assert json.loads(table.read_bytes())["data"] == [["1-0", 1.0, "1+1=", "2"]]
    assert first["run"] == ["abc-12", "echo", "Tiny"]
    assert set(first["config"]) - {"_wandb"} == set(TOLD_SECTIONS)
    everything = b"".join(path.read_bytes() for path in (tmp_path / "wandb").rglob("*") if path.is_file())
    assert SECRET.encode() not in everything

    train(store, 3)
    assert (await feed(sink(tmp_path), store)).step == 3
    assert [row["policy_version"] for row in read(tmp_path / "wandb")["history"]] == [1, 2, 0, 0, 3]


@pytest.mark.usefixtures("library")
async def test_online_without_an_account_is_refused_in_time(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    one = sink(tmp_path, config(wandb="online"))
    with pytest.raises(EchoError, match="Weights & Biases has failed") as caught:
        async with asyncio.timeout(120):
            await one.open()
    await one.close()
    assert caught.value.got


async def test_a_missing_library_is_named_with_its_extra(library_is: Callable[[str], object], tmp_path: Path) -> None:
    library_is("raise ImportError('no W&B here')")
    one = sink(tmp_path)
    with pytest.raises(ConfigError, match="not installed") as caught:
        await one.open()
    await one.close()
    assert "no W&B here" in str(caught.value) and "wandb" in str(caught.value.do)


async def test_one_that_raises_is_told_of(library_is: Callable[[str], object], tmp_path: Path) -> None:
    library_is("def Settings(**given): pass\ndef init(**given): raise RuntimeError('no luck')")
    one = sink(tmp_path)
    with pytest.raises(EchoError, match="no luck"):
        await one.open()
    await one.close()


async def test_one_that_hangs_is_killed_with_all_that_it_has_started(
    library_is: Callable[[str], object], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "held")
    library_is(
        "import signal, subprocess\n"
        f"held = open({str(tmp_path / 'held')!r}, 'w')\n"
        "subprocess.Popen(['sleep', '1000'], stdout=held)\n"
        "held.write('up')\nheld.flush()\n"
        "signal.pause()\n"
    )
    one = sink(tmp_path)
    opening = asyncio.create_task(one.open())
    with await asyncio.to_thread((tmp_path / "held").open, "rb") as held:
        assert await asyncio.to_thread(held.read, 2) == b"up"
        opening.cancel()
        await asyncio.wait([opening])
        async with asyncio.timeout(60):
            await one.close()
            assert await asyncio.to_thread(held.read) == b"", "nobody holds it any more"


async def test_a_killed_process_is_an_error_and_the_next_one_goes_on(
    library_is: Callable[[str], object], store: Store, tmp_path: Path
) -> None:
    library_is(
        "class Run:\n"
        "    def define_metric(self, *given, **named): pass\n"
        "    def log(self, row): open('rows', 'a').write(f\"{row['policy_version']}\\n\")\n"
        "    def finish(self): pass\n"
        "def Settings(**given): pass\n"
        f"def init(**given):\n    import os; os.chdir({str(tmp_path)!r}); return Run()\n"
        "def Histogram(values): return list(values)\n"
    )
    for step in (1, 2):
        train(store, step)
    one = sink(tmp_path)
    reading = Reading(store, await one.open())
    await one.write(reading.read(), reading.position)
    (child,) = (each for each in psutil.Process().children() if "echo_hub.sinks.wandb_process" in each.cmdline())
    os.kill(child.pid, signal.SIGKILL)
    train(store, 3)
    with pytest.raises(EchoError):
        await one.write(reading.read(), reading.position)
    await one.close()
    assert (await feed(one, store)).step == 3
    assert (tmp_path / "rows").read_text().split() == ["1", "2", "3"]
