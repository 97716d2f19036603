"""Carries out the runs of all wanted tables in single-threaded processes: in the tables' order, seed by seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from benchmarks.harness.pool import pool
from benchmarks.papers.cases import MOST_SEEDS, Case
from benchmarks.papers.ran import Ran, carry_out

Found = Mapping[Case, Sequence[Ran]]
"""A run for each seed."""
Wanted = tuple[Sequence[Case], int]
"""A table's cases, and the number of its seeds."""


def runs_of(wanted: Wanted) -> list[tuple[Case, int]]:
    """Runs of a table, by case and number of the seed."""
    cases, seeds = wanted
    return [(case, number) for number in range(seeds) for case in cases if number < case.runs(seeds)]


def carry_out_all(tables: Sequence[Wanted], seed: int, done: Callable[[int, Found], object]) -> None:
    """Carry out all runs. Calls `done` with each table's number and results once its runs are finished."""
    wanted = list(dict.fromkeys(run for table in tables for run in runs_of(table)))
    if not wanted:
        return
    ran: dict[tuple[Case, int], Ran] = {}
    waiting = {number: set(runs_of(table)) for number, table in enumerate(tables)}
    with pool(len(wanted)) as processes:
        running: dict[Future[Ran], tuple[Case, int]] = {}

        def begin(start: Case | None) -> None:
            """Start all cases that begin with this case's first run, or with a base."""
            first = None if start is None else ran[start, 0]
            for case, number in wanted:
                if case.start is start:
                    running[processes.submit(carry_out, case, MOST_SEEDS * seed + number, first)] = case, number

        begin(None)
        try:
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    one = running.pop(future)
                    ran[one] = future.result()
                    if one[1] == 0:
                        begin(one[0])
                    for number, missing in list(waiting.items()):
                        missing.discard(one)
                        if not missing:
                            del waiting[number]
                            done(number, _found(tables[number], ran))
        except BaseException:
            processes.shutdown(cancel_futures=True)
            raise
    assert not waiting, "a case begins with one that is in no table"


def _found(table: Wanted, ran: Mapping[tuple[Case, int], Ran]) -> Found:
    cases, seeds = table
    return {case: [ran[case, number % case.runs(seeds)] for number in range(seeds)] for case in cases}
