"""Event files in RUN/tensorboard, by TensorBoard's own writer. Show them with `tensorboard --logdir RUN/tensorboard`.

Each start of the hub replaces the files, so no step is in them twice, out of order or missing after a crash. The
writer needs neither torch nor TensorFlow.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from echo_hub.dashboard.formats import visible
from echo_hub.sinks.reading import SAMPLES, Entry, Position, SampleText


class TensorBoard:
    """The writer. `directory` holds its files alone."""

    name = "TensorBoard"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: EventFileWriter | None = None

    def open(self) -> Position:
        """Begin a new file in place of those of earlier starts."""
        for old in self._directory.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = EventFileWriter(str(self._directory))
        return Position()

    def write(self, entries: Sequence[Entry], position: Position) -> None:
        """Return when the entries are in the file."""
        assert self._writer is not None, "it is open"
        for entry in entries:
            self._writer.add_event(Event(step=entry.policy_version, wall_time=entry.at, summary=_summary(entry)))
        self._writer.flush()

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
    """Indent prompt and completion: TensorBoard renders Markdown, and shows indented lines as they are."""
    head = f"Reward {text.reward:g}, rollout {text.rollout_id}"
    return "\n\n".join((head, _indented(text.prompt), "---", _indented(text.completion)))


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in visible(text).split("\n"))
