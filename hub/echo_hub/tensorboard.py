"""RUN/tensorboard: the run's curves as event files. Watch them with `tensorboard --logdir RUN/tensorboard`.

    train/*    the figures of `echo_shared.step_figures`, and the mean reward
    rollouts/* what the step was made of: number, tokens, staleness, and how many a second were trained on
    drops/*    rollouts dropped since the step before, by reason
    eval/*     held-out problems; step is the version that was evaluated

The step is a policy version everywhere, and the wall time that of the hub's books. The store is the truth and the files
follow it: they are written anew when the hub starts, so whenever it died no step is there twice, out of order or
missing. Loads no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from echo_hub.dashboard.model import Changes
from echo_hub.store.store import Store
from echo_shared.books import Evaluation, EvaluationKind, StepRecord

WRITE_EVERY_S: Final = 2.0
"""Writes at most this often, and on the disk at once."""

STEPS_A_READ: Final = 1_000


class EventFiles:
    """Reads the store, writes to `directory`, which is its own. Not for use from two threads at once."""

    def __init__(self, directory: Path, store: Store) -> None:
        self._directory = directory
        self._store = store
        self._newest: StepRecord | None = None
        self._evaluated_at = 0.0

    async def run(self, changes: Changes) -> None:
        """Follows the store for ever."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="tensorboard") as thread:
            writer = await loop.run_in_executor(thread, self.open)
            try:
                while True:
                    seen = changes.number
                    while await loop.run_in_executor(thread, self.catch_up, writer):
                        pass
                    await changes.wait(seen)
                    await asyncio.sleep(WRITE_EVERY_S)
            finally:
                thread.submit(writer.close)  # Behind what is being written now, which is not much.

    def open(self) -> EventFileWriter:
        """A new file in the place of those of earlier starts."""
        for old in self._directory.glob("events.out.tfevents.*"):
            old.unlink()
        return EventFileWriter(str(self._directory))

    def catch_up(self, writer: EventFileWriter) -> bool:
        """Writes what the store has and the file has not, and flushes it; returns whether there is more."""
        records = self._store.steps_history(self._newest.step if self._newest else 0, STEPS_A_READ)
        for record in records:
            _write(writer, record.step, record.trained_at, _of_step(record, self._newest))
            self._newest = record
        for evaluation in self._store.evaluations(self._evaluated_at):
            _write(writer, evaluation.policy_version, evaluation.evaluated_at, _of_evaluation(evaluation))
            self._evaluated_at = max(self._evaluated_at, evaluation.evaluated_at)
        writer.flush()
        return len(records) == STEPS_A_READ


def _write(writer: EventFileWriter, step: int, wall_time: float, scalars: Mapping[str, float]) -> None:
    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
    writer.add_event(Event(step=step, wall_time=wall_time, summary=Summary(value=values)))


def _of_step(record: StepRecord, before: StepRecord | None) -> dict[str, float]:
    dropped = {
        f"drops/{reason}": number - (before.dropped.get(reason, 0) if before else 0)
        for reason, number in record.dropped.items()
    }
    seconds = record.trained_at - before.trained_at if before else 0.0
    return {
        **{f"train/{name}": value for name, value in record.figures.items() if value is not None},
        "train/mean_reward": record.mean_reward,
        "rollouts/number": record.num_rollouts,
        "rollouts/tokens": record.num_tokens,
        "rollouts/groups": record.num_groups,
        "rollouts/staleness_mean": record.staleness_mean,
        "rollouts/staleness_max": record.staleness_max,
        **({"rollouts/per_second": record.num_rollouts / seconds} if seconds > 0 else {}),
        **dropped,
    }


def _of_evaluation(evaluation: Evaluation) -> dict[str, float]:
    sampled = evaluation.kind is EvaluationKind.SAMPLED
    name = "sampled" if sampled else "greedy"
    accuracy = f"eval/mean_at_{evaluation.samples}" if sampled else "eval/greedy_accuracy"
    return {
        accuracy: evaluation.accuracy,
        f"{accuracy}_error": evaluation.accuracy_error,
        **{f"eval/pass_at_{k}": share for k, share in evaluation.pass_at.items()},
        f"eval/{name}_reward": evaluation.mean_reward,
        f"eval/{name}_tokens": evaluation.mean_tokens,
        f"eval/{name}_truncated": evaluation.share_truncated,
        f"eval/{name}_unscored": evaluation.num_unscored,
        f"eval/{name}_seconds": evaluation.seconds,
    }
