from __future__ import annotations

import pytest

from benchmarks.harness.progress import NoSuchCase, Planned, Progress

PLAN = [
    Planned(name="short", seconds=10),
    Planned(name="long, wide", seconds=30),
    Planned(name="long, bfloat16", seconds=30, lacks="this processor does not multiply bfloat16"),
]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_each_case_prints_its_figures_its_time_and_the_remaining_time() -> None:
    lines: list[str] = []
    clock = Clock()
    progress = Progress(PLAN, say=lines.append, clock=clock)
    progress.begin()
    clock.now += 25
    progress.done("short", {"ratio": 0.123456, "runs": 3, "gap": None})
    clock.now += 70
    progress.done("long, wide", {})
    assert lines == [
        "2 cases, about 0:40 min on two cores of a server; next: short",
        "left out: long, bfloat16: this processor does not multiply bfloat16",
        "[1/2] short: ratio 0.1235, runs 3, gap - (0:25 min so far, 1:15 min to go; next: long, wide)",
        "[2/2] long, wide:  (1:35 min so far, 0:00 min to go)",
    ]
    assert progress.as_json() == {
        "seconds": 95.0,
        "left_out": [{"case": "long, bfloat16", "why": "this processor does not multiply bfloat16"}],
    }


@pytest.mark.parametrize(
    ("only", "wanted"),
    [
        ((), ["short", "long, wide"]),
        (("SHORT",), ["short"]),
        (("long*",), ["long, wide"]),
        (("short", "*wide"), ["short", "long, wide"]),
        (("*bfloat16",), []),
    ],
)
def test_only_selects_the_measured_cases(only: tuple[str, ...], wanted: list[str]) -> None:
    progress = Progress(PLAN, only)
    assert [case.name for case in PLAN if progress.wants(case.name)] == wanted


def test_a_name_that_is_not_planned_is_refused_with_those_that_are() -> None:
    with pytest.raises(NoSuchCase, match=r"no case 'shor'; there is: short; long, wide; long, bfloat16"):
        Progress(PLAN, ["short", "shor"])


def test_unrequested_cases_do_not_count_as_left_out() -> None:
    assert Progress(PLAN, ["short"]).left_out == {}
    assert [*Progress(PLAN, ["long*"]).left_out] == ["long, bfloat16"]


def test_a_case_may_be_given_up_later() -> None:
    lines: list[str] = []
    progress = Progress(PLAN, ["short"], say=lines.append)
    progress.leave_out("short", "15 minutes had passed")
    assert not progress.wants("short")
    assert progress.left_out == {"short": "15 minutes had passed"}
    assert lines == ["left out: short: 15 minutes had passed"]


@pytest.mark.parametrize(
    ("each_s", "least", "expected"),
    [(0.0, 1, 5), (2.0, 1, 5), (3.0, 1, 3), (6.0, 1, 1), (60.0, 1, 1), (60.0, 2, 2), (60.0, 9, 5)],
)
def test_slow_repetitions_are_fewer(each_s: float, least: int, expected: int) -> None:
    clock = Clock()
    counted = []
    for number in Progress(PLAN, clock=clock).repetitions(5, within_s=10.0, least=least):
        counted.append(number)
        clock.now += each_s
    assert counted == list(range(expected))
