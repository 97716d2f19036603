"""The headline, computed from rows of attacked and of honest runs."""

from __future__ import annotations

from benchmarks.trust import tokens
from benchmarks.trust.tokens import CLASSES, HONEST


def row(**values: object) -> dict[str, object]:
    none = {"forged_trained": 0, "trained": 400, "forged_trained_after": 0, "trained_after": 1_000}
    return {"detected": True, "to_detection": 3, "forged_to_detection": 3, "forged": 10, **none, **values}


def test_headlines_are_of_the_worst() -> None:
    honest = {"false_bans": 1, "verification_share": 0.05}
    rows = [
        row(),
        row(forged=0, trained=9_999),
        row(to_detection=40, forged_to_detection=30, forged=90, forged_trained=20, trained=600, forged_trained_after=1),
        honest,
    ]
    assert tokens.headline(rows) == {
        "worst_rollouts_to_detection": 40,
        "worst_forged_to_detection": 30,
        "poisoned_share_trained": 0.02,
        "poisoned_share_trained_after": 0.0005,
        "false_bans": 1,
        "verification_share": 0.05,
    }
    assert tokens.headline([]) == {}


def test_each_class_runs_its_possible_attacks() -> None:
    assert [one.name for one in CLASSES if "claims to be float32" in one.attacks] == ["q8_0", "q4_k_m"]
    assert not any(HONEST in one.attacks for one in CLASSES)
    assert len({planned.name for planned in tokens.plan()}) == len(tokens.plan())
