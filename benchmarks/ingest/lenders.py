"""All processes of lenders together, as the benchmark's own process sees them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Final

from benchmarks.ingest import lender
from benchmarks.ingest.lender import Counts, Load

PROCESSES: Final = 2
JOIN_WITHIN_S: Final = 180.0
ENDS_WITHIN_S: Final = 10.0


class LendersFailed(Exception):
    """A process has ended, or says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lenders:
    """Made by `opened`."""

    pipes: tuple[Connection, ...]

    def load(self, frame_bytes: int, *, per_s: float | None = None) -> None:
        """From now on; None: all that they can."""
        of_each = None if per_s is None else per_s / len(self.pipes)
        for pipe in self.pipes:
            pipe.send(Load(frame_bytes=frame_bytes, per_s=of_each))

    def counts(self) -> Counts:
        """Since it was asked for last."""
        total = Counts()
        for counts in [self._ask(pipe, "counts") for pipe in self.pipes]:
            assert isinstance(counts, Counts)
            total.acked += counts.acked
            total.scored += counts.scored
            total.dropped += counts.dropped
            total.waits_s += counts.waits_s
            total.ended += counts.ended
        return total

    def acked(self) -> list[str]:
        """The ids of all rollouts that ever were."""
        found: list[str] = []
        for pipe in self.pipes:
            answer = self._ask(pipe, "acked")
            assert isinstance(answer, list)
            found += answer
        return found

    def _ask(self, pipe: Connection, what: str) -> object:
        pipe.send(what)
        return answer(pipe, within_s=JOIN_WITHIN_S)


def answer(pipe: Connection, *, within_s: float) -> object:
    """Raises LendersFailed."""
    try:
        if pipe.poll(within_s):
            return pipe.recv()
    except EOFError as error:
        raise LendersFailed("a process of lenders has ended") from error
    raise LendersFailed(f"a process of lenders has said nothing for {within_s:g} s")


@contextmanager
def opened(kind: str, url: str, *, count: int, capacity: int = 0, seed: int) -> Iterator[Lenders]:
    """`count` connections that are open, of the hub's nodes or of the echo's clients. Raises LendersFailed."""
    context = get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    number = min(PROCESSES, count)
    try:
        for place in range(number):
            ours, theirs = context.Pipe()
            of_this = count // number + (place < count % number)
            arguments = (theirs, kind, url, of_this, capacity, seed * number + place)
            process: BaseProcess = context.Process(target=lender.main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        for pipe in pipes:
            answer(pipe, within_s=JOIN_WITHIN_S)
        yield Lenders(pipes=tuple(pipes))
    finally:
        for pipe in pipes:
            pipe.close()
        for one in processes:
            one.join(ENDS_WITHIN_S)
            if one.is_alive():
                one.kill()
                one.join()
