"""RUN/tensorboard: the run's curves as event files. Watch them with `tensorboard --logdir RUN/tensorboard`.

The files are written anew when the hub starts, so whenever it died no step is there twice, out of order or missing.
Loads no torch.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from echo_hub.dashboard.formats import visible
from echo_hub.sinks.base import SAMPLES, Entry, Position, SampleText

MOST_BUCKETS: Final = 64


class TensorBoard:
    """The sink: writes to `directory`, which is its own."""

    name = "TensorBoard"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._thread = _DaemonThread()
        self._writer: RecordWriter | None = None

    async def open(self) -> Position:
        """A new file in the place of those of earlier starts."""
        self._thread = _DaemonThread()  # One that hangs is left to itself.
        await self._thread.call(self._open)
        return Position()

    async def write(self, entries: Sequence[Entry], position: Position) -> None:
        """On the disk when it returns."""
        await self._thread.call(partial(self._write, entries))

    async def close(self) -> None:
        try:
            await self._thread.call(self._close)
        finally:
            self._thread.end()

    def _close(self) -> None:
        """On the thread, as all that touches the file: an opening that nobody waited for any more is closed, too."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _open(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        for old in self._directory.glob("events.out.tfevents.*"):
            old.unlink()
        # Not TensorBoard's EventFileWriter: it writes on a thread of its own, which ends with whatever a disk refuses.
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter((self._directory / name).open("wb"))
        self._writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        self._writer.flush()

    def _write(self, entries: Sequence[Entry]) -> None:
        assert self._writer is not None, "it is open"
        _write(self._writer, entries)


class _DaemonThread:
    """Carries out one call after the other. A disk that hangs does not hold up the program's end."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def call(self, work: Callable[[], Any]) -> Any:
        """What `work` returns or raises. Cancelled, it goes on with it, and nobody hears of it."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def tell(result: Any, error: BaseException | None) -> None:
            if not done.done():
                done.set_result(result) if error is None else done.set_exception(error)

        def carry_out() -> None:
            try:
                result, error = work(), None
            except Exception as raised:  # noqa: BLE001  # It is handed on to who awaits it.
                result, error = None, raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(tell, result, error)

        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tensorboard", daemon=True)
            self._thread.start()
        self._calls.put(carry_out)
        return await done

    def end(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (work := self._calls.get()) is not None:
            work()


def _write(writer: RecordWriter, entries: Sequence[Entry]) -> None:
    for entry in entries:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in entry.scalars.items()]
        values += [Summary.Value(tag=tag, histo=_histogram(of)) for tag, of in entry.histograms.items()]
        if entry.texts:
            values.append(_texts(entry.texts))
        event = Event(step=entry.policy_version, wall_time=entry.at, summary=Summary(value=values))
        writer.write(event.SerializeToString())
    writer.flush()


def _histogram(values: Sequence[float]) -> HistogramProto:
    numbers = np.asarray(values, np.float64)
    counts, edges = np.histogram(numbers, bins=min(MOST_BUCKETS, max(1, len(np.unique(numbers)))))
    return HistogramProto(
        min=numbers.min(),
        max=numbers.max(),
        num=len(numbers),
        sum=numbers.sum(),
        sum_squares=np.square(numbers).sum(),
        bucket_limit=edges[1:].tolist(),
        bucket=counts.tolist(),
    )


def _texts(texts: Sequence[SampleText]) -> Summary.Value:
    """A text each; TensorBoard takes it for Markdown, in which lines that are indented are shown as they are."""
    shown = [
        "\n\n".join(
            (
                f"Reward {text.reward:g}, rollout {text.rollout_id}",
                _indented(text.prompt),
                "---",
                _indented(text.completion),
            )
        )
        for text in texts
    ]
    tensor = make_tensor_proto([text.encode() for text in shown])
    metadata = create_summary_metadata(display_name=None, description=None)
    return Summary.Value(tag=SAMPLES, tensor=tensor, metadata=metadata)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in visible(text).split("\n"))
