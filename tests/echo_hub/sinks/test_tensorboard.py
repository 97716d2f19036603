"""Event files that the TensorBoard sink writes, read back by TensorBoard itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from echo_hub.sinks.reading import SAMPLES, EntryReader, Position
from echo_hub.sinks.tensorboard import TensorBoard
from echo_hub.sinks.texts import SampleText
from echo_hub.store.store import Store
from tests.echo_hub.sinks.fixed_texts import FixedTexts
from tests.echo_hub.written_steps import evaluated, train

TEXT = SampleText(rollout_id="1-0", reward=0.5, prompt="1+1=", completion="<script>\n# 2\x1b[2J")


def loaded(directory: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(directory), size_guidance={"tensors": 0})
    accumulator.Reload()
    return accumulator


def read(directory: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Return (step, value, wall time) of every scalar, by tag."""
    accumulator = loaded(directory)
    return {
        tag: [(event.step, event.value, event.wall_time) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_reads_the_stores_figures(store: Store, tmp_path: Path) -> None:
    for step in (1, 2):
        train(store, step)
    store.record_evaluations(evaluated(0, 0.25))
    sink = TensorBoard(tmp_path / "tensorboard")
    reading = EntryReader(store, sink.open())
    sink.write(reading.read(), reading.position)
    found = read(tmp_path / "tensorboard")
    assert found["train/loss"] == [(1, 0.25, 1_004.0), (2, 0.5, 1_008.0)]
    assert found["train/mean_reward"] == [(1, 1.0, 1_004.0), (2, 2.0, 1_008.0)]
    assert found["rollouts/per_second"] == [(2, 0.5, 1_008.0)]
    assert found["eval/greedy_accuracy"] == [(0, 0.25, 2_000.0)]
    train(store, 3)
    sink.write(reading.read(), reading.position)
    found = read(tmp_path / "tensorboard")  # The writer is still open.
    assert [step for step, _, _ in found["train/loss"]] == [1, 2, 3]
    sink.close()


def test_distributions_are_histograms_and_samples_are_texts(store: Store, tmp_path: Path) -> None:
    for step in (1, 2):
        train(store, step)
    sink = TensorBoard(tmp_path)
    reading = EntryReader(store, sink.open(), texts=FixedTexts(TEXT, steps=[2]))
    sink.write(reading.read(), reading.position)
    sink.close()
    files = loaded(tmp_path)
    rewards = files.Tensors("distribution/reward")
    assert [event.step for event in rewards] == [1, 2]
    (left, right, count) = make_ndarray(rewards[1].tensor_proto)[-1]
    assert (left, right, count) == (2.0, 2.0, 2.0)
    lengths = make_ndarray(files.Tensors("distribution/completion_tokens")[0].tensor_proto)
    assert lengths[:, 2].sum() == 2.0
    assert files.SummaryMetadata("distribution/reward").plugin_data.plugin_name == "histograms"
    (event,) = files.Tensors(SAMPLES)
    (shown,) = make_ndarray(event.tensor_proto)
    assert event.step == 2
    assert shown.decode() == "Reward 0.5, rollout 1-0\n\n    1+1=\n\n---\n\n    <script>\n    # 2␛[2J"
    assert files.SummaryMetadata(SAMPLES).plugin_data.plugin_name == "text"


KILLED = """
import sys
from pathlib import Path
from echo_hub.sinks.reading import EntryReader
from echo_hub.sinks.tensorboard import TensorBoard
from echo_hub.store.store import Store

sink = TensorBoard(Path(sys.argv[2]))
reading = EntryReader(Store.open(sys.argv[1]), sink.open())
sink.write(reading.read(), reading.position)
print("written", flush=True)
sys.stdin.read()
"""


def test_after_kill_9_no_step_is_doubled_or_missing(store: Store, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        train(store, step)
    directory = tmp_path / "tensorboard"
    command = [sys.executable, "-c", KILLED, f"sqlite:///{tmp_path / 'echo.db'}", str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as hub:
        assert hub.stdout is not None and hub.stdout.readline() == "written\n"
        os.kill(hub.pid, signal.SIGKILL)
    assert [step for step, _, _ in read(directory)["train/loss"]] == [1, 2, 3]
    (torn,) = directory.iterdir()
    torn.write_bytes(torn.read_bytes()[:-7])
    train(store, 4)
    again = TensorBoard(directory)
    assert again.open() == Position(), "all is written again"
    reading = EntryReader(store, Position())
    again.write(reading.read(), reading.position)
    again.close()
    assert [step for step, _, _ in read(directory)["train/loss"]] == [1, 2, 3, 4]
    assert len(list(directory.iterdir())) == 1


def test_a_disk_error_is_raised_and_ends_when_reopened(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sink = TensorBoard(tmp_path / "file" / "tensorboard")
    with pytest.raises(OSError):
        sink.open()
    sink.close()
    (tmp_path / "file").unlink()
    assert sink.open() == Position()
    sink.close()
