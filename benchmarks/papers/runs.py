"""All runs that the wanted tables need, each once, in processes of one thread: in the tables' order, seed by seed."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

from benchmarks.papers.cases import SEEDS, Case
from benchmarks.papers.ran import Ran, carry_out

Found = Mapping[Case, Sequence[Ran]]
"""A run for each seed."""


def carry_out_all(tables: Sequence[Sequence[Case]], seed: int, done: Callable[[int, Found], object]) -> None:
    """`done` is told of each table, by its number, once all of its runs are there."""
    wanted = list(
        dict.fromkeys((case, number % case.runs) for cases in tables for number in range(SEEDS) for case in cases)
    )
    if not wanted:
        return
    ran: dict[tuple[Case, int], Ran] = {}
    waiting = {
        number: {(case, one % case.runs) for case in cases for one in range(SEEDS)}
        for number, cases in enumerate(tables)
    }
    context = multiprocessing.get_context("spawn")
    workers = max(1, min(len(wanted), os.cpu_count() or 1))
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        running: dict[Future[Ran], tuple[Case, int]] = {}

        def begin(start: Case | None) -> None:
            """All that begins with it, or with a base."""
            first = None if start is None else ran[start, 0]
            for case, number in wanted:
                if case.start is start:
                    running[pool.submit(carry_out, case, SEEDS * seed + number, first)] = case, number

        begin(None)
        try:
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    one = running.pop(future)
                    ran[one] = future.result()
                    begin(one[0])
                    for number, missing in list(waiting.items()):
                        missing.discard(one)
                        if not missing:
                            del waiting[number]
                            done(number, _found(tables[number], ran))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    assert not waiting, "a case begins with one that is in no table"


def _found(cases: Sequence[Case], ran: Mapping[tuple[Case, int], Ran]) -> Found:
    return {case: [ran[case, number % case.runs] for number in range(SEEDS)] for case in cases}
