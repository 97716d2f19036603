"""The real client of Weights & Biases runs in offline mode, and its files are read back. Other tests use broken
clients."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from echo_hub.config.file import load_config
from echo_hub.config.sections import HubConfig
from echo_hub.sinks.reading import EntryReader, Position
from echo_hub.sinks.texts import SampleText
from echo_hub.sinks.wandb_sink import TOLD_SECTIONS, WandB
from echo_hub.store.store import Store
from echo_shared.errors import ConfigError, EchoError
from tests.echo_hub.sinks.fixed_texts import FixedTexts
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
    return WandB(settings or config(), directory=root / "wandb", run_id="abc-12")


@pytest.fixture
def library() -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")


@pytest.fixture
def client_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """Return a function that installs a module with the given source instead of the client."""
    (tmp_path / "lib").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "lib")
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "wandb")
    return (tmp_path / "lib" / "wandb.py").write_text


def read(directory: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", READ, str(directory)], capture_output=True, text=True, check=True, timeout=120
    )
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def feed(one: WandB, store: Store, texts: tuple[SampleText, ...] = ()) -> Position:
    reading = EntryReader(store, one.open(), texts=FixedTexts(*texts))
    while entries := reading.read():
        one.write(entries, reading.position)
    one.close()
    return reading.position


@pytest.mark.usefixtures("library")
def test_the_real_client_has_all_figures_and_resumes_after_a_restart(store: Store, tmp_path: Path) -> None:
    for step in (1, 2):
        train(store, step)
    store.record_evaluations(evaluated(0, 0.25))
    text = SampleText(rollout_id="1-0", reward=1.0, prompt="1+1=", completion="2")
    assert feed(sink(tmp_path), store, (text,)) == Position(step=2, evaluated_at=2_000.0)
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
    assert feed(sink(tmp_path), store).step == 3
    assert [row["policy_version"] for row in read(tmp_path / "wandb")["history"]] == [1, 2, 0, 0, 3]


@pytest.mark.usefixtures("library")
def test_online_without_an_account_is_refused_in_time(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    one = sink(tmp_path, config(wandb="online"))
    began = time.monotonic()
    with pytest.raises(Exception, match=r"(?i)api key|log in|login"):
        one.open()
    one.close()
    assert time.monotonic() - began < 120


@pytest.mark.usefixtures("library")
def test_a_service_that_was_killed_is_an_error_and_the_next_one_resumes(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            services.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    train(store, 1)
    one = sink(tmp_path)
    reading = EntryReader(store, one.open())
    one.write(reading.read(), reading.position)
    (service,) = (one for one in services if "wandb-core" in str(one.args))
    service.kill()
    service.wait()  # If the test did not wait, a later test would get a warning that this process is still running.
    train(store, 2)
    with pytest.raises(OSError):
        one.write(reading.read(), reading.position)
    with suppress(OSError, EchoError):
        one.close()
    assert one.open() == Position(step=1)
    one.close()
    assert feed(one, store).step == 2
    rows = [row["policy_version"] for row in read(tmp_path / "wandb")["history"]]
    assert rows.count(2) == 1


def test_a_missing_client_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Weights & Biases is not installed") as caught:
        sink(tmp_path)
    assert "wandb" in str(caught.value.do) and 'metrics.wandb = "off"' in str(caught.value.do)


def test_an_error_of_the_client_is_raised(client_is: Callable[[str], object], tmp_path: Path) -> None:
    client_is(
        "def Settings(**given): pass\n"
        "def init(**given): raise RuntimeError('no luck')\n"
        "def teardown(): raise SystemExit(3)\n"
    )
    one = sink(tmp_path)
    with pytest.raises(RuntimeError, match="no luck"):
        one.open()
    with pytest.raises(EchoError, match=r"(?s)service.*failed.*exit status 3"):
        one.close()
    one.close()
