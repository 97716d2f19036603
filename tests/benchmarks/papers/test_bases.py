from __future__ import annotations

import pytest

from benchmarks.learning.virtual_run import Learning
from benchmarks.papers import bases
from benchmarks.papers.bases import accuracy_of_base
from benchmarks.papers.cases import COLOCATED, Case, smaller, stale


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_base_is_measured_once_for_all_seeds_and_ways_to_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bases, "_found", {})
    sizes = {"evaluation": {"problems": 64}}
    first, second = (smaller(case, sizes) for case in (COLOCATED, Case(name="", settings=stale(3))))
    measured = accuracy_of_base(first.config(0), Learning(first.config(0)).accuracy)
    assert measured == Learning(second.config(7)).accuracy(), "the base's accuracy equals that measured in another run"
    assert 0 < measured < 1
    assert accuracy_of_base(second.config(7), lambda: pytest.fail("it is known")) == measured


@pytest.mark.parametrize(
    "changed",
    [
        {"sampling": {"max_tokens": 5}},
        {"evaluation": {"problems": 3}},
        {"task": {"name": "environment:guess"}},
        {"model": {"base": "builtin:small"}},
    ],
)
def test_another_task_or_base_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, dict[str, object]]
) -> None:
    monkeypatch.setattr(bases, "_found", {})
    assert accuracy_of_base(COLOCATED.config(0), lambda: 0.25) == 0.25
    assert accuracy_of_base(smaller(COLOCATED, changed).config(0), lambda: 0.5) == 0.5
