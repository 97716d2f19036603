"""Event files in RUN/tensorboard, written with TensorBoard's own code. To see them, run `tensorboard --logdir
RUN/tensorboard`.

Each start of the hub replaces the files. So even after a crash, the files contain every step exactly once, in order.
The writer needs neither torch nor TensorFlow. TensorBoard's `EventFileWriter` is not used: if the disk is full, its
writer thread dies with a traceback.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from echo_hub.dashboard.formats import visible
from echo_hub.sinks.reading import SAMPLES, Entry, Position
from echo_hub.sinks.texts import SampleText

_VERSION: Final = "brain.Event:2"
"""Content of an event file's first event, which names the file's format."""


class TensorBoard:
    """Writes the run's metrics for TensorBoard. `directory` holds only TensorBoard's files."""

    name = "TensorBoard"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: RecordWriter | None = None

    def open(self) -> Position:
        """Start a new file, and delete the files of earlier starts."""
        for old in self._directory.glob("events.out.tfevents.*"):
            old.unlink()
        self._directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter((self._directory / name).open("wb"))
        self._add(Event(wall_time=time.time(), file_version=_VERSION))
        self._writer.flush()
        return Position()

    def write(self, entries: Sequence[Entry], position: Position) -> None:
        assert self._writer is not None, "it is open"
        for entry in entries:
            self._add(Event(step=entry.policy_version, wall_time=entry.at, summary=_summary(entry)))
        self._writer.flush()

    def _add(self, event: Event) -> None:
        assert self._writer is not None, "it is open"
        self._writer.write(event.SerializeToString())

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _summary(entry: Entry) -> Summary:
    summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in entry.scalars.items()])
    for tag, values in entry.histograms.items():
        summary.MergeFrom(histogram_pb(tag, np.asarray(values)))
    if entry.texts:
        summary.MergeFrom(text_pb(SAMPLES, [_markdown(text) for text in entry.texts]))
    return summary


def _markdown(text: SampleText) -> str:
    """Return the texts as Markdown, which TensorBoard renders. Indented lines appear unchanged."""
    head = f"Reward {text.reward:g}, rollout {text.rollout_id}"
    return "\n\n".join((head, _indented(text.prompt), "---", _indented(text.completion)))


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in visible(text).split("\n"))
