"""Cost of attacks, computed from the rows of whole runs, which themselves take minutes."""

from __future__ import annotations

import pytest

from benchmarks.trust import accuracy
from benchmarks.trust.accuracy import ATTACKS, Case


def test_the_worst_attack_of_each_share_counts() -> None:
    rows = [
        {"case": Case().name, "learned": 0.9},
        {"case": Case(attack=ATTACKS[0], hostile_share=0.01).name, "learned": 0.89},
        {"case": Case(attack=ATTACKS[1], hostile_share=0.01).name, "learned": 0.91},
        {"case": Case(attack=ATTACKS[0], hostile_share=0.01, defended=False).name, "learned": 0.1},
    ]
    assert accuracy.headline(rows) == {"accuracy_lost_at_1pct": pytest.approx(0.01)}
    assert accuracy.headline(rows[1:]) == {}, "no row to compare with"
