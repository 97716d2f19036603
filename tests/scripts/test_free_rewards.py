from __future__ import annotations

import pytest

from scripts.free_rewards import main, table


def test_the_dearest_is_first() -> None:
    found = {
        "a": {"empty": 0.0, "copied": 0.01, "line": 0.0, "random": 0.0},
        "b": {"empty": 0.0, "copied": 0.2, "line": 0.62, "random": 0.1},
    }
    assert [line.split("|")[1].strip() for line in table(found).splitlines()[2:]] == ["`b`", "`a`"]


def test_only_rewarding_tasks_are_listed_and_refused_ones_are_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    main(["propositional_logic", "chain_sum", "composite"])
    said = capsys.readouterr()
    assert "`propositional_logic`" in said.out
    assert "composite" not in said.out + said.err
