"""The number of threads that an engine chooses, on simulated machines. A thread without a free core slows down all
threads, because each step waits for the slowest.
"""

from __future__ import annotations

import pytest

from echo_node.backends.threads import LONGEST_HOLD_S, WINDOW_S, Threads


class Machine:
    """A simulated engine: each doubling of its threads makes it `gain` times as fast, if enough cores are free."""

    def __init__(self, threads: Threads, *, gain: float = 1.8, parallel: float = 1.0) -> None:
        self.threads = threads
        self._gain, self._parallel = gain, parallel
        self.now = 0.0
        self.steps_at: dict[int, int] = {}

    def run(self, seconds: float, *, free: float) -> float:
        """Simulate `seconds` of sampling; return the steps per second."""
        ends_at, steps = self.now + seconds, 0
        while self.now < ends_at:
            count = self.threads.count
            speed = 100.0 * self._gain ** (count.bit_length() - 1)
            cores = 1 + (count - 1) * self._parallel
            if cores > free:
                speed, cores = (speed if count == 1 else speed / 20) * free / count, free
            self.threads.add(1 / speed, cores / speed)
            self.now, steps = self.now + 1 / speed, steps + 1
        return steps / seconds


def test_one_thread_is_left_where_one_core_is_free() -> None:
    machine = Machine(Threads(2, fixed=False))
    machine.run(3, free=1.0)
    assert machine.threads.count == 1
    assert machine.run(300, free=1.0) > 95.0, "trials of two threads take less than 5 % of the speed"


@pytest.mark.parametrize("free", [0.1, 0.4, 0.7])
def test_more_threads_are_not_tried_while_one_lacks_a_core(free: float) -> None:
    machine = Machine(Threads(2, fixed=False))
    machine.run(20, free=free)
    assert machine.run(300, free=free) == pytest.approx(100.0 * free, rel=0.01)


def test_all_threads_stay_on_a_free_machine() -> None:
    threads = Threads(8, fixed=False)
    assert Machine(threads).run(300, free=8.0) == pytest.approx(100 * 1.8**3, rel=0.01)
    assert threads.count == 8


def test_a_model_that_is_parallel_in_part_keeps_the_faster_number() -> None:
    """Threads of this model sometimes wait for each other, so they use less processor time than their cores offer. This
    must not be mistaken for a lack of free cores.
    """
    machine = Machine(Threads(2, fixed=False), gain=1.4, parallel=0.5)
    machine.run(60, free=2.0)
    assert machine.run(600, free=2.0) > 0.98 * 140
    assert machine.threads.count == 2


def test_the_number_follows_the_free_cores() -> None:
    machine = Machine(Threads(8, fixed=False))
    for free, expected in ((8, 8), (5, 5), (1, 1), (8, 8), (2, 2)):
        machine.run(2 * LONGEST_HOLD_S, free=float(free))
        assert machine.threads.count == expected, free


def test_all_cores_are_found_by_a_model_that_is_parallel_in_part() -> None:
    threads = Threads(8, fixed=False)
    threads.count = 1
    Machine(threads, gain=1.4, parallel=0.6).run(60, free=8.0)
    assert threads.count == 8


def test_a_sudden_lack_of_cores_is_answered_within_three_windows() -> None:
    machine = Machine(Threads(4, fixed=False), gain=1.4, parallel=0.8)
    machine.run(2 * LONGEST_HOLD_S, free=4.0)
    assert machine.threads.count == 4
    machine.run(3 * WINDOW_S, free=1.0)
    assert machine.threads.count == 1


def test_more_threads_stay_only_if_they_are_faster() -> None:
    machine = Machine(Threads(2, fixed=False), gain=1.0)
    machine.threads.count = 1
    machine.run(2 * LONGEST_HOLD_S, free=2.0)
    assert machine.threads.count == 1


def test_a_fixed_number_never_changes() -> None:
    threads = Threads(4, fixed=True)
    with threads.begun():
        pass
    Machine(threads).run(60, free=0.2)
    assert threads.count == 4


def test_steps_are_timed_and_loading_counts_free_cores() -> None:
    threads = Threads(1_000, fixed=False)
    with threads.begun():
        sum(range(1_000_000))
    assert 1 <= threads.count < 1_000
    for _ in range(3):
        with threads.step():
            sum(range(1_000_000))
    assert threads.count >= 1
